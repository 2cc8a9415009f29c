from contextlib import nullcontext

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from meshwright.torch_private.checkpointing import run_once


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("once", [False, True])
def test_checkpointed_functions_run_once_or_as_usual(reentrant: bool, once: bool) -> None:
    calls = 0

    def function(x: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return x.sin().exp()

    x = torch.ones(3, requires_grad=True)
    with run_once(lambda contexts: nullcontext() if once else None):
        checkpoint(function, x, use_reentrant=reentrant).sum().backward()
    assert calls == (1 if once else 2)
    assert torch.equal(x.grad, torch.autograd.grad(x.sin().exp().sum(), x)[0])


def test_the_contexts_of_a_selective_checkpoint_are_passed_on() -> None:
    seen = []

    def contexts() -> tuple[object, object]:
        return create_selective_checkpoint_contexts([torch.ops.aten.mm.default])

    with run_once(lambda found: seen.append(found) or nullcontext()):  # type: ignore[func-returns-value]
        checkpoint(torch.sin, torch.ones(3, requires_grad=True), use_reentrant=False, context_fn=contexts)
        checkpoint(torch.sin, torch.ones(3, requires_grad=True), use_reentrant=False)
    assert seen == [contexts, None]


def test_an_error_passes_through() -> None:
    def broken(x: Tensor) -> Tensor:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"), run_once(lambda contexts: nullcontext()):
        checkpoint(broken, torch.ones(3), use_reentrant=False)
