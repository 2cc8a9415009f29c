"""Assign what a traced step does to the units of a model: operators, memory at the peaks, and what is kept."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch

from meshwright.facts.model import ModelFacts
from meshwright.torch_private.tensors import storage_id
from meshwright.torch_private.trees import tree_leaves
from meshwright.tracing.allocator import ROUNDING, round_up
from meshwright.tracing.meter import Meter, OperatorRun

LOSS = "loss"
"""Name of the last unit."""


@dataclass(frozen=True)
class Output:
    """The memory of one tensor that a unit returned."""

    size: int
    alive: Callable[[], Any]


@dataclass
class Segment:
    """The measurements of one unit in one trace."""

    name: str
    like: str
    is_block: bool
    parameters: tuple[str, ...]
    ran_as: int | None = None
    """The unit that ran in its place, if their calls are equal."""
    forward: list[OperatorRun] = field(default_factory=list)
    backward: list[OperatorRun] = field(default_factory=list)
    start: int = 0
    """Live bytes when its forward pass began."""
    end: int = 0
    """Live bytes when the next unit's forward pass began."""
    forward_peak: int = 0
    backward_peak: int = 0
    output: int = 0
    made: dict[int, Output] = field(default_factory=dict)
    """The output's tensors with gradients by memory, without the memory of inputs, which are passed on."""
    passed_on: set[int] = field(default_factory=set)
    """Of that, what a later unit takes."""
    taken: frozenset[int] = frozenset()
    """The memory of its inputs."""
    outputs: dict[int, Output] = field(default_factory=dict)
    """Those that are held when the next unit begins, and that it does not take, by their memory."""
    kept_by_model: int = 0
    """Of the loss: live bytes that the model's own code after its last call has added."""

    @property
    def kept(self) -> int:
        return self.end - self.start

    @property
    def fresh_output(self) -> int:
        """Bytes of the output that stay if the unit recomputes everything else: not weights that nobody takes."""
        return sum(one.size for key, one in self.made.items() if not self.passed_on or key in self.passed_on)


class UnitRecorder:
    """Assigns operators and memory to the unit that is running, in forward and in backward."""

    def __init__(self, facts: ModelFacts) -> None:
        self.meter = Meter(self._ran)
        self.segments = [Segment(call.name, call.name, call.name in facts.blocks, call.reads) for call in facts.calls]
        self.segments.append(Segment(LOSS, LOSS, False, ()))
        self._at = 0
        self.in_backward = False

    def enter(self, index: int) -> None:
        """Begin a unit's forward pass, and end that of the unit before it."""
        if index > 0:
            self._close_forward()
        self._at = index
        segment = self.segments[index]
        segment.start = self.meter.live
        self.meter.peak = self.meter.live

    def leave(self, index: int, output: Any) -> None:
        """Note a unit's output. What runs before the next unit counts as this one's; after the last, as the loss's."""
        tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
        segment = self.segments[index]
        segment.output = sum(leaf.numel() * leaf.itemsize for leaf in tensors)
        segment.outputs = self._watched(tree_leaves(output))
        segment.made = {key: one for key, one in self._watched(tensors).items() if key not in segment.taken}
        for leaf in tensors:
            leaf.register_hook(lambda gradient: self.return_to(index))
        if index == len(self.segments) - 2:
            self._forget_passing()
            self.enter(index + 1)

    def _watched(self, leaves: Iterable[Any]) -> dict[int, Output]:
        """Tensors by their memory, each with a way to ask whether it is still held."""
        found = {}
        for leaf in leaves:
            alive = self.meter.watch(leaf) if isinstance(leaf, torch.Tensor) else None
            if alive is not None:
                key, size = storage_id(leaf.untyped_storage()), leaf.untyped_storage().nbytes()
                found[key] = Output(round_up(size, ROUNDING), alive)
        return found

    def take(self, index: int, inputs: Iterable[torch.Tensor]) -> None:
        """Note what a unit takes from the one before it, and what of that is still held."""
        taken = frozenset(storage_id(tensor.untyped_storage()) for tensor in inputs)
        self.segments[index].taken = taken
        for earlier in self.segments[:index]:
            earlier.passed_on |= {key for key in taken & earlier.made.keys() if earlier.made[key].alive() is not None}
        if index > 0:
            before = self.segments[index - 1]
            rest = {key: one for key, one in before.outputs.items() if key not in taken}
            before.outputs = {key: one for key, one in rest.items() if one.alive() is not None}

    def _forget_passing(self) -> None:
        """Count what a unit returned and nobody took with the next one: a variable held it until that one returned.

        Attention that returns its weights is of this kind.
        """
        units = self.segments[:-1]  # the loss takes what the last unit returns
        for segment, after in pairwise(units):
            size = sum(output.size for output in segment.outputs.values() if output.alive() is None)
            segment.end, after.start = segment.end - size, after.start - size
            after.forward_peak += size

    def return_to(self, index: int) -> None:
        """Begin the backward pass of a unit. What gradients in the forward pass take is of the unit that runs."""
        if self.in_backward and index < self._at:
            self.end_backward()
            self._at = index
            self.meter.peak = self.meter.live

    def end_model(self) -> None:
        """Note what the model's own code has done of the loss."""
        if self._at == len(self.segments) - 1:
            self.segments[-1].kept_by_model = self.meter.live - self.segments[-1].start

    def begin_backward(self) -> None:
        self._close_forward()
        self.in_backward = True
        self.meter.peak = self.meter.live

    def _close_forward(self) -> None:
        segment = self.segments[self._at]
        segment.end = self.meter.live
        segment.forward_peak = self.meter.peak - segment.start

    def end_backward(self) -> None:
        segment = self.segments[self._at]
        segment.backward_peak = self.meter.peak - segment.start

    def _ran(self, work: OperatorRun) -> None:
        segment = self.segments[self._at]
        (segment.backward if self.in_backward else segment.forward).append(work)
