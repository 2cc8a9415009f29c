"""Catalogue of devices and their usual nodes, by name; `hardware_of` gives a cluster's numbers with their sources.

`cards.json` has the numbers of data sheets. Matmul rates are dense: if a sheet prints the rate with sparsity, half
of it is used. Memory is what CUDA reports to a process, which is less than what is printed on the card. Bridges, which
join two cards on PCIe, are not counted.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from meshwright.errors import ClusterError
from meshwright.facts.cluster import LOCAL, Cluster
from meshwright.facts.hardware import Hardware, Link, is_complete, lay_over
from meshwright.facts.links import KINDS
from meshwright.units import GIB

MEASURED = "measured"
"""Prefix of a measured number's source: it is an achieved rate, where a data sheet gives a peak."""
GBPS = 1e9 / 8
"""Bytes per second."""
_LAUNCH = 6e-6
_CPU_LAUNCH = 4e-6


@dataclass(frozen=True)
class Node:
    """The machine that a device usually comes in."""

    source: str
    gbps: float
    """Gbit/s to other nodes."""
    kind: str
    host_gib: float


@dataclass(frozen=True)
class Card:
    """One device."""

    sheet: str
    """The data sheet that flops, bandwidth and links come from."""
    gib: float
    """Memory available to a process."""
    tflops: Mapping[str, float]
    """Dense, by compute dtype; dtypes without hardware support are left out."""
    gb_s: float
    """GB/s of the device's memory."""
    within: tuple[str, float]
    """Kind of the link to its siblings, and its GB/s in one direction."""
    host_gb_s: float
    """GB/s to the host in one direction."""
    node: Node
    reach: Mapping[str, float] = field(default_factory=dict)
    """Measured shares of the peaks that a training step's kernels reach."""
    reach_source: str = ""


_TABLES: dict[str, Any] = json.loads(Path(__file__).with_name("cards.json").read_text(encoding="utf-8"))
_NODES = {name: Node(**values) for name, values in _TABLES["nodes"].items()}


def _read_card(values: Mapping[str, Any]) -> Card:
    return Card(**{**values, "node": _NODES[values["node"]]})


CARDS: Mapping[str, Card] = {name: _read_card(values) for name, values in _TABLES["cards"].items()}
"""By the name used in a cluster's text. A name without a form factor means SXM, if there is one."""
OTHER_NAMES: Mapping[str, str] = _TABLES["other names"]
"""Aliases of one device of the catalogue. `A100` and `V100` would match two each, so they are not aliases."""
UNKNOWN_GPU = _read_card(_TABLES["unknown gpu"])


def hardware_of(cluster: Cluster) -> Hardware:
    """Numbers of one node: the catalogue's, overridden by what the cluster says about itself."""
    if cluster.device == LOCAL:
        raise ClusterError("local means this machine, which must be inspected first: use `local_cluster()`.")
    name = catalogue_name(cluster.device)
    if name is None and not is_complete(cluster.hardware):
        raise ClusterError(_unknown(cluster.device))
    base = hardware_of_device(name)
    hardware = Hardware.from_json(lay_over(base.to_json(), cluster.hardware)) if cluster.hardware else base
    return _with_memory(_with_link(replace(hardware, device=cluster.device), cluster), cluster)


def hardware_of_device(name: str | None) -> Hardware:
    """The catalogue's numbers for a device; None means a GPU that it does not know."""
    card = UNKNOWN_GPU if name is None else CARDS[name]
    is_cpu = name == "cpu"
    kind, rate = card.within
    return Hardware(
        device=name or "gpu",
        memory=round(card.gib * GIB),
        flops={dtype: rate * 1e12 for dtype, rate in card.tflops.items()},
        bandwidth=card.gb_s * 1e9,
        launch=_CPU_LAUNCH if is_cpu else _LAUNCH,
        within=Link(kind=kind, bandwidth=rate * 1e9, latency=KINDS[kind].latency),
        between=_between(card.node.gbps, card.node.kind),
        host=Link(kind="shared-memory" if is_cpu else "pcie", bandwidth=card.host_gb_s * 1e9, latency=10e-6),
        host_memory=round(card.node.host_gib * GIB),
        reach=card.reach,
        sources=_sources(card),
    )


def catalogue_names() -> tuple[str, ...]:
    """Every device in the catalogue."""
    return tuple(CARDS)


def catalogue_name(device: str) -> str | None:
    """The catalogue's name for what a user calls a device, or None."""
    by_folded = {_fold(name): name for name in CARDS} | {_fold(other): name for other, name in OTHER_NAMES.items()}
    return by_folded.get(_fold(device))


def name_of_gpu(name: str, memory: int) -> str | None:
    """The catalogue's name for what a driver calls a GPU, such as `NVIDIA A100-SXM4-40GB`, or None."""
    words = set(re.split(r"[^a-z0-9]+", name.lower()))
    fitting = [
        known for known, card in CARDS.items() if _model(known) <= words and abs(memory / GIB / card.gib - 1) < 0.05
    ]
    if "nvl" in words:  # two H100 on one board, which the catalogue does not have
        return None
    by_form = [known for known in fitting if known.endswith("-PCIe") == ("pcie" in words)]
    return next(iter(by_form or fitting), None)


def is_measured(hardware: Hardware, field: str) -> bool:
    """Whether a number, such as `within.bandwidth`, was measured, so it needs no discount for efficiency."""
    return hardware.sources.get(field, "").startswith(MEASURED)


def _model(name: str) -> set[str]:
    """The words of a catalogue name that identify the model: `RTX-4090` and `A100`, without memory and form factor."""
    return set(re.sub(r"-\d+gb|-pcie", "", name.lower()).split("-"))


def _fold(name: str) -> str:
    """Normalize a name. SXM is the default form: `A100-80GB-SXM4` and `A100-SXM-80GB` are `A100-80GB`."""
    return re.sub(r"-sxm\d?|nvidia-|[-_ ]", "", name.lower().replace("geforce-", ""))


def _unknown(device: str) -> str:
    stem = _fold(device)
    variants = [name for name in CARDS if stem and _fold(name).startswith(stem)]
    near = get_close_matches(device.upper(), [*CARDS, *OTHER_NAMES], 1, cutoff=0.4)
    if variants:
        hint = f"it comes as {', '.join(variants)}: choose one."
    else:
        hint = f"did you mean {near[0]!r}? " if near else ""
        hint += f"It has {', '.join(CARDS)}; `meshwright probe --out cluster.json` measures any other."
    return f"The catalogue has no device {device!r}; {hint}"


def _between(gbps: float, kind: str) -> Link:
    return Link(kind=kind, bandwidth=gbps * GBPS, latency=KINDS[kind].latency)


def _with_link(hardware: Hardware, cluster: Cluster) -> Hardware:
    if cluster.between_gbps is None:
        return hardware
    between = _between(cluster.between_gbps, cluster.between_kind or hardware.between.kind)
    said = {"between.bandwidth": "the cluster's text", "between.latency": KINDS[between.kind].source}
    return replace(hardware, between=between, sources={**hardware.sources, **said})


def _with_memory(hardware: Hardware, cluster: Cluster) -> Hardware:
    """Use the cluster's memory if it differs from the one in the device's name: it was measured, or is known better."""
    nominal = Cluster(device=cluster.device).memory_gib
    if cluster.memory_gib is None or cluster.memory_gib == nominal or "memory" in cluster.hardware:
        return hardware
    sources = {**hardware.sources, "memory": "the cluster's file"}
    return replace(hardware, memory=round(cluster.memory_gib * GIB), sources=sources)


def _sources(card: Card) -> dict[str, Any]:
    within = KINDS[card.within[0]].source
    return {
        "memory": "torch.cuda.get_device_properties on such a device, to 0.3 GiB",
        "flops": f"{card.sheet}: peak rates by format, dense",
        "bandwidth": f"{card.sheet}: memory bandwidth",
        "launch": "assumed for eager PyTorch on a current server core, until probe measures it",
        "within.bandwidth": f"{card.sheet}: interconnect, half of the bidirectional total",
        "within.latency": within,
        "between.bandwidth": card.node.source,
        "between.latency": KINDS[card.node.kind].source,
        "host.bandwidth": f"{card.sheet}: the slot's rate in one direction",
        "host.latency": "assumed for one copy between host and device",
        "host_memory": card.node.source,
        **({"reach": card.reach_source} if card.reach else {}),
    }
