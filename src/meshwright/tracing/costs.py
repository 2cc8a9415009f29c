"""From a job to `ModelCosts`: one step of the plain model on fake tensors, for two sizes of a micro-batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from meshwright.build.precision import apply_precision, loss_under
from meshwright.build.recompute import recompute_blocks
from meshwright.describe.as_on_cuda import as_on_cuda
from meshwright.describe.blueprint import Blueprint, as_it_was, record, set_attributes
from meshwright.describe.disguise import is_meta
from meshwright.describe.observe import SMALL, call_model, make_batch
from meshwright.describe.operation import Slot
from meshwright.describe.shadows import shadow_of, shadows
from meshwright.describe.structure import map_tensors, tensors_of
from meshwright.errors import JobError, one_line
from meshwright.facts.costs import Kernel, ModelCosts, Size, UnitCosts
from meshwright.facts.job import Job
from meshwright.facts.model import ModelFacts
from meshwright.strategies.engine import DTYPES
from meshwright.torch_private.fake_tensors import FakeTensor, FakeTensorMode
from meshwright.torch_private.modules import lend_tensors
from meshwright.torch_private.trees import tree_flatten, tree_leaves, tree_unflatten
from meshwright.tracing.meter import Meter, Ran

SIZES = (2, 4)
"""Samples of the two traces. One would leave BatchNorm without a variance."""
LOSS = "loss"


def measure_costs(job: Job, facts: ModelFacts, precision: str, recompute: str = "none") -> ModelCosts:
    """What a micro-batch of a job costs under a precision, as a CUDA device would run it.

    With `recompute` blocks are run as they recompute; `ModelCosts.recomputed` says nearly the same of a plain trace.
    """
    if facts.unseen:
        raise JobError(f"The model's step could not be seen on fake tensors: {facts.unseen}.")
    blueprint = record(job.model, seed=0, values=False)
    blocks = [blueprint.model.get_submodule(name) for name in facts.blocks]
    apply_precision(blueprint.model, blocks, DTYPES[precision], pure=False, left_to_cast=())
    if recompute != "none":
        recompute_blocks(blocks or [blueprint.model], recompute)
    small, large = (_trace(job, facts, blueprint, precision, samples) for samples in SIZES)
    units = [_unit(low, high) for low, high in zip(small, large, strict=True)]
    by_name = {unit.name: unit for unit in units}
    twins = [replace(by_name[unit.like], name=unit.name, parameters=unit.parameters) for unit in units]
    return ModelCosts(precision=precision, units=tuple(twins), recompute=recompute)


@dataclass
class _Segment:
    """A unit in one trace."""

    name: str
    like: str
    is_block: bool
    parameters: tuple[str, ...]
    forward: list[Ran] = field(default_factory=list)
    backward: list[Ran] = field(default_factory=list)
    start: int = 0
    """Live bytes when its forward pass began."""
    end: int = 0
    """Live bytes when the next one began."""
    forward_peak: int = 0
    backward_peak: int = 0
    output: int = 0

    @property
    def kept(self) -> int:
        return self.end - self.start


class _Recorder:
    """Knows which unit runs, forward and backward, while a model does."""

    def __init__(self, facts: ModelFacts) -> None:
        self.meter = Meter(self._ran)
        self.segments = [_Segment(call.name, "", call.name in facts.blocks, call.reads) for call in facts.calls]
        self.segments.append(_Segment(LOSS, LOSS, False, ()))
        self._at = 0
        self._backward = False

    def enter(self, index: int) -> None:
        """A unit's forward pass begins, and that of the one before it ends."""
        if index > 0:
            self._close_forward()
        self._at = index
        segment = self.segments[index]
        segment.start = self.meter.live
        self.meter.peak = self.meter.live

    def leave(self, index: int, output: Any) -> None:
        """A unit returned; what follows until the next one begins is its too, or the loss's after the last."""
        tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
        self.segments[index].output = sum(leaf.numel() * leaf.itemsize for leaf in tensors)
        for leaf in tensors:
            leaf.register_hook(lambda gradient: self.return_to(index))
        if index == len(self.segments) - 2:
            self.enter(index + 1)

    def return_to(self, index: int) -> None:
        """The backward pass of a unit begins."""
        if index < self._at:
            self._close_backward()
            self._at = index
            self.meter.peak = self.meter.live

    def begin_backward(self) -> None:
        self._close_forward()
        self._backward = True
        self.meter.peak = self.meter.live

    def end_backward(self) -> None:
        self._close_backward()

    def _close_forward(self) -> None:
        segment = self.segments[self._at]
        segment.end = self.meter.live
        segment.forward_peak = self.meter.peak - segment.start

    def _close_backward(self) -> None:
        segment = self.segments[self._at]
        segment.backward_peak = self.meter.peak - segment.start

    def _ran(self, work: Ran) -> None:
        segment = self.segments[self._at]
        (segment.backward if self._backward else segment.forward).append(work)


def _trace(job: Job, facts: ModelFacts, blueprint: Blueprint, precision: str, samples: int) -> list[_Segment]:
    """One step on shadows or fake tensors; on real ones where the model looks at values and is small."""
    with suppress(Exception), as_it_was(blueprint.model), shadows(blueprint.model), as_on_cuda():
        return _step(job, facts, blueprint, precision, samples, shadow_of)
    try:
        with as_it_was(blueprint.model), FakeTensorMode(allow_non_fake_inputs=True) as mode, as_on_cuda():
            return _step(job, facts, blueprint, precision, samples, lambda tensor: mode.from_tensor(tensor.cpu()))
    except Exception as error:
        if sum(p.count for p in facts.parameters) > SMALL:
            raise _unseen(error) from error
    try:
        # As a CPU computes, so attention may keep its scores: more than a GPU would.
        return _step(job, facts, blueprint, precision, samples, lambda tensor: tensor.cpu())
    except Exception as error:
        raise _unseen(error) from error


def _unseen(error: Exception) -> JobError:
    return JobError(
        f"The model's costs could not be seen, so its memory and time cannot be told: {one_line(error)} "
        "A model that looks at values is run on real tensors only where it is small."
    )


def _step(
    job: Job,
    facts: ModelFacts,
    blueprint: Blueprint,
    precision: str,
    samples: int,
    take: Callable[[torch.Tensor], torch.Tensor],
) -> list[_Segment]:
    model, recorder = blueprint.model, _Recorder(facts)
    set_attributes(model, blueprint.attributes, _empty_slot)
    tensors = _parameters(model, facts, DTYPES[precision])
    tensors |= {name: _empty(b, b.dtype) for name, b in model.named_buffers()}
    batch = map_tensors(take, make_batch(job, samples))
    recorder.meter.known([*tensors.values(), *tensors_of(batch)])
    for tensor in {id(tensor): tensor for tensor in tensors.values()}.values():
        if tensor.requires_grad:
            tensor.register_post_accumulate_grad_hook(_forget_gradient)
    with lend_tensors(model, tensors, tie_weights=True), ExitStack() as hooks:
        _watch(model, facts, recorder, hooks)
        with recorder.meter:
            total, _ = loss_under(precision, job)(call_model(job, model, batch), batch)
            recorder.begin_backward()
            total.backward()
            recorder.end_backward()
    return recorder.segments


def _parameters(model: nn.Module, facts: ModelFacts, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """A stand-in for every parameter; blocks share theirs where they are of the same sizes, which costs no truth."""
    shared: dict[Any, torch.Tensor] = {}
    found = {}
    for name, parameter in model.named_parameters():
        block = next((block for block in _outer(name) if block in facts.blocks), None)
        inner = name.removeprefix(f"{block}.") if block else name
        key = (inner, tuple(parameter.shape), parameter.dtype, parameter.requires_grad) if block else name
        if key not in shared:
            shared[key] = _empty(parameter, dtype).requires_grad_(parameter.requires_grad)
        found[name] = shared[key]
    return found


def _outer(name: str) -> list[str]:
    """The modules that a parameter lies in, by name."""
    parts = name.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts))]


def _forget_gradient(parameter: torch.Tensor) -> None:
    """Gradients of parameters are states, and accounted for as such."""
    parameter.grad = None


def _empty(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    dtype = dtype if tensor.is_floating_point() else tensor.dtype
    if not is_meta(tensor):
        return tensor.detach().to(dtype)
    empty = torch.empty_strided(tensor.size(), tensor.stride(), dtype=dtype, device="cpu")
    if isinstance(empty, FakeTensor) or is_meta(empty):
        return empty
    return empty.normal_(std=0.02) if empty.is_floating_point() else empty.zero_()


def _empty_slot(slot: Slot) -> torch.Tensor:
    return _empty(torch.empty_strided(slot.size, slot.stride, dtype=slot.dtype, device="meta"), slot.dtype)


def _watch(model: nn.Module, facts: ModelFacts, recorder: _Recorder, hooks: ExitStack) -> None:
    """Tell the recorder of every unit's call; calls of a block that ran before, in all but name, are stood in for."""
    calls = iter(range(len(facts.calls)))
    seen: dict[Any, tuple[int, Any]] = {}

    def around(name: str, module: nn.Module) -> Callable[..., Any]:
        forward = module.forward

        def call(*args: Any, **kwargs: Any) -> Any:
            index = next(calls)
            segment = recorder.segments[index]
            recorder.enter(index)
            leaves, tree = tree_flatten((args, kwargs))
            key = (_signature(module), tuple(map(_look, leaves)), str(tree), segment.is_block)
            if segment.is_block and key in seen:
                first, made = seen[key]
                segment.like = recorder.segments[first].name
                output = _stand_in(leaves, made)
            else:
                segment.like = name
                output = forward(*args, **kwargs)
                seen[key] = index, _outline(output)
            recorder.leave(index, output)
            return output

        return call

    for name in dict.fromkeys(call.name for call in facts.calls):
        module = model.get_submodule(name)
        original = module.__dict__.get("forward")
        module.forward = around(name, module)
        hooks.callback(_restore, module, original)


def _restore(module: nn.Module, original: Any) -> None:
    if original is None:
        del module.forward
    else:
        module.forward = original


def _signature(module: nn.Module) -> tuple[Any, ...]:
    """What makes two modules the same but for their weights' values."""
    inner = tuple((name, type(child), child.extra_repr()) for name, child in module.named_modules())
    weights = tuple((name, tuple(p.shape), p.dtype, p.requires_grad) for name, p in module.named_parameters())
    return inner, weights


def _look(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return tuple(leaf.shape), leaf.dtype, leaf.requires_grad
    return leaf if isinstance(leaf, bool | int | float | str | type(None)) else type(leaf)


def _outline(output: Any) -> tuple[list[Any], Any]:
    leaves, tree = tree_flatten(output)
    return [_Like(tuple(x.shape), x.dtype, x.requires_grad) if torch.is_tensor(x) else x for x in leaves], tree


@dataclass(frozen=True)
class _Like:
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool


class _Through(torch.autograd.Function):
    """Outputs of given shapes that depend on the inputs, with nothing computed in between."""

    @staticmethod
    def forward(ctx: Any, outlines: Sequence[_Like], *inputs: torch.Tensor) -> Any:
        ctx.inputs = [(tuple(x.shape), x.dtype) for x in inputs]
        return tuple(torch.empty(like.shape, dtype=like.dtype) for like in outlines)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return None, *(torch.empty(shape, dtype=dtype) for shape, dtype in ctx.inputs)


def _stand_in(leaves: list[Any], made: tuple[list[Any], Any]) -> Any:
    outlines, tree = made
    inputs = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    wanted = [like for like in outlines if isinstance(like, _Like) and like.requires_grad]
    through = iter(_Through.apply(wanted, *inputs) if inputs and wanted else ())
    filled = []
    for like in outlines:
        if not isinstance(like, _Like):
            filled.append(like)
        elif like.requires_grad and inputs:
            filled.append(next(through))
        else:
            filled.append(torch.empty(like.shape, dtype=like.dtype))
    return tree_unflatten(filled, tree)


def _unit(small: _Segment, large: _Segment) -> UnitCosts:
    def between(low: float, high: float) -> Size:
        each = (high - low) / (SIZES[1] - SIZES[0])
        return Size(low - each * SIZES[0], each)

    def kernels(low: list[Ran], high: list[Ran]) -> tuple[Kernel, ...]:
        return tuple(
            Kernel(
                name=a.name,
                kind=a.kind,
                dtype=a.dtype,
                flops=between(a.flops, b.flops),
                bytes=between(a.bytes, b.bytes),
                made=between(a.made, b.made),
                shape=tuple(between(x, y) for x, y in zip(a.shape, b.shape, strict=False)),
            )
            for a, b in zip(low, high, strict=True)
        )

    return UnitCosts(
        name=small.name,
        like=small.like,
        is_block=small.is_block,
        parameters=small.parameters,
        forward=kernels(small.forward, large.forward),
        backward=kernels(small.backward, large.backward),
        kept=between(small.kept, large.kept),
        output=between(small.output, large.output),
        forward_peak=between(small.forward_peak, large.forward_peak),
        backward_peak=between(small.backward_peak, large.backward_peak),
    )
