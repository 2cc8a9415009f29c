"""Measure collectives by kind and size, among consecutive ranks and among strided ones, and fit links to them.

Note on the fit, by least squares of relative errors: a ring takes `launch + steps x latency + bytes / bandwidth`
seconds, which is linear in the latency and in the inverse bandwidth. Dividing every row by its seconds gives small and
large messages the same weight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from meshwright.assemble.world import World
from meshwright.facts.links import GLOO, ring_bytes, ring_steps
from meshwright.probe.device import SLOW, time_of
from meshwright.strategies.collectives import all_gather, reduce_scatter
from meshwright.units import KIB, MIB

GPU_SIZES = (256 * KIB, 4 * MIB, 64 * MIB, 256 * MIB)
CPU_SIZES = (16 * KIB, 256 * KIB, 4 * MIB, 16 * MIB)
RINGS = {"cuda": ("all_gather", "reduce_scatter"), "cpu": ("all_reduce", "all_gather", "reduce_scatter")}
"""Collectives that run as rings, by device: NCCL may sum in the switch or in a tree. Others are only shown."""
RUNS_AS: dict[str, Mapping[str, str]] = {"cuda": {}, "cpu": GLOO}
"""Collectives that run as others, by device."""
_LEAST = 1e-7
"""The least seconds of a hop, which noise could make negative."""
Run = Callable[[], Any]
_Point = tuple[float, float, float]
"""Steps, bytes and seconds of a ring."""


def layouts(ranks: int) -> dict[str, list[list[int]]]:
    """Groups to measure: all ranks, and for four or more also consecutive and interleaved halves."""
    everyone = list(range(ranks))
    found = {"all": [everyone]}
    if ranks >= 4 and ranks % 2 == 0:
        half = ranks // 2
        found["consecutive"] = [everyone[:half], everyone[half:]]
        found["strided"] = [everyone[0::2], everyone[1::2]]
    return found


def measure_collectives(world: World) -> Iterator[dict[str, Any]]:
    """Yield one row per layout, kind and size, with the seconds of the slowest rank; the same on every rank."""
    for layout, groups in layouts(world.ranks).items():
        group, _ = dist.new_subgroups_by_enumeration(groups)
        own = next(ranks for ranks in groups if world.rank in ranks)
        for kind in _KINDS:
            for row in _by_size(kind, group, world):
                yield {**_place(own, world), "layout": layout, "kind": kind, **row}
        dist.destroy_process_group(group)


def _by_size(kind: str, group: dist.ProcessGroup, world: World) -> Iterator[dict[str, Any]]:
    ranks = group.size()
    for size in GPU_SIZES if world.device.type == "cuda" else CPU_SIZES:
        count = size // 4 // ranks * ranks
        run = _KINDS[kind](count, world.device, group)
        seconds = _slowest(world, time_of(run, world.device, agree=lambda once: _slowest(world, once)))
        yield {"bytes": 4 * count, "seconds": seconds, "bus": ring_bytes(kind, 4 * count, ranks) / seconds}
        if seconds > SLOW:
            return


def _place(own: list[int], world: World) -> dict[str, int]:
    nodes = [rank // world.local_ranks for rank in own]
    return {"ranks": len(own), "per_node": nodes.count(nodes[0]), "nodes": len(set(nodes))}


def _slowest(world: World, seconds: float) -> float:
    value = torch.tensor(seconds, dtype=torch.float64, device=world.device)
    dist.all_reduce(value, dist.ReduceOp.MAX)
    return float(value)


def _all_reduce(count: int, device: torch.device, group: dist.ProcessGroup) -> Run:
    value = torch.zeros(count, device=device)
    return lambda: dist.all_reduce(value, group=group)


def _all_gather(count: int, device: torch.device, group: dist.ProcessGroup) -> Run:
    whole = torch.zeros(count, device=device)
    part = torch.zeros(count // group.size(), device=device)
    return lambda: all_gather(whole, part, group=group)


def _reduce_scatter(count: int, device: torch.device, group: dist.ProcessGroup) -> Run:
    whole = torch.zeros(count, device=device)
    part = torch.zeros(count // group.size(), device=device)
    return lambda: reduce_scatter(part, whole, group=group)


def _all_to_all(count: int, device: torch.device, group: dist.ProcessGroup) -> Run:
    source, target = torch.zeros(count, device=device), torch.zeros(count, device=device)
    return lambda: dist.all_to_all_single(target, source, group=group)


def _broadcast(count: int, device: torch.device, group: dist.ProcessGroup) -> Run:
    value = torch.zeros(count, device=device)
    return lambda: dist.broadcast(value, group=group, group_src=0)


def _send(count: int, device: torch.device, group: dist.ProcessGroup) -> Run:
    """Send from every even rank of the group to the next; a last rank without a partner does nothing."""
    value, rank = torch.zeros(count, device=device), dist.get_rank(group)
    if rank % 2:
        return lambda: dist.recv(value, group=group, group_src=rank - 1)
    if rank + 1 < group.size():
        return lambda: dist.send(value, group=group, group_dst=rank + 1)
    return lambda: None


_KINDS: dict[str, Callable[[int, torch.device, dist.ProcessGroup], Run]] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "broadcast": _broadcast,
    "send": _send,
}


@dataclass(frozen=True, kw_only=True)
class LinkFit:
    """A link's fitted bandwidth and latency."""

    bandwidth: float
    """Bytes per second: of a device within a node, of a node between nodes."""
    latency: float
    error: float
    """Median relative error of the fit over the rows."""
    rows: int


def fit_link(
    rows: Sequence[dict[str, Any]],
    *,
    launch: float = 0.0,
    devices_per_node: int = 1,
    kinds: Sequence[str] = RINGS["cpu"],
    runs_as: Mapping[str, str] | None = None,
) -> LinkFit | None:
    """Fit the rows; None without rows. `runs_as` names collectives that run as others.

    A group between nodes has the share of a node's link that its ranks have of the node's devices.
    """
    chosen = [{**row, "kind": (runs_as or {}).get(row["kind"], row["kind"])} for row in rows if row["kind"] in kinds]
    points = [_point(row, launch, devices_per_node) for row in chosen]
    if not points:
        return None
    latency, inverse = _solve(points)
    error = median(abs(steps * latency + size * inverse - seconds) / seconds for steps, size, seconds in points)
    return LinkFit(bandwidth=1 / inverse, latency=latency, error=error, rows=len(points))


def _point(row: dict[str, Any], launch: float, devices_per_node: int) -> _Point:
    share = min(1.0, row["per_node"] / devices_per_node) if row["nodes"] > 1 else 1.0
    size = ring_bytes(row["kind"], row["bytes"], row["ranks"]) / share
    return ring_steps(row["kind"], row["ranks"]), size, max(row["seconds"] - launch, _LEAST)


def _solve(points: Sequence[_Point]) -> tuple[float, float]:
    """Latency and seconds per byte, both positive."""
    rows = [(steps / seconds, size / seconds) for steps, size, seconds in points]
    aa, ab, bb = sum(x * x for x, _ in rows), sum(x * y for x, y in rows), sum(y * y for _, y in rows)
    a, b = sum(x for x, _ in rows), sum(y for _, y in rows)
    determinant = aa * bb - ab * ab
    latency = (a * bb - b * ab) / determinant if determinant else 0.0
    inverse = (b * aa - a * ab) / determinant if determinant else 0.0
    if inverse <= 0:  # latency hides the bandwidth: the largest message shows it best
        inverse = min(seconds / size for _, size, seconds in points)
    return max(latency, _LEAST), inverse
