"""Copies of the parameters that a step makes once: what reads them, what they cost, and when they end."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from meshwright.assemble import low_copies
from meshwright.assemble.low_copies import LowCopies
from meshwright.assemble.precision import apply_precision, cast_parameters
from minimal import WIDTH, Blocks, make_job, make_trainer

BF16 = torch.bfloat16


def lowered() -> tuple[Blocks, LowCopies]:
    torch.manual_seed(0)
    model = Blocks()
    apply_precision(model, list(model.blocks), BF16, pure=False)
    return model, LowCopies(model, BF16)


def gradients_of(model: nn.Module, x: Tensor) -> list[Tensor]:
    model.zero_grad()
    model(x).float().square().sum().backward()
    return [parameter.grad for parameter in model.parameters()]


@pytest.fixture
def casts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of tensors in each grouped cast."""
    found: list[int] = []
    original = low_copies.foreach_copy_

    def count(target: list[Tensor], source: list[Tensor]) -> Any:
        found.append(len(target))
        return original(target, source)

    monkeypatch.setattr(low_copies, "foreach_copy_", count)
    return found


def test_gradients_are_those_of_casts_where_parameters_are_read() -> None:
    x = torch.randn(3, WIDTH)
    model, copies = lowered()
    expected = gradients_of(model, x)
    with copies.shared():
        found = gradients_of(model, x)
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == torch.float32
        assert torch.equal(one, other)


def test_many_passes_share_them_in_any_order() -> None:
    first, second = torch.randn(3, WIDTH), torch.randn(3, WIDTH)
    model, copies = lowered()
    expected = [a + b for a, b in zip(gradients_of(model, first), gradients_of(model, second), strict=True)]
    model.zero_grad()
    with copies.shared():
        losses = [model(x).float().square().sum() for x in (first, second)]
        losses[0].backward()
        losses[1].backward()
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


def test_a_step_casts_all_blocks_at_once_and_each_ones_gradients_once_a_micro_batch(casts: list[int]) -> None:
    job = make_job(model=Blocks)
    trainer = make_trainer(job, "single,bf16,mb=2")
    blocks = len(trainer.facts.blocks)
    for _ in range(2):
        casts.clear()
        trainer.step(job.sample(8))
        assert casts[0] == 4 + 6 * blocks  # what is around the blocks, and the blocks
        assert sorted(casts[1:]) == sorted(4 * [4, *[6] * blocks])


def test_copies_end_with_the_step_and_see_what_the_masters_are() -> None:
    model, copies = lowered()
    layer = next(module for module in model.modules() if isinstance(module, nn.Linear))
    with copies.shared():
        assert layer.weight is layer.weight
        with torch.no_grad():
            layer._parameters["weight"].zero_()
        assert layer.weight.any()
    assert layer.weight is not layer.weight and not layer.weight.any()
    with copies.shared():
        assert not layer.weight.any()


def test_a_blocks_copies_are_freed_after_its_last_backward() -> None:
    model, copies = lowered()
    held: list[int] = []
    layer = next(module for module in model.blocks[-1].modules() if isinstance(module, nn.Linear))
    with copies.shared(passes=2):
        for _ in range(2):
            gradients_of(model, torch.randn(3, WIDTH))
            held.append(len(vars(layer)[low_copies.ATTRIBUTE]))
    assert held == [2, 0]


def test_nothing_is_linked_without_gradients() -> None:
    model, copies = lowered()
    with torch.no_grad(), copies.shared():
        assert all(not tensor.requires_grad for tensor in (model.blocks[0].up.weight, model(torch.randn(2, WIDTH))))


def test_another_tensor_in_a_parameters_place_is_read() -> None:
    model, copies = lowered()
    others = {name: torch.zeros_like(parameter) for name, parameter in model.named_parameters()}
    with copies.shared():
        assert not functional_call(model, others, (torch.randn(2, WIDTH),)).any()


def test_a_module_copied_in_a_step_reads_its_own_parameters() -> None:
    model, copies = lowered()
    with copies.shared():
        twin = copy.deepcopy(model)
        with torch.no_grad():
            for parameter in twin.parameters():
                parameter.zero_()
        assert not twin(torch.randn(2, WIDTH)).any()


class Uneven(nn.Module):
    """One parameter is not used, one is used twice, one is frozen, one is looked up."""

    def __init__(self, *, sparse: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(7, WIDTH, sparse=sparse)
        self.twice, self.never, self.frozen = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.frozen.requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.twice(self.frozen(self.twice(self.table(tokens))))


@pytest.mark.parametrize("sparse", [False, True])
def test_gradients_that_are_missing_sparse_or_summed(sparse: bool) -> None:
    tokens = torch.tensor([1, 2, 2])
    plain, model = Uneven(sparse=False), Uneven(sparse=sparse)
    model.load_state_dict(plain.state_dict())
    for each in (plain, model):
        cast_parameters(each, BF16)
    plain(tokens).float().square().sum().backward()  # PyTorch casts no sparse gradient back
    expected = [parameter.grad for parameter in plain.parameters()]
    with LowCopies(model, BF16).shared():
        model(tokens).float().square().sum().backward()
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        if gradient is None:
            assert parameter.grad is None
        else:  # a parameter that is read twice sums its gradients in bf16
            found = parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad
            torch.testing.assert_close(found, gradient, rtol=2e-2, atol=2e-2)


def test_a_gradient_of_a_gradient() -> None:
    model, copies = lowered()
    x = torch.randn(2, WIDTH, requires_grad=True)

    def penalty() -> list[Tensor]:
        model.zero_grad()
        (slope,) = torch.autograd.grad(model(x).float().sum(), x, create_graph=True)
        slope.square().sum().backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    expected = penalty()
    with copies.shared():
        found = penalty()
    assert found and len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_compiled_models_read_them() -> None:
    x = torch.randn(3, WIDTH)
    model, copies = lowered()
    expected = gradients_of(model, x)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for _ in range(2):
        with copies.shared():
            found = gradients_of(compiled, x)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other)
