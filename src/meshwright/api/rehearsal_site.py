"""Where a rehearsal runs, and the cluster that it stands for."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from meshwright.api.job_planner import read_cluster
from meshwright.errors import BadInput
from meshwright.facts.catalogue import hardware_of
from meshwright.facts.cluster import Cluster
from meshwright.facts.forecast import Forecast
from meshwright.planner.account import capacity
from meshwright.planner.memory import WORKSPACE
from meshwright.probe.machine import local_cluster
from meshwright.runtime.place import choose_device, known_device
from meshwright.units import parse_bytes

NODE = 8
"""Devices of a node if no cluster is named."""
NO_LINKS: dict[str, Any] = {side: {"bandwidth": 1e18, "latency": 1e-12} for side in ("within", "between")}
"""A rank of a fake world waits for nobody."""


@dataclass(frozen=True, kw_only=True)
class RehearsalSite:
    """The device at hand, the cluster whose links count, and the bytes that a rank may hold."""

    device: str
    """"cuda" or "cpu"."""
    at_hand: Cluster
    """As many devices like the one at hand as the world has ranks, in the cluster's shape."""
    cluster: Cluster
    limit: int

    @property
    def world(self) -> int:
        return self.cluster.devices

    def causes(self, forecast: Forecast) -> dict[str, int]:
        """A closed-form forecast of bytes allocated by cause, without cuBLAS's workspaces if the device has none."""
        memory = {cause: size for cause, size in forecast.memory.items() if cause != "allocator"}
        if self.device == "cpu":
            memory["temporary"] = max(0, memory.get("temporary", 0) - WORKSPACE)
        return memory

    def needed(self, forecast: Forecast) -> int:
        """A closed-form forecast of the bytes that a rank holds: with what a GPU's allocator loses."""
        lost = 0 if self.device == "cpu" else forecast.memory.get("allocator", 0)
        return sum(self.causes(forecast).values()) + lost

    @property
    def is_named(self) -> bool:
        """Whether the user named the cluster."""
        return self.cluster is not self.at_hand


def find_site(*, world: int | None, on: str | None, device: str | None, memory: str | None) -> RehearsalSite:
    """The site that the options of the command line describe."""
    kind = choose_device(known_device(device))
    cluster = read_cluster(on) if on is not None else None
    if world is None and cluster is None:
        raise BadInput("A rehearsal needs the number of ranks; give --world N, or the cluster with --on.")
    if cluster is not None and world not in (None, cluster.devices):
        raise BadInput(
            f"--world {world} was given, but {cluster} has {cluster.devices} devices; leave one of them out."
        )
    ranks = cluster.devices if cluster is not None else world or 1
    at_hand = _like_the_one_at_hand(local_cluster(kind, devices=1), ranks, cluster)
    return make_site(kind, at_hand, cluster or at_hand, _read_memory(memory))


def make_site(device: str, at_hand: Cluster, cluster: Cluster, memory: int | None = None) -> RehearsalSite:
    room = round(capacity(hardware_of(cluster), cluster.devices))
    return RehearsalSite(device=device, at_hand=at_hand, cluster=cluster, limit=room if memory is None else memory)


def without_links(cluster: Cluster) -> Cluster:
    """The cluster with links that take no time."""
    hardware = {**cluster.hardware, **NO_LINKS}
    return replace(cluster, between_gbps=None, between_kind=None, hardware=hardware, source="")


def _like_the_one_at_hand(one: Cluster, ranks: int, cluster: Cluster | None) -> Cluster:
    if cluster is not None:
        return replace(one, nodes=cluster.nodes, devices_per_node=cluster.devices_per_node)
    per_node = ranks if one.device == "cpu" else next(n for n in range(min(NODE, ranks), 0, -1) if ranks % n == 0)
    return replace(one, nodes=ranks // per_node, devices_per_node=per_node)


def _read_memory(text: str | None) -> int | None:
    if text is None:
        return None
    try:
        size = parse_bytes(text)
    except ValueError as error:
        raise BadInput(f"--memory: {error}") from None
    if size <= 0:
        raise BadInput(f"--memory {text} leaves no memory; give a size such as 40GiB.")
    return size
