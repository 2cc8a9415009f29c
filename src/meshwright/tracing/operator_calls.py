"""Collect the distinct operators of a rank's step: what to call, on tensors of which layout, and how often."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from meshwright.assemble.check import check
from meshwright.describe.flops import ALLOCATIONS
from meshwright.errors import MeshwrightError, Refused, one_line
from meshwright.facts.job import Job
from meshwright.facts.model import ModelFacts
from meshwright.facts.strategy import Strategy
from meshwright.recording.report_as_cpu import change_leaves
from meshwright.strategies import Place
from meshwright.strategies.norm import local
from meshwright.strategies.pipeline.sizes import is_pipelined
from meshwright.torch_private.modes import TorchDispatchMode
from meshwright.torch_private.tensors import storage_id
from meshwright.tracing.block_stack import find_repeated_blocks
from meshwright.tracing.extrapolate import with_fewer_blocks
from meshwright.tracing.meter import OperatorRun, is_view, operator_run, strided_in
from meshwright.tracing.record_step import StepObserver, record_step
from meshwright.tracing.recorder import StepRecorder

BLOCKS = 4
"""Alike blocks of the traced model. The operators of more blocks are the same ones."""


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """A tensor without values. Equal numbers within one call stand for the same tensor."""

    number: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    origin: tuple[str, int] | None = None
    """Of bytes that another operator made, such as a recurrent layer's workspace: its signature, and which result."""

    def __str__(self) -> str:
        shape, stride = (",".join(map(str, sizes)) for sizes in (self.shape, self.stride))
        return f"#{self.number}:{str(self.dtype).removeprefix('torch.')}[{shape}]({stride})"


@dataclass
class OperatorCall:
    """One distinct operator of a step."""

    operator: Any
    """The overload, such as `torch.ops.aten.mm.default`."""
    args: Any
    kwargs: Any
    """Arguments with a `TensorLayout` in place of each tensor."""
    run: OperatorRun
    signature: str
    counts: dict[str, int] = field(default_factory=dict)
    """How often it runs in each phase: "forward", "backward", "update"."""

    @property
    def count(self) -> int:
        return sum(self.counts.values())


@dataclass(frozen=True)
class StepCalls:
    """The distinct operators of a rank's step, and the elements of its trainable parameters."""

    calls: list[OperatorCall]
    elements: int


def step_calls(
    job: Job, facts: ModelFacts, strategy: Strategy, *, ranks: int, rank: int = 0, device: str = "cuda"
) -> StepCalls:
    """The distinct operators that `rank` of `ranks` runs in one optimizer step on a device.

    Of a model with many equal blocks, only some are traced, so counts and elements are those of a shorter model.
    """
    if facts.unseen:
        raise Refused(f"The model does not run on fake tensors, so its operators cannot be listed: {facts.unseen}.")
    resolved = check(job, facts, strategy, Place(device="cpu", devices=ranks, ranks=ranks, local_ranks=1))
    job, facts = _shorter(job, facts, resolved)
    observer = _StepCollector()
    try:
        record_step(job, facts, resolved, ranks, rank, observer=observer, workspaces=False, device=device)
    except MeshwrightError:
        raise
    except Exception as error:
        raise Refused(f"A step under {resolved} cannot be traced on fake tensors: {one_line(error)}") from error
    return StepCalls(list(observer.collector.calls.values()), observer.elements)


def _shorter(job: Job, facts: ModelFacts, strategy: Strategy) -> tuple[Job, ModelFacts]:
    stack = find_repeated_blocks(facts)
    if stack is None or stack.blocks <= BLOCKS or is_pipelined(strategy):
        return job, facts
    found = with_fewer_blocks(job, facts, strategy, stack, BLOCKS)
    return (found.job, found.facts) if found is not None else (job, facts)


@dataclass
class CallCollector:
    """Notes every distinct operator once, and counts it."""

    calls: dict[str, OperatorCall] = field(default_factory=dict)
    _origins: dict[int, tuple[str, int]] = field(default_factory=dict)
    """Who made the bytes in a storage."""
    _bytes: list[torch.Tensor] = field(default_factory=list)
    """Kept, so that their storages' numbers are not used again."""

    def note(self, func: Any, args: Any, kwargs: Any, found: Any, phase: str) -> None:
        numbers: dict[int, int] = {}

        def layout(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor) or leaf.layout != torch.strided:
                return leaf
            number = numbers.setdefault(id(leaf), len(numbers))
            origin = self._origins.get(storage_id(leaf.untyped_storage())) if leaf.dtype == torch.uint8 else None
            return TensorLayout(number, tuple(leaf.shape), tuple(leaf.stride()), leaf.dtype, origin)

        given, named = change_leaves(layout, (args, kwargs))
        named.pop("pin_memory", None)
        signature = _signature(func, given, named)
        if signature not in self.calls:
            run = operator_run(func, args, kwargs, found, strided_in((args, kwargs)), strided_in(found))
            self.calls[signature] = OperatorCall(func, given, named, run, signature)
        counts = self.calls[signature].counts
        counts[phase] = counts.get(phase, 0) + 1
        for place, result in enumerate(found if isinstance(found, tuple | list) else (found,)):
            if isinstance(result, torch.Tensor) and result.dtype == torch.uint8:
                self._origins[storage_id(result.untyped_storage())] = signature, place
                self._bytes.append(result)


class _StepCollector(StepObserver):
    """Collects the operators of the recorded step."""

    def __init__(self) -> None:
        self.collector, self.elements = CallCollector(), 0
        self._models: list[nn.Module] = []
        self._is_on = False

    def attach(self, models: Iterable[nn.Module], recorder: StepRecorder) -> None:
        self._models = list(models)
        recorder.operations.seen = self._seen

    def begin(self) -> None:
        self._is_on = True

    def end(self) -> None:
        self._is_on = False
        own = (parameter for model in self._models for parameter in model.parameters() if parameter.requires_grad)
        self.elements = sum(local(parameter).numel() for parameter in own)

    def _seen(self, func: Any, args: Any, kwargs: Any, found: Any, phase: str) -> None:
        if self._is_on:
            self.collector.note(func, args, kwargs, found, phase)


class FunctionCalls(TorchDispatchMode):
    """While active on fake tensors, collects the operators of functions that are no step, such as one attention."""

    def __init__(self) -> None:
        super().__init__()
        self.collector = CallCollector()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        found = func(*args, **kwargs)
        runs = func.overloadpacket.__name__ not in ALLOCATIONS
        if runs and not is_view(func, strided_in((args, kwargs)), strided_in(found)):
            self.collector.note(func, args, kwargs, found, "forward")
        return found


def _signature(func: Any, args: Any, kwargs: Any) -> str:
    words = [*map(_words, args), *(f"{name}={_words(value)}" for name, value in kwargs.items())]
    return f"{func}({', '.join(words)})"


def _words(value: Any) -> str:
    """An argument in a signature. Numbers do not change the time, except that a dropout of 0 does nothing."""
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_words, value))}]"
    return "float" if isinstance(value, float) and value else str(value)
