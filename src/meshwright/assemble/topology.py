"""Where the axes of a strategy are: within a node, or across nodes.

Ranks are numbered node by node, and the mesh has the innermost axis last. So tensor axes stay within a node where they
fit, then shards; pipeline stages and replicas are across nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from meshwright.assemble.axes import mesh_sizes
from meshwright.facts.strategy import Strategy


def crossing(sizes: dict[str, int], per_node: int) -> dict[str, bool]:
    """Whether groups of each axis have ranks of several nodes; the innermost axis is last."""
    found, stride = {}, 1
    for name, size in reversed(sizes.items()):
        firsts = [rank for rank in range(_ranks(sizes)) if rank // stride % size == 0]
        found[name] = any(first // per_node != (first + (size - 1) * stride) // per_node for first in firsts)
        stride *= size
    return found


def picture(strategy: Strategy, hosts: Sequence[str]) -> str:
    """The ranks of each host with their places on the axes, and which axes send between hosts."""
    sizes = mesh_sizes(strategy)
    ranks = _ranks(sizes)
    per_node = max(1, ranks // len(hosts))
    lines = [f"{strategy} on {len(hosts)} nodes of {per_node} rank{'s' * (per_node > 1)}"]
    width = max(len(host) for host in hosts)
    for node, host in enumerate(hosts):
        own = range(node * per_node, (node + 1) * per_node)
        lines.append(f"  {host:{width}}  " + "   ".join(f"[{rank}] {_place(rank, sizes)}" for rank in own))
    return "\n".join([*lines, f"  {_links(strategy, sizes, per_node)}"])


def _links(strategy: Strategy, sizes: dict[str, int], per_node: int) -> str:
    across = crossing(sizes, per_node)
    sides = {
        "within a node": [name for name in sizes if not across[name]],
        "between nodes": [name for name in sizes if across[name]],
    }
    said = "; ".join(f"{where}: {_sized(names, sizes)}" for where, names in sides.items() if names)
    inner = [term for term in strategy.inner_axes if across.get(term.traits.mesh_name)]
    if inner:
        said += f". {inner[0]} sends in every layer, and now between nodes: {per_node} or fewer would stay within one"
    return said


def _sized(names: Sequence[str], sizes: dict[str, int]) -> str:
    return ", ".join(f"{name} ({sizes[name]})" for name in names)


def _place(rank: int, sizes: dict[str, int]) -> str:
    found, names = [], list(sizes)
    for position, name in enumerate(names):
        stride = prod(sizes[inner] for inner in names[position + 1 :])
        found.append(f"{name} {rank // stride % sizes[name]}")
    return ", ".join(found)


def _ranks(sizes: dict[str, int]) -> int:
    return prod(sizes.values())
