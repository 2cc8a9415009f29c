"""Run one rank's step on fake tensors in a fake world of the full size, and record it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn

from meshwright.assemble.axes import Axes
from meshwright.assemble.batch import Batch, assemble
from meshwright.assemble.rank_engine import RankEngine
from meshwright.assemble.step import Trainer
from meshwright.assemble.world import World, fake_world, outside_of_modes
from meshwright.describe.as_on_cuda import as_on_cuda
from meshwright.describe.batch_layout import CannotCut
from meshwright.describe.known_values import copy_value, known_values, set_value
from meshwright.describe.library_checks import fakes_pass_as_real
from meshwright.describe.observe import SAMPLES, make_batch
from meshwright.describe.read_values import ReadValues
from meshwright.describe.structure import map_tensors
from meshwright.facts.job import Job
from meshwright.facts.model import ModelFacts
from meshwright.facts.strategy import Strategy
from meshwright.facts.trace import Message, Operation
from meshwright.recording.blueprint import seeded
from meshwright.recording.caches import forgetting
from meshwright.strategies.data import ddp_engine
from meshwright.strategies.norm import local
from meshwright.torch_private.dtensor import forget_layouts
from meshwright.torch_private.fake_tensors import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from meshwright.torch_private.foreach import clipping_by_lists
from meshwright.torch_private.trees import tree_leaves
from meshwright.tracing.block_stack import find_repeated_blocks
from meshwright.tracing.compiled import Compiler
from meshwright.tracing.ddp_buckets import Buckets
from meshwright.tracing.recorder import StepRecorder
from meshwright.tracing.step_counts import Messages

AXES = {"replicate": "replica", "pipeline": "stage"}
"""Mesh axes that have another name in messages."""


class NoStream:
    """A CUDA stream without a GPU: nothing runs on it."""

    def synchronize(self) -> None:
        pass


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """The record of one rank's step, as all later ones are."""

    peaks: dict[str, Counter[str]]
    """For each moment of the step (such as forward of the first block), bytes by cause at that moment's peak."""
    reserved: int
    returns: int
    """How often the allocator returned memory to the device."""
    operations: Counter[Operation]
    messages: Counter[Message]
    stages: tuple[int, ...]
    uncompiled: str = ""
    """Why something that would be compiled was traced as eager."""
    divided: str = ""
    """Why a module that would be compiled as one was traced as modules that are compiled one by one."""


class StepObserver(ABC):
    """Observer that is told about the recorded step."""

    @abstractmethod
    def attach(self, models: Iterable[nn.Module], recorder: StepRecorder) -> None:
        """Called once the models of the rank's engines are built."""

    @abstractmethod
    def begin(self) -> None:
        """Called before the recorded step."""

    @abstractmethod
    def end(self) -> None:
        """Called after it."""


def record_step(
    job: Job,
    facts: ModelFacts,
    strategy: Strategy,
    ranks: int,
    rank: int,
    capacity: float = inf,
    observer: StepObserver | None = None,
    workspaces: bool = True,
    device: str = "cuda",
) -> Recorded:
    """Run some steps of a resolved strategy, and record the last: the first makes the optimizer's state.

    `capacity` is how many bytes the device has. What is reserved is that of all steps. `device` "cpu" records the
    operators that a CPU runs.
    """
    run = partial(_record_step, job, facts, strategy, ranks, rank, capacity, observer, workspaces, device)
    if facts.assumed:
        return run(known_values(ReadValues()))
    try:
        return run(nullcontext())
    except Exception as error:
        if not _reads_values(error):
            raise
    return run(known_values(ReadValues()))  # of a small model, which was described on real tensors


def _reads_values(error: BaseException | None) -> bool:
    """Whether an error, or one that it was made from, is that a model reads values, which fake tensors do not have."""
    reading = isinstance(error, DataDependentOutputException | DynamicOutputShapeException)
    return reading or (error is not None and _reads_values(error.__cause__))


def _record_step(
    job: Job,
    facts: ModelFacts,
    strategy: Strategy,
    ranks: int,
    rank: int,
    capacity: float,
    observer: StepObserver | None,
    workspaces: bool,
    device: str,
    values: AbstractContextManager[None],
) -> Recorded:
    sample, fake_tensors = make_batch(job, SAMPLES), _DEVICES[device]
    with _fake_world(ranks, rank) as world, seeded(0), forgetting(), fake_tensors(values):
        recorder = StepRecorder(Messages(), workspaces=workspaces)
        recorder.keeps_values = not isinstance(values, nullcontext)
        allocator = recorder.ledger.allocator
        allocator.capacity = capacity
        compiler = Compiler(recorder, partial(_moments_of, facts.blocks))
        with recorder.recording(), compiler.compiling(), ExitStack() as at_end:
            trainer = Trainer(_watched(job, recorder), facts, strategy, world, seed=0)
            if device == "cuda":
                _take_foreach(trainer.optimizer)
            recorder.messages.axes = _axes_of_groups(trainer.axes)
            engines = trainer.engine.engines if isinstance(trainer.engine, RankEngine) else [trainer.engine]
            for engine in engines:
                at_end.enter_context(forgetting(engine.model))
                _name_moments(engine.model, facts, recorder)
            if observer is not None:
                observer.attach([engine.model for engine in engines], recorder)
            batch = _part(job, sample, trainer)
            for _ in range(_steps_before(strategy)):
                _step(trainer, batch, recorder)
            since, returns = recorder.begin(), allocator.returns
            if observer is not None:
                observer.begin()
            _step(trainer, batch, recorder)
            if observer is not None:
                observer.end()
            holders = getattr(trainer.engine, "holders", None)
            return Recorded(
                peaks=recorder.ledger.peaks(since),
                reserved=allocator.reserved,
                returns=allocator.returns - returns,
                operations=recorder.operations.counts,
                messages=recorder.messages.counts,
                stages=holders.own if holders is not None else (),
                uncompiled=" ".join(compiler.failed),
                divided=" ".join(compiler.divided),
            )


def _steps_before(strategy: Strategy) -> int:
    """Steps until the next one is like all later ones.

    Where blocks run recorded programs, the first step runs them as they are, in another order of allocations. The
    second one finds chunks of other sizes, so the allocator reserves more in the third.
    """
    return 2 if strategy.splits_tensors and not strategy.compile else 1


def _step(trainer: Trainer, batch: Batch, recorder: StepRecorder) -> None:
    recorder.enter("forward_backward")
    trainer.forward_backward(_copied(batch))
    tell_held(trainer, recorder)
    recorder.enter("update")
    trainer.update()
    tell_held(trainer, recorder)
    recorder.enter("build")


def tell_held(trainer: Trainer, recorder: StepRecorder) -> None:
    """Tell the recorder the cause of long-lived tensors: gradients, optimizer state, parameters and buffers."""
    resident = trainer.engine.resident()
    states = [v for values in trainer.optimizer.state.values() for v in values.values() if torch.is_tensor(v)]
    held = {
        "gradients": resident["gradients"],
        "optimizer": [*states, *resident.get("masters", [])],
        "parameters": [*resident["parameters"], *trainer.engine.model.buffers()],
    }
    for cause, tensors in held.items():
        for tensor in tensors:
            recorder.tell(local(tensor), cause)


def _watched(job: Job, recorder: StepRecorder) -> Job:
    """The job with a loss that tells the recorder when it runs."""

    def loss(output: Any, batch: Any) -> Any:
        with recorder.loss_of(output):
            return job.loss(output, batch)

    return replace(job, loss=loss)


def _name_moments(model: nn.Module, facts: ModelFacts, recorder: StepRecorder) -> None:
    """Name the moments at which each block runs, in forward and in backward, counted from the nearer end.

    Blocks before a stack of alike ones, and the first two of the stack, are counted from the beginning.
    """
    blocks = [model.get_submodule(name) for name in facts.blocks]
    stack = find_repeated_blocks(facts)
    first = 2 + (stack.before if stack else 0)
    own = [block for block in blocks if any(True for _ in block.parameters())]
    for index, block in enumerate(own):
        name = f"block {index}" if index < first else f"block {index - len(own)}"
        block.register_forward_pre_hook(lambda *_, name=name: recorder.at(f"{recorder.step_phase} of {name}"))
        block.register_forward_hook(partial(_leave, recorder, name))


def _moments_of(blocks: tuple[str, ...], parameters: list[str]) -> dict[str, str]:
    """For each parameter of a compiled module, the moment at which it is read.

    Only for a model that is compiled as one: its blocks are not called. A separately compiled block is called, and that
    names the moment. The same names in every block would name one moment, which is not affine in their number.
    """
    found = {parameter: _moment_of(blocks, parameter) for parameter in parameters}
    return found if any(found[parameter] != parameter for parameter in parameters) else {}


def _moment_of(blocks: tuple[str, ...], parameter: str) -> str:
    index = next((index for index, block in enumerate(blocks) if parameter.startswith(f"{block}.")), None)
    if index is None:
        return parameter
    return f"block {index}" if index < 1 else f"block {index - len(blocks)}"


def _leave(recorder: StepRecorder, name: str, module: nn.Module, args: Any, output: Any) -> None:
    recorder.at(f"{recorder.step_phase} after {name}")
    if recorder.step_phase != "forward":
        return
    for leaf in tree_leaves(output):
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
            leaf.register_hook(lambda gradient: recorder.at(f"backward of {name}"))
            return


def _part(job: Job, sample: Any, trainer: Trainer) -> Batch:
    """This rank's part of a global batch, made from a few samples; the others have the same shape."""
    rounds = trainer.share.rounds(job.global_batch)
    with outside_of_modes():
        pieces = {length: _piece(job, sample, trainer, length) for length in {s.length or 1 for r in rounds for s in r}}
    data = [pieces[span.length or 1] for round_ in rounds for span in round_]
    pinned = map_tensors(
        lambda tensor: set_value(torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True), tensor), data
    )
    return assemble(pinned, rounds, samples=job.global_batch)


def _piece(job: Job, sample: Any, trainer: Trainer, length: int) -> Any:
    """A micro-batch made from the sample without memory; a newly made one if the sample cannot be cut."""
    try:
        return trainer.cutter.grown(sample, length)
    except CannotCut:
        return make_batch(job, length)


def _copied(batch: Batch) -> Batch:
    """A copy of the batch, as if it was moved to the device for this step."""
    data = [piece.data for piece in batch.pieces]
    copied = map_tensors(lambda tensor: copy_value(torch.empty(tensor.shape, dtype=tensor.dtype), tensor), data)
    rounds = tuple(tuple(piece.span for piece in round_) for round_ in batch.rounds)
    return assemble(copied, rounds, samples=batch.samples)


@contextmanager
def _fake_world(ranks: int, rank: int) -> Iterator[World]:
    world = fake_world(ranks, torch.device("cpu"), rank=rank)
    try:
        yield replace(world, weightless=True)
    finally:
        world.leave()
        forget_layouts()


@contextmanager
def _as_cpu_tensors(values: AbstractContextManager[None]) -> Iterator[None]:
    """Make fake tensors of a CPU. Reading a number from one gives 1.0, a finite loss."""
    with ExitStack() as stack:
        stack.enter_context(patch.object(FakeTensor, "__float__", lambda self: 1.0, create=True))
        stack.enter_context(patch.object(ddp_engine, "DistributedDataParallel", Buckets))
        stack.enter_context(fakes_pass_as_real())
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(values)
        yield


@contextmanager
def _as_cuda_tensors(values: AbstractContextManager[None]) -> Iterator[None]:
    """Make fake tensors that report to be on CUDA. Reading a number from one gives 1.0, a finite loss.

    `values` is active above the fake tensors.
    """
    with ExitStack() as stack:
        stack.enter_context(patch.object(FakeTensor, "is_cuda", property(lambda self: True), create=True))
        stack.enter_context(patch.object(FakeTensor, "__float__", lambda self: 1.0, create=True))
        stack.enter_context(patch.object(torch.cuda, "current_stream", NoStream))
        stack.enter_context(clipping_by_lists())
        stack.enter_context(patch.object(ddp_engine, "DistributedDataParallel", Buckets))
        stack.enter_context(fakes_pass_as_real())
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(values)
        stack.enter_context(as_on_cuda())
        yield


_DEVICES = {"cuda": _as_cuda_tensors, "cpu": _as_cpu_tensors}


def _take_foreach(optimizer: torch.optim.Optimizer) -> None:
    """Update lists of tensors if the user did not choose, as PyTorch does on GPUs; it excludes fake tensors."""
    for group in optimizer.param_groups:
        open_ = all(group.get(name) is None for name in ("foreach", "fused")) and "foreach" in group
        if open_ and all(type(parameter.data) is FakeTensor for parameter in group["params"]):
            group["foreach"] = True


def _axes_of_groups(axes: Axes) -> dict[str, str]:
    found: dict[str, str] = {dist.group.WORLD.group_name: "data"} if dist.group.WORLD is not None else {}
    if axes.mesh is None or axes.mesh.mesh_dim_names is None:
        return found
    groups = [(name, axes.mesh.get_group(name)) for name in axes.mesh.mesh_dim_names]
    found |= {group.group_name: AXES.get(name, name) for name, group in groups}
    # An axis that takes the whole data axis has the same group.
    return {group.group_name: name for name, group in axes.groups_inside_data()} | found
