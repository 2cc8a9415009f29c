"""How long a collective takes: bytes over what the slowest link on its way carries, and a latency for each hop.

As NCCL does, every way to do it is priced and the cheapest taken: a ring or a tree, in a protocol for large messages
or in one that trades bandwidth for latency, or a sum within the switch where the switch can add. Every constant says
where it comes from; those of links are in `meshwright.facts.links`. Numbers that a cluster's file calls measured are
taken as they are; of a data sheet's, links reach the share that their kind reaches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import ceil, log2

from meshwright.facts.catalogue import is_measured
from meshwright.facts.hardware import Hardware, Link
from meshwright.facts.links import KINDS, LAUNCH, ring_bytes, ring_steps

USUAL_NODE = 8
"""Devices of a node, where a group does not say."""
MESH_RINGS = {1: 6.0, 2: 1.0, 3: 2.0, 4: 4.0, 5: 1.6, 6: 2.0, 7: 4.0, 8: 6.0}
"""Links of a V100's six that rings among the first devices of a node can use: the rings of single links that DGX-1's
hybrid cube mesh has (NVIDIA's white paper). Five devices have no ring; a tree over one link does as well as 1.6."""
MESH_LINKS = 6
SWITCH_RANKS = 5
"""From how many ranks the switch adds up: below, nccl-tests on H100 run as fast with rings."""
SWITCH = 0.745
"""Of what rings reach, the rate at which a switch sums: 275 of 370 GB/s among 8 H100, say NCCL's authors."""
SWITCH_LATENCY = 25e-6
"""Seconds of a sum in the switch, NCCL's own tuning table."""
HALF_RING = 0.78
"""Of what an all-reduce's ring carries, what an all-gather's or reduce-scatter's does: 250 GB/s of 256 MB among 8 H100
under PyTorch (nanotron's playbook), where nccl-tests reach 365 with larger ones."""
_HALF_RINGS = ("all_gather", "reduce_scatter")
ONE_PROTOCOL = ("efa",)
"""Links over which NCCL has no protocol for small messages: AWS advises NCCL_PROTO=simple on EFA."""
PAIRS_AT_ONCE = 8
"""Peers that an all-to-all exchanges with at the same time: NCCL's sends and receives of one launch."""


@dataclass(frozen=True)
class RankGroup:
    """The ranks of one collective, and how they lie over nodes."""

    ranks: int
    per_node: int
    """Of these ranks, those on one node."""
    nodes: int
    devices_per_node: int = USUAL_NODE
    """All devices of a node. Groups of the other ones send at the same time, and share the node's link."""

    def __post_init__(self) -> None:
        if min(self.ranks, self.per_node, self.nodes, self.devices_per_node) < 1:
            raise ValueError(f"{self} has a number below 1; every rank lies on a node.")

    @property
    def share(self) -> float:
        """This group's part of the link between nodes."""
        return min(1.0, self.per_node / self.devices_per_node)


def group_on(axis_size: int, inner: int, devices_per_node: int) -> RankGroup:
    """The group of a mesh axis with `inner` consecutive ranks inside one step of it; the innermost axis has 1."""
    per_node = min(axis_size, max(1, devices_per_node // inner))
    return RankGroup(axis_size, per_node, ceil(axis_size / per_node), devices_per_node)


def seconds(kind: str, bytes: float, group: RankGroup, hardware: Hardware) -> float:
    """Time of one collective of `bytes`, while all other groups of the same axis do the same.

    Bytes are those of the whole tensor: what all ranks hold together after an all_gather or before a reduce_scatter,
    the tensor of an all_reduce, broadcast or send, and what one rank gives away in an all_to_all.
    """
    if kind not in _COSTS:
        raise ValueError(f"There is no cost of {kind!r}; collectives are {', '.join(_COSTS)}.")
    if group.ranks == 1 or bytes <= 0:
        return 0.0
    paths = _paths(group, _Links.of(hardware))
    return paths.launch + min(_COSTS[kind](kind, bytes, group, variant) for variant in paths.variants)


@dataclass(frozen=True)
class _Links:
    """What of a hardware matters here: small, and hashed quickly."""

    within: Link
    between: Link
    reached: tuple[bool, bool]
    """Whether the bandwidths are what was measured, and so need no allowance."""

    @classmethod
    def of(cls, hardware: Hardware) -> _Links:
        reached = (is_measured(hardware, "within.bandwidth"), is_measured(hardware, "between.bandwidth"))
        return cls(hardware.within, hardware.between, reached)


@dataclass(frozen=True)
class _Protocol:
    """Factors on the numbers of NCCL's protocol for large messages."""

    within: float
    """On the latency within a node."""
    between: float
    """On the latency between nodes."""
    bandwidth: float


_LARGE = _Protocol(1.0, 1.0, 1.0)
_SMALL = _Protocol(0.18, 0.36, 0.28)
"""LL: 0.6 of 3.4 us a hop on NVLink, 5 of 14 on a network; 88 of 300 GB/s among A100. NCCL's own tuning table."""


@dataclass(frozen=True)
class _Path:
    """What a group has of the links, in one protocol."""

    within: float
    """Bytes a second that a ring within a node carries."""
    between: float
    """Bytes a second that a node's part of this group sends to other nodes."""
    crowded: float
    """The same where many pairs of nodes send at once, as in a tree: flows meet in the network."""
    hop: float
    """Seconds from neighbour to neighbour on a node."""
    far_hop: float
    """Seconds from node to node."""
    half_ring: float = 1.0
    """Of what a ring within a node carries, what an all-gather or reduce-scatter reaches."""
    sums_in_switch: bool = False


@dataclass(frozen=True)
class _Paths:
    launch: float
    variants: tuple[_Path, ...]


@lru_cache(maxsize=4096)
def _paths(group: RankGroup, links: _Links) -> _Paths:
    is_gpu = links.within.kind != "shared-memory"
    # A measured latency is of the protocol that was chosen when it was measured.
    far = group.nodes > 1 and links.between.kind in ONE_PROTOCOL
    protocols = (_LARGE, _SMALL) if is_gpu and not any(links.reached) and not far else (_LARGE,)
    return _Paths(LAUNCH if is_gpu else 0.0, tuple(_path(group, links, protocol) for protocol in protocols))


def _path(group: RankGroup, links: _Links, protocol: _Protocol) -> _Path:
    contention = KINDS[links.between.kind].contention
    return _Path(
        within=_within(group, links) * protocol.bandwidth,
        between=_between(group, links) * protocol.bandwidth,
        crowded=_between(group, links) * protocol.bandwidth / (1 + contention * (group.nodes - 1)),
        hop=links.within.latency * protocol.within,
        far_hop=links.between.latency * protocol.between,
        half_ring=HALF_RING if _is_half(group, links) else 1.0,
        sums_in_switch=(links.within.kind == "nvlink-sharp" and group.per_node >= SWITCH_RANKS and protocol is _LARGE),
    )


def _is_half(group: RankGroup, links: _Links) -> bool:
    return group.nodes == 1 and links.within.kind == "nvlink-sharp" and not links.reached[0]


def _within(group: RankGroup, links: _Links) -> float:
    link = links.within
    if links.reached[0]:
        return link.bandwidth
    used = MESH_RINGS.get(group.per_node, MESH_LINKS) / MESH_LINKS if link.kind == "nvlink-mesh" else 1.0
    return link.bandwidth * KINDS[link.kind].efficiency * used


def _between(group: RankGroup, links: _Links) -> float:
    reached = 1.0 if links.reached[1] else KINDS[links.between.kind].efficiency
    return links.between.bandwidth * group.share * reached


def _ring(kind: str, size: float, group: RankGroup, path: _Path) -> float:
    """Every step waits for the slowest hop: an all-gather of 2 GB over 256 H100 runs as slowly as that says."""
    speeds = [path.within * (path.half_ring if kind in _HALF_RINGS else 1.0)] * (group.per_node > 1) + [
        path.between
    ] * (group.nodes > 1)
    hop = path.far_hop if group.nodes > 1 else path.hop
    return ring_steps(kind, group.ranks) * hop + ring_bytes(kind, size, group.ranks) / min(speeds)


def _sum_in_switch(size: float, path: _Path) -> float:
    return SWITCH_LATENCY + size / (path.within * SWITCH)


def _tree(size: float, group: RankGroup, path: _Path) -> float:
    """NCCL's double tree over nodes: each sends the tensor up and down, and with two nodes only to the other."""
    far = size * (1 if group.nodes == 2 else 2) / path.crowded
    hops = 2 * ceil(log2(group.nodes)) * path.far_hop
    if path.sums_in_switch:
        return hops + SWITCH_LATENCY + max(far, size / (path.within * SWITCH))
    near = ring_bytes("all_reduce", size, group.per_node) / path.within
    return hops + 2 * (group.per_node - 1) * path.hop + max(far, near)


def _all_reduce(kind: str, size: float, group: RankGroup, path: _Path) -> float:
    ways = [_ring(kind, size, group, path)]
    if group.nodes > 1:
        ways.append(_tree(size, group, path))
    elif path.sums_in_switch:
        ways.append(_sum_in_switch(size, path))
    return min(ways)


def _all_to_all(kind: str, size: float, group: RankGroup, path: _Path) -> float:
    """Each rank sends to all others at once; what leaves the node goes through the rank's part of its link."""
    far_ranks = group.ranks - group.per_node
    far = size * far_ranks / group.ranks / (path.between / group.per_node)
    near = size * (group.per_node - 1) / group.ranks / path.within
    rounds = ceil((group.ranks - 1) / PAIRS_AT_ONCE)
    return rounds * (path.far_hop if far_ranks else path.hop) + max(far, near)


def _send(kind: str, size: float, group: RankGroup, path: _Path) -> float:
    """To the next rank of the group, at the pace of the slowest pair: that which lies on two nodes."""
    if group.nodes > 1:
        return path.far_hop + size / path.between
    return path.hop + size / path.within


_Cost = Callable[[str, float, RankGroup, _Path], float]
_COSTS: Mapping[str, _Cost] = {
    "all_reduce": _all_reduce,
    "all_gather": _ring,
    "reduce_scatter": _ring,
    "all_to_all": _all_to_all,
    "broadcast": _ring,
    "send": _send,
}
