"""Measure this machine and write what was found as a cluster: numbers that replace the catalogue's."""

from __future__ import annotations

import json
import sys
import time
from contextlib import redirect_stdout
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from meshwright.assemble.world import World
from meshwright.environment import launched
from meshwright.errors import BadInput, OutputError
from meshwright.facts.catalogue import MEASURED
from meshwright.facts.cluster import Cluster
from meshwright.facts.links import LAUNCH
from meshwright.launch.attempt import own_task, report
from meshwright.launch.launch import launch
from meshwright.probe.collectives import measure_collectives
from meshwright.probe.device import measure_host_copies, measure_launch, measure_matmuls, measure_memory
from meshwright.probe.fit import RINGS, LinkFit, fit_link
from meshwright.probe.machine import local_cluster, machine_words
from meshwright.runtime.request import ProbeRequest
from meshwright.runtime.run import enter_world

WORKER = "meshwright.probe.probe"
REACH = {"matmul": 1.0, "attention": 0.52, "stream": 0.62}
"""Of a GPU's *measured* rates, what kernels of a step reach: all of what products alone do, and of a copy's bandwidth
what kernels that also compute can use."""
REACH_SOURCE = "an H200's steps (docs/data/plan_gpu.json), by what it reaches in products of 8192 cubed and in copies"


def probe_command(request: ProbeRequest) -> dict[str, Any] | None:
    """Measure, and write the cluster file; returns the JSON document, or None on a rank that has nothing to print."""
    _refuse(request)
    place = launched()
    if place is None and (request.ranks or 1) > 1:
        results: list[Any] = []
        launch(request, request.ranks or 1, results=results, worker=WORKER)
        document = results[0]
    else:
        with redirect_stdout(sys.stderr):
            document = run_probe(request.device)
    if place is not None and place.rank != 0:
        return None
    if request.out is not None:
        _write(request.out, document["cluster"])
    return document  # type: ignore[no-any-return]


def run_probe(device: str | None) -> dict[str, Any]:
    """Measure on the ranks that this process was launched among, or alone; the same document on every rank."""
    world = enter_world(device)
    start = time.perf_counter()
    document = measure(world)
    world.leave()
    return {**document, "seconds": time.perf_counter() - start}


def measure(world: World) -> dict[str, Any]:
    """All measurements and the cluster that follows from them. What ranks measure at once is told of the slowest."""
    document: dict[str, Any] = {
        "machine": machine_words(world.device),
        "torch": torch.__version__,
        "ranks": world.ranks,
        **_measure_device(world),
        "collectives": [],
        "links": {},
    }
    if world.ranks > 1:
        for row in measure_collectives(world):
            document["collectives"].append(row)
            _tell(world, f"{row['kind']}, {row['layout']}, {row['bytes']:,} bytes: {row['seconds'] * 1e3:.3g} ms")
        document["links"] = fit_links(document["collectives"], world)
    return {**document, "cluster": cluster_of(document, world).to_json()}


def _measure_device(world: World) -> dict[str, Any]:
    device = world.device
    _tell(world, "matrix products")
    matmuls = _slowest_rows(world.gather(measure_matmuls(device)))
    _tell(world, "memory, launches and copies")
    return {
        "matmul": matmuls,
        "bandwidth": min(world.gather(measure_memory(device))),
        "launch": max(world.gather(measure_launch(device))),
        "host": measure_host_copies(device) if device.type == "cuda" else None,
    }


def fit_links(rows: list[dict[str, Any]], world: World) -> dict[str, dict[str, float]]:
    """The link within a node from groups that stay there, the one between nodes from groups that do not."""
    device = world.device.type
    overhead = LAUNCH if device == "cuda" else 0.0
    sides = {"within": [row for row in rows if row["nodes"] == 1], "between": [row for row in rows if row["nodes"] > 1]}
    fits = {
        name: fit_link(side, launch=overhead, devices_per_node=world.local_ranks, kinds=RINGS[device])
        for name, side in sides.items()
    }
    return {name: _fit_json(fit) for name, fit in fits.items() if fit is not None}


def cluster_of(document: dict[str, Any], world: World) -> Cluster:
    """The machine as torch tells it, with every number replaced that was measured."""
    found = local_cluster(world.device.type, devices=_devices_of_node(world))
    flops: dict[str, float] = {}
    for row in document["matmul"]:
        flops[row["dtype"]] = max(row["flops"], flops.get(row["dtype"], 0.0))
    hardware = dict(found.hardware) | {"flops": flops, "bandwidth": document["bandwidth"]}
    hardware["launch"] = document["launch"]
    measured = ["flops", "bandwidth", "launch"]
    if world.device.type == "cuda":
        hardware["reach"] = REACH
        hardware["sources"] = {**hardware["sources"], "reach": REACH_SOURCE}
    links = {name: {key: link[key] for key in ("bandwidth", "latency")} for name, link in document["links"].items()}
    if document["host"] is not None:
        host = document["host"]
        links["host"] = {"bandwidth": min(host["to_device"], host["to_host"]), "latency": host["latency"]}
    for name, link in links.items():
        hardware[name] = {**found.hardware.get(name, {}), **link}
        measured += [f"{name}.bandwidth", f"{name}.latency"]
    words = f"{MEASURED} by probe on {document['machine']}, {world.ranks} ranks, with torch {document['torch']}"
    hardware["sources"] = {**hardware["sources"], **dict.fromkeys(measured, words)}
    return Cluster(
        nodes=max(1, world.ranks // world.local_ranks),
        devices_per_node=found.devices_per_node,
        device=found.device,
        memory_gib=found.memory_gib,
        hardware=hardware,
    )


def main() -> None:
    """What `meshwright.launch.rank` calls on every rank."""
    report(run_probe(own_task().device))


def _devices_of_node(world: World) -> int | None:
    """Ranks on CPUs share the machine out; GPUs are there whether a rank was started for them or not."""
    if world.device.type == "cuda":
        return None
    return world.local_ranks


def _slowest_rows(by_rank: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Of each product that every rank came to, the slowest."""
    found: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in chain(*by_rank):
        found.setdefault((row["dtype"], *row["shape"]), []).append(row)
    return [min(rows, key=lambda row: row["flops"]) for rows in found.values() if len(rows) == len(by_rank)]


def _fit_json(fit: LinkFit) -> dict[str, float]:
    return {"bandwidth": fit.bandwidth, "latency": fit.latency, "error": fit.error, "rows": fit.rows}


def _tell(world: World, what: str) -> None:
    if world.is_main:
        print(f"probe: {what}", file=sys.stderr, flush=True)


def _refuse(request: ProbeRequest) -> None:
    ranks, device, out = request.ranks, request.device, request.out
    if device not in (None, "cpu", "cuda"):
        raise BadInput(f"--device must be cpu or cuda, not {device!r}.")
    place = launched()
    if place is not None and ranks not in (None, place.ranks):
        raise BadInput(f"--ranks {ranks} was asked for, but the launcher started {place.ranks} ranks; leave it out.")
    if out is not None and (out.suffix != ".json" or not out.parent.is_dir()):
        raise OutputError(f"--out {str(out)!r} has to be a .json file in a folder that is there, as in cluster.json.")


def _write(path: Path, cluster: dict[str, Any]) -> None:
    try:
        path.write_text(json.dumps(cluster, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise OutputError(f"Cannot write the cluster file {str(path)!r}: {error}.") from error
