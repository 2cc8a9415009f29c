"""The tensors of a pass over a model without its weights: their kinds, stand-ins for the model's, and a cache of them.

A pass needs structure: shapes, who reads what, which tensors are saved. Meta tensors are fastest and do least. Fake
tensors take twice the time; they know devices and constants. With known values beside them, a model that reads values
runs too. Real tensors need memory, so only a small model uses them. A rung is a context that makes tensors of one kind.
It yields a function that converts a batch's tensors to that kind. A pass tries the rungs in this order.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import nn

from meshwright.describe.as_on_cuda import as_on_cpu, steps_at_once
from meshwright.describe.calls import Flow
from meshwright.describe.known_values import known_values, set_value
from meshwright.describe.meta_pass import meta_pass
from meshwright.describe.read_values import ReadValues
from meshwright.describe.repeats import Repeats
from meshwright.describe.structure import map_tensors
from meshwright.recording.blueprint import Blueprint, as_it_was, seeded, set_attributes
from meshwright.recording.caches import forgetting
from meshwright.recording.operation import Slot
from meshwright.recording.report_as_cpu import is_meta, meta_of
from meshwright.torch_private.fake_tensors import FAKE_TENSOR_LOG, FakeTensor, FakeTensorMode
from meshwright.torch_private.modules import lend_tensors

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
    with forgetting(model), as_it_was(model), meta_pass(model), device():
        yield meta_of


@contextmanager
def on_fake(
    model: nn.Module, *, mode: FakeTensorMode | None = None, device: Device = steps_at_once
) -> Iterator[Convert]:
    logging.getLogger(FAKE_TENSOR_LOG).setLevel(logging.CRITICAL)  # it logs what it raises
    with forgetting(model), as_it_was(model), mode or fake_mode() as active, device():
        yield lambda tensor: active.from_tensor(tensor.cpu())


@contextmanager
def on_fake_with_values(
    model: nn.Module, *, reads: ReadValues, device: Device = steps_at_once, seed: int | None = None
) -> Iterator[Convert]:
    """Fake tensors with values where a model reads them. Without a seed, its random numbers are the expected ones."""
    plain = on_fake(model, device=nullcontext)
    with seeded(seed or 0), plain as convert, known_values(reads, draws=seed is not None), device():
        yield lambda tensor: set_value(convert(tensor), tensor)


@contextmanager
def on_real(model: nn.Module, *, copies: bool = True) -> Iterator[Convert]:
    """With `copies`, the batch is copied, because the model may change its inputs in place."""
    yield lambda tensor: tensor.detach().cpu().clone() if copies else tensor.cpu()


def fake_mode() -> FakeTensorMode:
    return FakeTensorMode(allow_non_fake_inputs=True)


def stand_in(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """A stand-in of the kind that is active: meta, fake or real. `dtype` applies to floating tensors only."""
    dtype = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
    if not is_meta(tensor):
        return tensor.detach().to(dtype, copy=True)
    empty = torch.empty_strided(tensor.size(), tensor.stride(), dtype=dtype, device="cpu")
    if has_no_values(empty):
        return empty
    return empty.normal_(std=0.02) if empty.is_floating_point() else empty.zero_()


def has_no_values(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, FakeTensor) or is_meta(tensor)


def _parameter(name: str, parameter: nn.Parameter) -> torch.Tensor:
    """An nn.Parameter, because a model may look for parameters among its attributes."""
    return nn.Parameter(stand_in(parameter), requires_grad=parameter.requires_grad)


def stand_ins(
    blueprint: Blueprint, parameter: Callable[[str, nn.Parameter], torch.Tensor] = _parameter
) -> dict[str, torch.Tensor]:
    """Stand-ins for all parameters and buffers by name. Those of plain attributes are set at once."""
    fill_attributes(blueprint)
    model = blueprint.model
    tensors = {name: parameter(name, p) for name, p in model.named_parameters()}
    return tensors | {name: stand_in(b) for name, b in model.named_buffers()}


def fill_attributes(blueprint: Blueprint) -> None:
    """Set stand-ins for tensors that are neither parameters nor buffers."""

    def make(slot: Slot) -> torch.Tensor:
        return stand_in(torch.empty_strided(slot.size, slot.stride, dtype=slot.dtype, device="meta"))

    set_attributes(blueprint.model, blueprint.attributes, make)


def lend(model: nn.Module, tensors: dict[str, torch.Tensor]) -> AbstractContextManager[Any]:
    """Context in which a model uses other tensors. Unlike `functional_call`, it also covers recomputing in backward."""
    return lend_tensors(model, tensors, tie_weights=True)


class PassCache:
    """The stand-ins, repeated blocks and flows of one model."""

    def __init__(self, repeats: Repeats) -> None:
        self.repeats = repeats
        self.flows: dict[frozenset[str], Flow] = {}
        """By the set of watched modules."""
        self.runs = True
        """Whether passes without values may run; False once one of them needed values."""
        self._tries_meta = True
        self._tensors: dict[str, torch.Tensor] = {}

    @property
    def rungs(self) -> list[Rung]:
        """Meta tensors until a pass fails on them, then fake ones."""
        return [self._on_meta, self._on_fake] if self._tries_meta else [self._on_fake]

    def stand_ins(self, blueprint: Blueprint) -> dict[str, torch.Tensor]:
        """Stand-ins for one pass, in a new dict that the pass may change."""
        if self._tensors:
            fill_attributes(blueprint)
        else:
            self._tensors = stand_ins(blueprint)
        return dict(self._tensors)

    @contextmanager
    def _on_meta(self, model: nn.Module) -> Iterator[Convert]:
        try:
            with on_meta(model) as convert:
                yield convert
        except Exception:
            self._tries_meta, self._tensors = False, {}
            raise

    def _on_fake(self, model: nn.Module) -> AbstractContextManager[Convert]:
        return on_fake(model, mode=self._mode)

    @cached_property
    def _mode(self) -> FakeTensorMode:
        """Made only when needed: the first one takes PyTorch a second."""
        return fake_mode()
