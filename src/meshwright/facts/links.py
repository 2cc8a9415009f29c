"""Kinds of links, what collectives reach of them, and what a ring sends: shared by who foretells and who measures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, kw_only=True)
class LinkKind:
    """What is alike on all links of a kind. A data sheet's rate times `efficiency` is what collectives reach."""

    efficiency: float
    """Share of the line rate that large collectives reach."""
    latency: float
    """Seconds of one hop, for NCCL's protocol for large messages."""
    contention: float = 0.0
    """How much slower a node's link gets for each further node, as a share of its own speed."""
    source: str
    """Where the numbers come from."""


LAUNCH = 25e-6
"""Seconds before the first byte of a collective among GPUs moves. All-reduces of 1 MB among 2 A100 take 44 us, of which
wire and hops are 13 (vTrain's tables); nccl-tests print 12 to 25 us for the smallest messages."""

_NCCL = "NCCL's own tuning table"
KINDS: Mapping[str, LinkKind] = MappingProxyType(
    {
        "nvlink": LinkKind(
            efficiency=0.77,
            latency=4e-6,
            source="230 of 300 GB/s, large all-reduces among 8 A100 (vTrain's tables); 3.4 to 4 us a hop, " + _NCCL,
        ),
        "nvlink-mesh": LinkKind(
            efficiency=0.9,
            latency=4e-6,
            source="22.5 of 25 GB/s a link, all-reduces among V100 (vTrain's tables); 3.4 to 4 us a hop, " + _NCCL,
        ),
        "nvlink-sharp": LinkKind(
            efficiency=0.8,
            latency=4e-6,
            source="NCCL's authors: 20 % of 450 GB/s is protocol, rings among H100 reach 365 to 370; 4 us, " + _NCCL,
        ),
        "infinity-fabric": LinkKind(
            efficiency=0.7,
            latency=6e-6,
            source="AMD's RCCL guide: 310 to 330 of 448 GB/s, all-reduce among 8 MI300X; the latency is assumed",
        ),
        "pcie": LinkKind(
            efficiency=0.63,
            latency=5.7e-6,
            source="20 of 31.5 GB/s, nccl-tests among A100 without a bridge; 5.7 us a hop, " + _NCCL,
        ),
        "infiniband": LinkKind(
            efficiency=0.93,
            latency=14e-6,
            source="NCCL's authors: 46 to 48 of 50 GB/s for each adapter; 14 us a hop, " + _NCCL,
        ),
        "roce": LinkKind(
            efficiency=0.9,
            latency=17e-6,
            contention=0.005,
            source="200 GB/s, all-gather of 2 GB over 32 nodes of 8 H100 (nccl-tests): 19 us a hop if wires were full",
        ),
        "efa": LinkKind(
            efficiency=0.9,
            latency=43e-6,
            contention=0.2,
            source="256 MB collectives on 2 to 64 nodes of 8 H100 (nanotron's playbook, means over runs)",
        ),
        "ethernet": LinkKind(
            efficiency=0.8,
            latency=50e-6,
            contention=0.005,
            source="assumed of TCP sockets; two nodes with TCP offload reached 0.9 of 200 GB/s (nccl-tests)",
        ),
        "shared-memory": LinkKind(
            efficiency=1.0,
            latency=300e-6,
            source="gloo on the loopback device, as probe found it between 2 busy CPU ranks",
        ),
    }
)
"""By the word that stands in `Link.kind` and after the colon of `@400Gbps:roce`."""

BETWEEN_KINDS = ("infiniband", "roce", "efa", "ethernet")
"""Kinds that may lie between nodes."""


def ring_steps(kind: str, ranks: int) -> int:
    """How many times data moves from neighbour to neighbour, one after the other."""
    return {"all_reduce": 2 * (ranks - 1), "send": 1}.get(kind, ranks - 1)


def ring_bytes(kind: str, size: float, ranks: int) -> float:
    """Bytes that each rank sends on in a ring, for a tensor of `size` bytes: bus bandwidth is these by the time."""
    if kind in ("broadcast", "send"):
        return size
    return size * (2 if kind == "all_reduce" else 1) * (ranks - 1) / ranks
