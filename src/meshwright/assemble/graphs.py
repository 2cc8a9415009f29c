"""`graphs`: forward, loss and backward of a micro-batch as a CUDA graph, replayed for every batch of the same shape.

A model of many small kernels waits for the host, which launches them one by one. A graph launches all of them at once.
The first passes over a shape run as usual: they are training steps, and they show whether the passes can be recorded.
A graph reads its inputs from fixed tensors and leaves gradients in fixed tensors. It includes the cast of the
parameters to the compute dtype. Reducing gradients, clipping and the update stay outside.

A graph replays kernels and no Python. So a pass that reads values on the host, or that draws from the host's random
generators, runs as usual on every step, with one warning that says why.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import numpy
import torch

from meshwright.assemble.batch import Batch, MicroBatch
from meshwright.assemble.low_copies import LowCopies
from meshwright.assemble.passes import Dropout, Losses, PlainPasses
from meshwright.describe.observe import call_model
from meshwright.describe.structure import map_tensors, parts_of, tensors_of
from meshwright.errors import JobError, one_line
from meshwright.strategies.engine import Engine

WARM_UP = 2
"""Passes over a shape before it is recorded. The first may compile and choose kernels; the second is watched."""
MOST_SHAPES = 4
"""Shapes that get graphs; others always run as usual."""
_PLAIN = (type(None), bool, int, float, str, torch.dtype, torch.device)

Run = Callable[[], torch.Tensor]


class Recorder(Protocol):
    """Records what a function does on the device."""

    def record(self, run: Run) -> tuple[torch.Tensor, Callable[[], None]]:
        """The function's result, which has no values yet, and a function that computes them again."""

    def watch(self, run: Run) -> tuple[torch.Tensor, str]:
        """Run the function now; returns its result, and why it cannot be recorded ("" if it can)."""


class CudaRecorder:
    """Records CUDA graphs. They share memory: only gradients are read after another graph of the step is replayed."""

    def __init__(self) -> None:
        self._pool: Any = None

    def record(self, run: Run) -> tuple[torch.Tensor, Callable[[], None]]:
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        # Other threads (a loader that pins memory, NCCL's watchdog) may call CUDA meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            result = run()
        return result, graph.replay

    def watch(self, run: Run) -> tuple[torch.Tensor, str]:
        mode = torch.cuda.get_sync_debug_mode()
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                result = run()
            finally:
                torch.cuda.set_sync_debug_mode(mode)
        waits = any("called a synchronizing" in str(one.message) for one in told)
        return result, "it waits for the device, to read a value or to copy from the host" if waits else ""


@dataclass(frozen=True, kw_only=True)
class Graph:
    """A recorded pass over one micro-batch."""

    data: Any
    """The micro-batch that it reads. The values of others are copied into its tensors."""
    sums: torch.Tensor
    replay: Callable[[], None]
    gradients: list[torch.Tensor | None]
    """The gradients of the trained parameters after a replay."""


class GraphedPasses(PlainPasses):
    """Passes of a rank that runs the whole model, most of them replayed."""

    def __init__(
        self, engine: Engine, losses: Losses, dropout: Dropout, copies: LowCopies, recorder: Recorder, *, counts: bool
    ) -> None:
        super().__init__(engine, losses, dropout, counts=counts)
        self._copies, self._recorder = copies, recorder
        self._trained = engine.leaves()
        self._held = [*engine.model.parameters(), *engine.model.buffers()]
        self._addresses: list[int] = []
        self._factor = torch.zeros((), dtype=torch.float64, device=dropout.device)
        """The loss's factor. It changes with the loss scale and the number of samples."""
        self._graphs: dict[tuple[Hashable, Hashable], Graph] = {}
        """By the shape of the step's first micro-batch, which makes the gradients, and that of this one."""
        self._passes: dict[Hashable, int] = {}
        """By shape, how often it ran without a graph."""
        self._unable: dict[Hashable, str] = {}
        """By shape, why it cannot be recorded."""

    def backward(self, batch: Batch, factor: float, step: int) -> torch.Tensor:
        totals = torch.zeros(3, device=self._dropout.device, dtype=torch.float64)
        self._factor.fill_(factor)
        self._forget_moved()
        pieces = batch.pieces
        shapes = [_shape_of(piece) for piece in pieces]
        replaying = True
        for index, (piece, shape) in enumerate(zip(pieces, shapes, strict=True)):
            self._dropout.seed(step, piece.span.first)
            # A graph adds to gradients in the tensors of another graph, so none follows a pass without one.
            replaying = replaying and self._is_recordable(shape)
            if replaying:
                sums = self._replay((shapes[0] if index else None, shape), piece)
            else:
                sums = self._run_plainly(shape, piece)
            totals[:2].add_(sums)
        self.engine.finish()
        return totals * self._counts

    def _is_recordable(self, shape: Hashable) -> bool:
        recorded = {own for _, own in self._graphs}
        able = shape is not None and shape not in self._unable and self._passes.get(shape, 0) >= WARM_UP
        return able and (shape in recorded or len(recorded) < MOST_SHAPES)

    def _run_plainly(self, shape: Hashable, piece: MicroBatch) -> torch.Tensor:
        count = self._passes[shape] = self._passes.get(shape, 0) + 1
        run = partial(self._pass, piece.data, piece)
        if count != WARM_UP:
            return run()
        before = _host_generators()
        sums, reason = self._recorder.watch(run)
        if shape is None:
            reason = "its batch has parts that are neither tensors nor plain numbers"
        elif not reason and _host_generators() != before:
            reason = "it draws random numbers on the host"
        if reason:
            if not self._unable:
                warnings.warn(f"graphs: a pass cannot be recorded, because {reason}; it runs as without.", stacklevel=2)
            self._unable[shape] = reason
        return sums

    def _replay(self, key: tuple[Hashable, Hashable], piece: MicroBatch) -> torch.Tensor:
        graph = self._graphs.get(key)
        if graph is None:
            graph = self._graphs[key] = self._record(piece)
        for own, given in zip(tensors_of(graph.data), tensors_of(piece.data), strict=True):
            own.copy_(given, non_blocking=True)
        graph.replay()
        for parameter, gradient in zip(self._trained, graph.gradients, strict=True):
            parameter.grad = gradient
        return graph.sums

    def _record(self, piece: MicroBatch) -> Graph:
        """Record a pass from the present gradients: none in the step's first micro-batch, sums after it."""
        data = map_tensors(torch.clone, piece.data)
        try:
            sums, replay = self._recorder.record(partial(self._pass, data, piece))
        except Exception as error:
            raise JobError(
                f"graphs could not record forward and backward as a CUDA graph: {one_line(error)} Drop graphs."
            ) from error
        self._addresses = self._addresses_now()
        return Graph(data=data, sums=sums, replay=replay, gradients=[parameter.grad for parameter in self._trained])

    def _pass(self, data: Any, piece: MicroBatch) -> torch.Tensor:
        """Forward, loss and backward; returns the loss's (sum, weight)."""
        with self._copies.shared(1), self.engine.region():
            output = call_model(self._losses.job, self.engine, data)
            loss, sums = self._losses.of_output(output, replace(piece, data=data))
            with self._losses.recomputing:
                self.engine.backward(loss * self._factor.to(loss.dtype))
        return sums

    def _forget_moved(self) -> None:
        """Forget the graphs if a tensor of the model has moved: they would read its old memory."""
        if self._graphs and self._addresses_now() != self._addresses:
            self._graphs.clear()

    def _addresses_now(self) -> list[int]:
        return [tensor.data_ptr() for tensor in self._held]


def _shape_of(piece: MicroBatch) -> Hashable | None:
    """All that a recorded pass depends on besides values of tensors; None if that is not known."""
    found = _shape(piece.data)
    return None if found is None else (piece.span.length, piece.regular, found)


def _shape(node: Any) -> Hashable | None:
    if isinstance(node, torch.Tensor):
        return tuple(node.shape), node.dtype, node.device
    if isinstance(node, _PLAIN):
        return type(node), node
    parts = parts_of(node)
    if parts is None:
        return None
    inner = tuple(_shape(value) for value in parts.values)
    return None if None in inner else (type(node), parts.names, inner)


def _host_generators() -> tuple[Any, ...]:
    """The states of the host's random generators, which can be compared."""
    drawn: Any = numpy.random.get_state(legacy=True)
    return torch.default_generator.get_state().numpy().tobytes(), random.getstate(), drawn[1].tobytes(), drawn[2:]
