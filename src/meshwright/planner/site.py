"""A step layout on a cluster: the groups of its mesh axes, and what their messages take."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil, prod

from meshwright.facts.catalogue import is_measured
from meshwright.facts.hardware import Hardware
from meshwright.facts.links import KINDS
from meshwright.facts.strategy import AxisTerm
from meshwright.planner.collectives import RankGroup, group_on
from meshwright.planner.host_costs import HOST_REFERENCE, ON_CPU, HostCosts
from meshwright.planner.measured_kernels import KernelPrices
from meshwright.planner.step_layout import StepLayout, inner_causes

PAIR = 2
"""Nodes of an inner axis up to which messages between stages stall no more often than others: with 16 tensor ranks on
two nodes one in 40 pipelines of EFA's sweep lost time in them, with 32 on four all 50 did."""
MESSAGE = 512e6
"""Bytes of the largest message that engines send at once; a larger one is split (published sweep: sums of gradients
take as long as in messages of 0.3 to 0.5 GB)."""
DATA_PLACE = 0
"""Place of the data axis in the mesh; axes of a higher place are inside it."""


@dataclass(frozen=True, kw_only=True)
class Site:
    """A step layout on a cluster: its rank groups and the cost of their collectives."""

    hardware: Hardware
    per_node: int
    """Devices per node."""
    step_layout: StepLayout
    collective: Callable[[str, float, RankGroup], float]
    """Seconds of one collective, from its kind, bytes and group."""
    prices: KernelPrices | None = None
    """Measured kernels, if there are any."""

    @property
    def is_cpu(self) -> bool:
        return self.hardware.device == "cpu"

    @cached_property
    def host(self) -> HostCosts:
        """What the engine costs its host. A CPU rank's time for an operator tells how fast its host is.

        So does a GPU host's reference pass, and its step of a single weight, if these were timed.
        """
        found = ON_CPU.at(self.hardware.launch) if self.is_cpu else self.step_layout.host
        if self.prices is None:
            return found
        table = self.prices.table
        if table.host and not self.is_cpu:
            found = found.scaled(table.host / HOST_REFERENCE)
        return replace(found, step=table.step) if table.step else found

    @cached_property
    def causes(self) -> tuple[str, ...]:
        return inner_causes()

    @cached_property
    def inner(self) -> tuple[tuple[AxisTerm, RankGroup], ...]:
        """Each inner axis and its group."""
        terms = self.step_layout.inner
        return tuple((term, self._group(term.size, self._stride(term.traits.place))) for term in terms)

    def _group(self, axis_size: int, inner: int) -> RankGroup:
        return group_on(axis_size, inner, self.per_node, self.nodes)

    @property
    def nodes(self) -> int:
        return ceil(self.step_layout.ranks / self.per_node)

    def _stride(self, place: int) -> int:
        """Number of consecutive ranks inside one step of the axis at a place of the mesh."""
        inner = prod(t.size for t in self.step_layout.inner if t.traits.place > place and not t.traits.splits_batch)
        return inner * self.step_layout.data if place < DATA_PLACE else inner

    @property
    def _reduced_stride(self) -> int:
        """Number of consecutive ranks that hold different parameters."""
        return prod(term.size for term in self.step_layout.inner if not term.traits.shares_gradients)

    @cached_property
    def shard(self) -> RankGroup:
        return self._group(self.step_layout.shards, self._reduced_stride)

    @cached_property
    def replica(self) -> RankGroup:
        layout = self.step_layout
        return self._group(layout.reduced // layout.shards, self._reduced_stride * layout.shards)

    @cached_property
    def data(self) -> RankGroup:
        return self._group(self.step_layout.reduced, self._reduced_stride)

    @cached_property
    def inside(self) -> RankGroup:
        """The data ranks that have the same part of what an axis inside the data axis divides."""
        splits = self.step_layout.batch_splits
        return self._group(self.step_layout.data // splits, self._stride(DATA_PLACE) * splits)

    @cached_property
    def neighbour(self) -> RankGroup:
        """The group of a stage and the next one: of the pair that spans two nodes, if the pipeline spans any."""
        stride = self.step_layout.inner_ranks * self.step_layout.data
        if stride < self.per_node < stride * self.step_layout.stage_ranks:
            stride = self.per_node
        return self._group(2, stride)

    def stage_group(self, *places: int) -> RankGroup:
        """Ranks at these places of the pipeline. All ranks of a stage send at once and share their node's link."""
        width = self.step_layout.ranks // self.step_layout.stage_ranks
        nodes = len({place * width // self.per_node for place in places})
        return RankGroup(
            len(places),
            ceil(len(places) / nodes),
            nodes,
            self.per_node if nodes == 1 else min(width, self.per_node),
            self.nodes,
        )

    @cached_property
    def stall(self) -> float:
        """Seconds that each message between nodes loses in the median run of this size."""
        known = self.nodes == 1 or is_measured(self.hardware, "between.latency")
        return 0.0 if known else KINDS[self.hardware.between.kind].usual_stall(self.nodes)

    @cached_property
    def stage_stall(self) -> float:
        """Seconds that each message between stages loses; always, if an inner axis spans more than a pair of nodes."""
        known = self.neighbour.nodes == 1 or is_measured(self.hardware, "between.latency")
        if not known and any(group.nodes > PAIR for _, group in self.inner):
            return KINDS[self.hardware.between.kind].stall
        return 0.0 if known else self.stall

    def wait(self, group: RankGroup) -> float:
        """Seconds that a collective of an inner axis waits for ranks on other nodes."""
        known = group.nodes == 1 or is_measured(self.hardware, "between.latency")
        return 0.0 if known else KINDS[self.hardware.between.kind].wait * (group.nodes - 1)

    def time(self, kind: str, size: float, group: RankGroup) -> float:
        """Seconds to communicate `size` bytes, in messages of about `MESSAGE` bytes."""
        if group.ranks == 1 or size <= 0:
            return 0.0
        messages = max(1, round(size / MESSAGE))
        return messages * self.collective(kind, size / messages, group)
