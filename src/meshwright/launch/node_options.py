"""Options of a run on several machines: how many, which one this is, where they meet, through which network.

Imports no torch.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from meshwright.errors import BadInput
from meshwright.launch.network import choose_interface, parse_endpoint, resolve


@dataclass(frozen=True, kw_only=True)
class NodeOptions:
    """This machine among the nodes of a run."""

    fewest: int
    most: int
    rank: int
    """Of this node; rank 0 holds the store where nodes meet."""
    host: str
    port: int
    """Of that store."""
    interface: str
    address: str
    """Of this node, on the interface."""
    wait: float
    """Seconds to wait for nodes that are missing."""


def node_options(
    nodes: str | None, rank: int | None, rendezvous: str | None, *, interface: str | None, wait: float
) -> NodeOptions | None:
    """The options as the user wrote them, checked; None without --nodes."""
    if nodes is None:
        if rank is not None or rendezvous is not None:
            raise BadInput("--node-rank and --rendezvous are for several machines; say how many with --nodes.")
        return None
    fewest, most = _count(nodes)
    if rank is None or rendezvous is None:
        missing = "--node-rank" if rank is None else "--rendezvous"
        raise BadInput(f"--nodes {nodes} needs {missing}; give each machine its --node-rank and all the --rendezvous.")
    if rank >= most:
        raise BadInput(f"--node-rank {rank} is not below --nodes {nodes}; nodes count from 0.")
    host, port = parse_endpoint(rendezvous)
    address = resolve(host)
    name, own = choose_interface(interface, host)
    return NodeOptions(
        fewest=fewest, most=most, rank=rank, host=address, port=port, interface=name, address=own, wait=wait
    )


def _count(text: str) -> tuple[int, int]:
    """The fewest and the most nodes of `N` or `FEWEST:MOST`."""
    found = re.fullmatch(r"(\d+)(?::(\d+))?", text)
    fewest, most = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
    if not 0 < fewest <= most:
        raise BadInput(f"--nodes must be a number such as 2, or the fewest and the most such as 1:2, not {text!r}.")
    return fewest, most
