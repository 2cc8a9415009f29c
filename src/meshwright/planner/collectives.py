"""Seconds of a collective: bytes over the bandwidth of its slowest link, plus a latency per hop.

Like NCCL, price every algorithm and take the cheapest: a ring or a tree, in the protocol for large messages or in the
one that trades bandwidth for latency, or a sum inside the switch. Every constant cites its source; `facts/links.py` has
those of links. Measured bandwidths are used as they are; a data sheet's are multiplied by the link's efficiency.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import ceil, log2

from meshwright.facts.catalogue import is_measured
from meshwright.facts.hardware import Hardware, Link
from meshwright.facts.links import GLOO, KINDS, LAUNCH, ring_bytes, ring_steps

USUAL_NODE = 8
"""Devices of a node, if a group does not specify them."""
MESH_RINGS = {1: 6.0, 2: 1.0, 3: 2.0, 4: 4.0, 5: 1.6, 6: 2.0, 7: 4.0, 8: 6.0}
"""How many of a V100's six links rings among the first N devices of a node can use, in DGX-1's hybrid cube mesh
(NVIDIA's white paper). Five devices have no ring; a tree over one link does as well as 1.6."""
MESH_LINKS = 6
SWITCH_RANKS = 5
"""Ranks from which NCCL sums in the switch: below, nccl-tests on H100 run as fast with rings."""
SWITCH = 0.745
"""Rate of a sum in the switch, relative to a ring: 275 of 370 GB/s among 8 H100, say NCCL's authors."""
SWITCH_LATENCY = 25e-6
"""Seconds, from NCCL's tuning table."""
HALF_RING = 0.87
"""Rate of an all-gather's or reduce-scatter's ring, relative to an all-reduce's: tensor axes of 8 H100 exchange 67 to
400 MB at 0.85 to 0.9 of it (nanotron's sweep). Its playbook has 250 GB/s for 256 MB alone, which is 0.78."""
_HALF_RINGS = ("all_gather", "reduce_scatter")
ONE_PROTOCOL = ("efa",)
"""Links on which NCCL has no protocol for small messages: AWS advises NCCL_PROTO=simple on EFA."""
PAIRS_AT_ONCE = 8
"""Peers that an all-to-all exchanges with at a time: NCCL's sends and receives of one launch."""


@dataclass(frozen=True)
class RankGroup:
    """The ranks of one collective, and their distribution over nodes."""

    ranks: int
    per_node: int
    """Ranks of the group on one node."""
    nodes: int
    devices_per_node: int = USUAL_NODE
    """All devices of a node. The other devices' groups send at the same time, and share the node's link."""
    job_nodes: int = 1
    """Nodes of the whole job, if more than the group's: other groups of the same axis send between them."""

    def __post_init__(self) -> None:
        if min(self.ranks, self.per_node, self.nodes, self.devices_per_node) < 1:
            raise ValueError(f"{self} has a number below 1; all of them must be at least 1.")

    @property
    def share(self) -> float:
        """This group's share of the link between nodes."""
        return min(1.0, self.per_node / self.devices_per_node)

    @property
    def doublings(self) -> float:
        """How often the groups that send between nodes at the same time double from one."""
        return log2(max(1.0, self.job_nodes / self.nodes))


def group_on(axis_size: int, inner: int, devices_per_node: int, job_nodes: int = 1) -> RankGroup:
    """The group of a mesh axis with `inner` consecutive ranks inside one step of it; the innermost axis has 1."""
    per_node = min(axis_size, max(1, devices_per_node // inner))
    return RankGroup(axis_size, per_node, ceil(axis_size / per_node), devices_per_node, job_nodes)


def seconds(kind: str, bytes: float, group: RankGroup, hardware: Hardware) -> float:
    """Time of one collective of `bytes`, while all other groups of the same axis run the same one.

    `bytes` is the size of the whole tensor: what all ranks hold together after an all_gather or before a
    reduce_scatter, the tensor of an all_reduce, broadcast or send, and what one rank sends in an all_to_all.
    """
    if kind not in _COSTS:
        raise ValueError(f"Unknown collective {kind!r}; known are {', '.join(_COSTS)}.")
    if group.ranks == 1 or bytes <= 0:
        return 0.0
    if hardware.within.kind == "shared-memory":
        kind = GLOO.get(kind, kind)
    launch, paths = _paths(group, _Links.of(hardware))
    return launch + min(_COSTS[kind](kind, bytes, group, path) for path in paths)


@dataclass(frozen=True)
class _Links:
    """The part of `Hardware` that matters here, small enough to be hashed quickly."""

    within: Link
    between: Link
    measured: tuple[bool, bool]
    """Whether the bandwidths within and between nodes were measured, and need no discount for efficiency."""

    @classmethod
    def of(cls, hardware: Hardware) -> _Links:
        measured = (is_measured(hardware, "within.bandwidth"), is_measured(hardware, "between.bandwidth"))
        return cls(hardware.within, hardware.between, measured)


@dataclass(frozen=True)
class _Protocol:
    """Factors relative to NCCL's protocol for large messages: latency within and between nodes, and bandwidth."""

    within: float
    between: float
    bandwidth: float


_LARGE = _Protocol(1.0, 1.0, 1.0)
_SMALL = _Protocol(0.18, 0.36, 0.28)
"""LL: 0.6 of 3.4 us a hop on NVLink, 5 of 14 on a network; 88 of 300 GB/s among A100. NCCL's tuning table."""


@dataclass(frozen=True)
class _Path:
    """Bandwidth and latency that a group gets from its links under one protocol."""

    within: float
    """Bytes per second of a ring within a node."""
    between: float
    """Bytes per second from one node's part of the group to other nodes."""
    crowded: float
    """The same when many pairs of nodes send at once, as in a tree, and their flows collide."""
    hop: float
    """Seconds between neighbours on a node."""
    far_hop: float
    """Seconds between nodes."""
    half_ring: float = 1.0
    """Share of `within` that an all-gather or reduce-scatter reaches."""
    sums_in_switch: bool = False
    has_trees: bool = True
    """Whether all-reduces over nodes may run as trees, as NCCL's do; gloo has rings only."""


@lru_cache(maxsize=4096)
def _paths(group: RankGroup, links: _Links) -> tuple[float, tuple[_Path, ...]]:
    """Seconds of the launch, and the group's path under each protocol."""
    is_gpu = links.within.kind != "shared-memory"
    # A measured latency already belongs to the protocol that NCCL chose.
    far = group.nodes > 1 and links.between.kind in ONE_PROTOCOL
    protocols = (_LARGE, _SMALL) if is_gpu and not any(links.measured) and not far else (_LARGE,)
    return LAUNCH if is_gpu else 0.0, tuple(_path(group, links, protocol) for protocol in protocols)


def _path(group: RankGroup, links: _Links, protocol: _Protocol) -> _Path:
    kind = KINDS[links.between.kind]
    efficiency = 1.0 if links.measured[1] else kind.efficiency
    between = links.between.bandwidth * group.share * efficiency * protocol.bandwidth
    has_switch = links.within.kind == "nvlink-sharp"
    return _Path(
        within=_within(group, links) * protocol.bandwidth,
        between=between / (1 + kind.ring_contention * (group.nodes - 1) + kind.ring_crowding * group.doublings),
        crowded=between / (1 + kind.contention * (group.nodes - 1)),
        hop=links.within.latency * protocol.within,
        far_hop=links.between.latency * protocol.between * (1 + kind.crowding * group.doublings),
        half_ring=HALF_RING if has_switch and group.nodes == 1 and not links.measured[0] else 1.0,
        sums_in_switch=has_switch and group.per_node >= SWITCH_RANKS and protocol is _LARGE,
        has_trees=links.within.kind != "shared-memory",
    )


def _within(group: RankGroup, links: _Links) -> float:
    link = links.within
    if links.measured[0]:
        return link.bandwidth
    used = MESH_RINGS.get(group.per_node, MESH_LINKS) / MESH_LINKS if link.kind == "nvlink-mesh" else 1.0
    return link.bandwidth * KINDS[link.kind].efficiency * used


def _ring(kind: str, size: float, group: RankGroup, path: _Path) -> float:
    """Every step waits for the slowest hop, which nccl-tests of 2 GB all-gathers over 256 H100 confirm."""
    near = [path.within * (path.half_ring if kind in _HALF_RINGS else 1.0)] if group.per_node > 1 else []
    far = [path.between] if group.nodes > 1 else []
    hop = path.far_hop if group.nodes > 1 else path.hop
    return ring_steps(kind, group.ranks) * hop + ring_bytes(kind, size, group.ranks) / min(near + far)


def _tree(size: float, group: RankGroup, path: _Path) -> float:
    """NCCL's double tree over nodes: each node sends the tensor up and down; with two nodes, only to the other."""
    far = size * (1 if group.nodes == 2 else 2) / path.crowded
    hops = 2 * ceil(log2(group.nodes)) * path.far_hop
    if path.sums_in_switch:
        return hops + SWITCH_LATENCY + max(far, size / (path.within * SWITCH))
    near = ring_bytes("all_reduce", size, group.per_node) / path.within
    return hops + 2 * (group.per_node - 1) * path.hop + max(far, near)


def _all_reduce(kind: str, size: float, group: RankGroup, path: _Path) -> float:
    ring = _ring(kind, size, group, path)
    if group.nodes > 1:
        return min(ring, _tree(size, group, path)) if path.has_trees else ring
    return min(ring, SWITCH_LATENCY + size / (path.within * SWITCH)) if path.sums_in_switch else ring


def _ring_all_reduce(kind: str, size: float, group: RankGroup, path: _Path) -> float:
    """An all-reduce that has no other choice."""
    return _ring("all_reduce", size, group, path)


def _all_to_all(kind: str, size: float, group: RankGroup, path: _Path) -> float:
    """Each rank sends to all others at once; what leaves the node goes through the rank's share of its link."""
    far_ranks = group.ranks - group.per_node
    far = size * far_ranks / group.ranks / (path.between / group.per_node)
    near = size * (group.per_node - 1) / group.ranks / path.within
    rounds = ceil((group.ranks - 1) / PAIRS_AT_ONCE)
    return rounds * (path.far_hop if far_ranks else path.hop) + max(far, near)


def _send(kind: str, size: float, group: RankGroup, path: _Path) -> float:
    """Send to the next rank of the group, at the pace of the slowest pair: the one that spans two nodes."""
    if group.nodes > 1:
        return path.far_hop + size / path.between
    return path.hop + size / path.within


_Cost = Callable[[str, float, RankGroup, _Path], float]
_COSTS: Mapping[str, _Cost] = {
    "all_reduce": _all_reduce,
    "ring_all_reduce": _ring_all_reduce,
    "all_gather": _ring,
    "reduce_scatter": _ring,
    "all_to_all": _all_to_all,
    "broadcast": _ring,
    "reduce": _ring,
    "gather": _ring,
    "scatter": _ring,
    "send": _send,
}
