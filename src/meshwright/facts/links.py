"""Kinds of links with their efficiencies, and the traffic of a ring; used by forecasts and by measurements."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, kw_only=True)
class LinkKind:
    """Properties of all links of a kind. Collectives reach a data sheet's rate times `efficiency`."""

    efficiency: float
    """Share of the line rate that large collectives reach."""
    latency: float
    """Seconds of one hop in NCCL's protocol for large messages."""
    contention: float = 0.0
    """Slowdown of a node's link in trees for each further node, as a share: many pairs of nodes send at once."""
    ring_contention: float = 0.0
    """The same in rings."""
    ring_crowding: float = 0.0
    """Slowdown of rings with each doubling of the groups that send over the same network, as a share."""
    crowding: float = 0.0
    """Growth of a hop's latency with each doubling of the groups that send over the same network, as a share."""
    wait: float = 0.0
    """Seconds that a collective of a tensor axis waits for each further node of its group: in a step, ranks on other
    nodes are less in time than when nothing but collectives runs."""
    stalled: float = 0.0
    """Share of nodes with a path on which messages stall."""
    stall: float = 0.0
    """Seconds that a message loses there."""
    source: str
    """Where the numbers come from."""

    def usual_stall(self, nodes: int) -> float:
        """Seconds that each message loses in the median run over `nodes`: none, until most runs meet a stalled path."""
        return self.stall if (1 - self.stalled) ** nodes < 0.5 else 0.0


LAUNCH = 25e-6
"""Seconds before the first byte of a collective among GPUs moves. All-reduces of 1 MB among 2 A100 take 44 us, of which
wire and hops are 13 (vTrain's tables); nccl-tests print 12 to 25 us for the smallest messages."""

_NVLINK = (
    "230 of 300 GB/s, large all-reduces among 8 A100 (vTrain's tables); 3.4 to 4 us a hop, NCCL's own tuning table"
)
_MESH = "22.5 of 25 GB/s a link, all-reduces among V100 (vTrain's tables); 3.4 to 4 us a hop, NCCL's own tuning table"
_SHARP = (
    "NCCL's authors: 20 % of 450 GB/s is protocol, rings among H100 reach 365 to 370; 4 us, NCCL's own tuning table"
)
_FABRIC = "AMD's RCCL guide: 310 to 330 of 448 GB/s, all-reduce among 8 MI300X; the latency is assumed"
_PCIE = "20 of 31.5 GB/s, nccl-tests among A100 without a bridge; 5.7 us a hop, NCCL's own tuning table"
_INFINIBAND = "NCCL's authors: 46 to 48 of 50 GB/s for each adapter; 14 us a hop, NCCL's own tuning table"
_ROCE = "200 GB/s, all-gather of 2 GB over 32 nodes of 8 H100 (nccl-tests): 19 us a hop if wires were full"
_EFA = (
    "256 MB collectives on 2 to 64 nodes of 8 H100 (nanotron's playbook, means over runs). Stalls: its sweep of 1B and "
    "3B decoders, where 8 % of the pipelines on 4 nodes, 14 % on 16, 32 % on 32 and 87 % on 64 lose 0.3 s in each "
    "message between stages. Rings and crowding: sums of gradients and tensor axes on 2 to 64 nodes of that sweep, "
    "fitted together with the collectives. Waits: its tensor axes of 16 and 32 ranks without pipelines, whose smallest "
    "collectives take 0.9 and 2.1 ms, whether 1 or 16 groups send"
)
_ETHERNET = "assumed of TCP sockets; two nodes with TCP offload reached 0.9 of 200 GB/s (nccl-tests)"
_GLOO = "gloo on the loopback device, as probe found it between 2 busy CPU ranks"
KINDS: Mapping[str, LinkKind] = MappingProxyType(
    {
        "nvlink": LinkKind(efficiency=0.77, latency=4e-6, source=_NVLINK),
        "nvlink-mesh": LinkKind(efficiency=0.9, latency=4e-6, source=_MESH),
        "nvlink-sharp": LinkKind(efficiency=0.8, latency=4e-6, source=_SHARP),
        "infinity-fabric": LinkKind(efficiency=0.7, latency=6e-6, source=_FABRIC),
        "pcie": LinkKind(efficiency=0.63, latency=5.7e-6, source=_PCIE),
        "infiniband": LinkKind(efficiency=0.93, latency=14e-6, source=_INFINIBAND),
        "roce": LinkKind(efficiency=0.9, latency=17e-6, contention=0.005, source=_ROCE),
        "efa": LinkKind(
            efficiency=0.9,
            latency=35e-6,
            contention=0.2,
            ring_contention=0.095,
            ring_crowding=0.17,
            crowding=0.085,
            wait=160e-6,
            stalled=0.016,
            stall=0.295,
            source=_EFA,
        ),
        "ethernet": LinkKind(efficiency=0.8, latency=50e-6, contention=0.005, source=_ETHERNET),
        "shared-memory": LinkKind(efficiency=1.0, latency=300e-6, source=_GLOO),
    }
)
"""By the word in `Link.kind` and after the colon of `@400Gbps:roce`."""

BETWEEN_KINDS = ("infiniband", "roce", "efa", "ethernet")
"""Kinds of links between nodes."""


GLOO: Mapping[str, str] = MappingProxyType({"reduce_scatter": "all_reduce"})
"""Collectives that gloo runs as others: it all-reduces a copy, and each rank keeps its part. Between two ranks on a
link of 1 Gbit/s, both take the same time (docs/data/accumulation_link.json)."""


def ring_steps(kind: str, ranks: int) -> int:
    """Sequential steps in which data moves between neighbours."""
    return {"all_reduce": 2 * (ranks - 1), "send": 1}.get(kind, ranks - 1)


def ring_bytes(kind: str, size: float, ranks: int) -> float:
    """Bytes that each rank sends in a ring, for a tensor of `size` bytes; bus bandwidth is these over the time."""
    if kind in ("broadcast", "send"):
        return size
    return size * (2 if kind == "all_reduce" else 1) * (ranks - 1) / ranks
