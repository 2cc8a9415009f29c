"""Measure the `ModelCosts` of a job: one step of the plain model without values, for two micro-batch sizes.

The affine cost model: bytes and operations of each unit are `constant + samples * slope`, fixed by the two sizes. Peaks
of many samples have another slope if another moment is the fullest then, which larger sizes show.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from math import isclose
from typing import Any

import torch
from torch import nn

from meshwright.assemble.float8 import float8_layers, multiply_in_float8
from meshwright.assemble.precision import apply_precision, loss_under
from meshwright.assemble.recompute import recompute_blocks
from meshwright.describe.as_on_cuda import as_on_cuda
from meshwright.describe.block_equality import arrival_of, cost_keys
from meshwright.describe.code_lines import failed_line
from meshwright.describe.dtypes import DTYPES
from meshwright.describe.library_checks import fakes_pass_as_real
from meshwright.describe.observe import call_model, make_batch
from meshwright.describe.pass_tensors import (
    Rung,
    climb,
    is_small,
    lend,
    on_fake,
    on_fake_with_values,
    on_meta,
    on_real,
    stand_in,
    stand_ins,
)
from meshwright.describe.read_values import ReadValues
from meshwright.describe.structure import tensors_of
from meshwright.describe.template import MadeTensor
from meshwright.errors import JobError, one_line
from meshwright.facts.costs import Kernel, ModelCosts, Peak, Size, UnitCosts
from meshwright.facts.job import Job
from meshwright.facts.model import ModelFacts
from meshwright.facts.precision import FORMATS
from meshwright.importing import without_garbage_collection
from meshwright.recording.blueprint import Blueprint, record
from meshwright.recording.wrap_forward import replaced_forwards
from meshwright.torch_private.trees import tree_flatten, tree_map_only
from meshwright.tracing.meter import OperatorRun, aligned
from meshwright.tracing.unit_recorder import Segment, UnitRecorder

SIZES = (2, 4)
"""Samples in the two traces. With one sample, BatchNorm would have no variance."""
MANY = 64
"""Samples of a third trace, whose peaks may be at other moments."""
LARGE_BATCH = 2**26
"""Bytes of a batch up to which a fourth trace takes more samples, if the job does: rows of a table are small."""
NEARLY = 0.01
"""Share by which the peak of many samples may differ from what the two traces say, and counts as the same."""


@without_garbage_collection()
def measure_costs(
    job: Job, facts: ModelFacts, precision: str, recompute: str = "none", device: str = "cuda"
) -> ModelCosts:
    """The costs of a job's micro-batch under a precision, as a CUDA device would run it, or a CPU.

    With `recompute`, blocks are traced with recomputation; `ModelCosts.recomputed` derives nearly the same from a plain
    trace.
    """
    if facts.unseen:
        raise JobError(f"The model's step could not be traced on fake tensors: {facts.unseen}.")
    blueprint = record(job.model, seed=0, values=False)
    blocks = [blueprint.model.get_submodule(name) for name in facts.blocks]
    kinds = _kinds(facts, blocks)
    if FORMATS[precision].factors:
        multiply_in_float8(blueprint.model, float8_layers(blueprint.model, facts))
    apply_precision(blueprint.model, blocks, DTYPES[precision], pure=False, left_to_cast=())
    if recompute != "none":
        recompute_blocks(blocks or [blueprint.model], recompute)
    small, large = (_trace(job, facts, blueprint, kinds, precision, samples, device) for samples in SIZES)
    units = [_unit(low, high) for low, high in zip(small, large, strict=True)]
    if not facts.by_value and _runs_alike(small, large):  # else a third trace would take many times as long
        sizes = [*SIZES, *_larger_sizes(job)]
        more = (_trace(job, facts, blueprint, kinds, precision, samples, device) for samples in sizes[len(SIZES) :])
        units = [_with_peaks(unit, sizes, found) for unit, *found in zip(units, small, large, *more, strict=True)]
    twins = [
        unit if segment.ran_as is None else replace(units[segment.ran_as], name=unit.name, parameters=unit.parameters)
        for unit, segment in zip(units, small, strict=True)
    ]
    inside = 2 * large[-1].kept_by_model > large[-1].kept
    return ModelCosts(precision=precision, units=tuple(twins), recompute=recompute, loss_in_model=inside)


def _kinds(facts: ModelFacts, blocks: Sequence[nn.Module]) -> dict[str, Any]:
    """For each block, a key of those that cost the same: they compute as much, which the description has counted."""
    computed = {call.name: call.flops for call in facts.calls}
    keys = zip(facts.blocks, cost_keys(blocks), strict=True)
    return {name: (key, computed.get(name)) for name, key in keys}


def _trace(
    job: Job,
    facts: ModelFacts,
    blueprint: Blueprint,
    kinds: Mapping[str, Any],
    precision: str,
    samples: int,
    device: str,
) -> list[Segment]:
    """Trace one step without values, or with values if the model reads them."""
    kernels = as_on_cuda if device == "cuda" else nullcontext
    # Meta tensors would take other kernels than a CPU; they can be told only to take a GPU's.
    rungs: list[Rung] = [partial(on_meta, device=kernels)] if device == "cuda" else []
    rungs.append(partial(on_fake, device=kernels))
    rungs.append(partial(on_fake_with_values, reads=ReadValues(), device=kernels))
    if is_small(blueprint.model):
        # This computes as a CPU does, so attention may save its scores, which a GPU would not.
        rungs.append(partial(on_real, copies=False))
    try:
        run = partial(_step, job, facts, blueprint, kinds, precision)
        with fakes_pass_as_real():
            return climb(blueprint.model, make_batch(job, samples), run, *rungs)
    except Exception as error:
        raise JobError(
            f"The model's costs could not be measured, so its memory and time are unknown: {one_line(error)} "
            f"{failed_line(error) or ''}"
        ) from error


class _GradientInForward(Exception):
    """The model takes a gradient in its forward pass, through a block that was skipped."""


def _step(
    job: Job, facts: ModelFacts, blueprint: Blueprint, kinds: Mapping[str, Any], precision: str, batch: Any
) -> list[Segment]:
    try:
        return _run(job, facts, blueprint, kinds, precision, batch)
    except _GradientInForward:
        return _run(job, facts, blueprint, {}, precision, batch)


def _run(
    job: Job, facts: ModelFacts, blueprint: Blueprint, kinds: Mapping[str, Any], precision: str, batch: Any
) -> list[Segment]:
    model, recorder = blueprint.model, UnitRecorder(facts)
    tensors = stand_ins(blueprint, _parameters(facts, DTYPES[precision]))
    recorder.meter.known([*tensors.values(), *tensors_of(batch)])
    for tensor in {id(tensor): tensor for tensor in tensors.values()}.values():
        if tensor.requires_grad:
            tensor.register_post_accumulate_grad_hook(_forget_gradient)
    with lend(model, tensors), _watch(model, facts, kinds, recorder), recorder.meter:
        output = call_model(job, model, batch)
        recorder.end_model()
        total, _ = loss_under(precision, job)(output, batch)
        del output
        recorder.begin_backward()
        total.backward()
        recorder.end_backward()
    return recorder.segments


def _parameters(facts: ModelFacts, dtype: torch.dtype) -> Callable[[str, nn.Parameter], torch.Tensor]:
    """A function that makes stand-ins. Blocks of the same sizes share theirs, which changes no result."""
    shared: dict[Any, torch.Tensor] = {}

    def make(name: str, parameter: nn.Parameter) -> torch.Tensor:
        block = next((block for block in _outer(name) if block in facts.blocks), None)
        inner = name.removeprefix(f"{block}.") if block else name
        key = (inner, tuple(parameter.shape), parameter.dtype, parameter.requires_grad) if block else name
        if key not in shared:
            shared[key] = stand_in(parameter, dtype).requires_grad_(parameter.requires_grad)
        return shared[key]

    return make


def _outer(name: str) -> list[str]:
    """Names of the modules that contain a parameter."""
    parts = name.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts))]


def _forget_gradient(parameter: torch.Tensor) -> None:
    """Free a parameter's gradient: gradients are counted as state."""
    parameter.grad = None


def _watch(
    model: nn.Module, facts: ModelFacts, kinds: Mapping[str, Any], recorder: UnitRecorder
) -> AbstractContextManager[None]:
    """Tell the recorder about every call of a unit, and skip calls of blocks that are equal to one that ran before.

    Blocks that `kinds` does not name all run, and so do those that are called in a loop: a round frees what the round
    before it left, and keeps what it was given.
    """
    calls = _CallOrder([call.name for call in facts.calls])
    times = Counter(call.name for call in facts.calls)
    seen: dict[Any, tuple[int, Any]] = {}

    def pass_gradient() -> None:
        if not recorder.in_backward:
            raise _GradientInForward

    def call(name: str, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        index = calls.next(name)
        if index is None:
            return forward(*args, **kwargs)
        segment = recorder.segments[index]
        recorder.enter(index)
        leaves, tree = tree_flatten((args, kwargs))
        inputs: list[torch.Tensor] = []
        key = kinds.get(name), arrival_of(leaves, inputs, other=type), str(tree)
        recorder.take(index, inputs)
        skippable = name in kinds and segment.is_block and times[name] == 1
        if skippable and key in seen:
            segment.ran_as, made = seen[key]
            segment.like = recorder.segments[segment.ran_as].name
            reached = [tensor for tensor in inputs if tensor.requires_grad]
            output = tree_map_only(MadeTensor, lambda tensor: tensor.connected_to(reached, pass_gradient), made)
        else:
            segment.like = name
            output = forward(*args, **kwargs)
            with suppress(AttributeError):  # a container that looks at its tensors, as a packed sequence does
                seen[key] = index, tree_map_only(torch.Tensor, MadeTensor.of, output)
        recorder.leave(index, output)
        return output

    names = dict.fromkeys(call.name for call in facts.calls)
    return replaced_forwards({name: model.get_submodule(name) for name in names}, call)


class _CallOrder:
    """Finds the place of a call among the described ones. If values decide what runs, calls may be missing or new."""

    def __init__(self, names: list[str]) -> None:
        self._names, self._at = names, 0

    def next(self, name: str) -> int | None:
        """The place of this call; None if none was described here, so that it counts with the unit before it."""
        if name not in self._names[self._at :]:
            return None
        place = self._names.index(name, self._at)
        self._at = place + 1
        return place


def affine_kernel(small: OperatorRun, large: OperatorRun, sizes: tuple[int, int] = SIZES) -> Kernel:
    """A kernel from its work at two numbers of samples."""
    between = partial(affine, sizes=sizes)
    return Kernel(
        name=small.name,
        kind=small.kind,
        dtype=small.dtype,
        flops=between(small.flops, large.flops),
        bytes=between(small.bytes, large.bytes),
        made=between(small.made, large.made),
        shape=tuple(between(x, y) for x, y in zip(small.shape, large.shape, strict=False)),
        steps=between(small.steps, large.steps),
        copied=between(small.copied, large.copied),
    )


def affine(low: float, high: float, sizes: tuple[int, int] = SIZES) -> Size:
    """An amount from what it is at two numbers of samples."""
    each = (high - low) / (sizes[1] - sizes[0])
    return Size(low - each * sizes[0], each)


def _runs_alike(small: list[Segment], large: list[Segment]) -> bool:
    """Whether more samples are not more operators, as in a loop over samples."""
    return all(len(one.forward) == len(other.forward) for one, other in zip(small, large, strict=True))


def _larger_sizes(job: Job) -> list[int]:
    """The samples of further traces, which are for peaks only."""
    few = sum(tensor.nbytes for tensor in tensors_of(make_batch(job, SIZES[0]))) / SIZES[0]
    most = min(job.global_batch, int(LARGE_BATCH / max(few, 1)))
    return [MANY, most] if most > 2 * MANY else [MANY]


def _with_peaks(unit: UnitCosts, sizes: Sequence[int], found: Sequence[Segment]) -> UnitCosts:
    """The unit with peaks that go on from each size to the next."""
    return replace(
        unit,
        forward_peak=_peak(sizes, [segment.forward_peak for segment in found]),
        backward_peak=_peak(sizes, [segment.backward_peak for segment in found]),
    )


def _peak(sizes: Sequence[int], peaks: Sequence[float]) -> Size | Peak:
    few = affine(peaks[0], peaks[1], (sizes[0], sizes[1]))
    rest = zip(sizes[2:], peaks[2:], strict=True)
    if all(isclose(few.at(size), peak, rel_tol=NEARLY) for size, peak in rest):
        return few
    return Peak(few, _peak(sizes[1:], peaks[1:]), sizes[1])


def _unit(small: Segment, large: Segment) -> UnitCosts:
    def kernels(low: list[OperatorRun], high: list[OperatorRun]) -> tuple[Kernel, ...]:
        return tuple(affine_kernel(a, b) for a, b in aligned(low, high))

    return UnitCosts(
        name=small.name,
        like=small.like,
        is_block=small.is_block,
        parameters=small.parameters,
        forward=kernels(small.forward, large.forward),
        backward=kernels(small.backward, large.backward),
        kept=affine(small.kept, large.kept),
        output=affine(small.output, large.output),
        fresh_output=affine(small.fresh_output, large.fresh_output),
        forward_peak=affine(small.forward_peak, large.forward_peak),
        backward_peak=affine(small.backward_peak, large.backward_peak),
    )
