"""The kinds of tensors that a pass over a model tries in turn: meta, then fake, then real ones.

A pass needs structure: shapes, who reads what, which tensors are saved. Meta tensors are fastest and do least. Fake
tensors take twice the time; they know devices and constants. Real tensors need memory, so only a small model that reads
values uses them. A rung is a context that makes tensors of one kind. It yields a function that converts a batch's
tensors to that kind.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any, TypeVar

import torch
from torch import nn

from meshwright.describe.as_on_cuda import as_on_cpu
from meshwright.describe.meta_pass import meta_of, meta_pass
from meshwright.describe.structure import map_tensors
from meshwright.recording.blueprint import as_it_was
from meshwright.torch_private.fake_tensors import FAKE_TENSOR_LOG, FakeTensorMode

Convert = Callable[[torch.Tensor], torch.Tensor]
Rung = Callable[[nn.Module], AbstractContextManager[Convert]]
Device = Callable[[], AbstractContextManager[None]]
Result = TypeVar("Result")

SMALL = 1 << 28
"""The largest model, in parameters, that may run on real tensors."""


def climb(model: nn.Module, batch: Any, run: Callable[[Any], Result], *rungs: Rung) -> Result:
    """The result of `run(batch)` on the first rung that works. Raises what the last rung raised."""
    *others, last = rungs
    for rung in others:
        with suppress(Exception), rung(model) as convert:
            return run(map_tensors(convert, batch))
    with last(model) as convert:
        return run(map_tensors(convert, batch))


def is_small(model: nn.Module) -> bool:
    return sum(parameter.numel() for parameter in model.parameters()) <= SMALL


@contextmanager
def on_meta(model: nn.Module, *, device: Device = as_on_cpu) -> Iterator[Convert]:
    with as_it_was(model), meta_pass(model), device():
        yield meta_of


@contextmanager
def on_fake(model: nn.Module, *, mode: FakeTensorMode | None = None, device: Device = nullcontext) -> Iterator[Convert]:
    logging.getLogger(FAKE_TENSOR_LOG).setLevel(logging.CRITICAL)  # it logs what it raises
    with as_it_was(model), mode or fake_mode() as active, device():
        yield lambda tensor: active.from_tensor(tensor.cpu())


@contextmanager
def on_real(model: nn.Module, *, copies: bool = True) -> Iterator[Convert]:
    """With `copies`, the batch is copied, because the model may change its inputs in place."""
    yield lambda tensor: tensor.detach().cpu().clone() if copies else tensor.cpu()


def fake_mode() -> FakeTensorMode:
    return FakeTensorMode(allow_non_fake_inputs=True)
