"""Measure this machine and write a cluster file, whose numbers replace the catalogue's."""

from __future__ import annotations

import json
import sys
import time
from contextlib import redirect_stdout
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from meshwright.assemble.world import World
from meshwright.environment import launched
from meshwright.errors import OutputError
from meshwright.facts.catalogue import MEASURED
from meshwright.facts.cluster import Cluster
from meshwright.facts.links import LAUNCH
from meshwright.launch.attempt import own_task, report
from meshwright.launch.launch import launch
from meshwright.probe.collectives import RINGS, RUNS_AS, fit_link, measure_collectives
from meshwright.probe.device import measure_host_copies, measure_launch, measure_matmuls, measure_memory
from meshwright.probe.machine import local_cluster, machine_words
from meshwright.runtime.place import count_ranks, known_device
from meshwright.runtime.request import ProbeRequest
from meshwright.runtime.run import enter_world

WORKER = "meshwright.probe.probe"
REACH = {"matmul": 1.0, "attention": 0.52, "stream": 0.62}
"""Shares of a GPU's *measured* rates that kernels of a step reach: the full rate of matrix products, and the part of
a copy's bandwidth that kernels that also compute can use."""
REACH_SOURCE = "an H200's steps (docs/data/plan_gpu.json), by what it reaches in products of 8192 cubed and in copies"


def probe_command(request: ProbeRequest) -> dict[str, Any] | None:
    """Measure and write the cluster file; returns the JSON document on rank 0, and None on other ranks."""
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
    """Measure on the launched ranks, or in this process alone; the same document on every rank."""
    world = enter_world(device)
    start = time.perf_counter()
    document = measure(world)
    world.leave()
    return {**document, "seconds": time.perf_counter() - start}


def measure(world: World) -> dict[str, Any]:
    """Take all measurements and derive the cluster. If all ranks measure, the slowest counts."""
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
    """Fit the link within a node from groups in one node, and the link between nodes from the other groups."""
    device = world.device.type
    overhead = LAUNCH if device == "cuda" else 0.0
    sides = {"within": [row for row in rows if row["nodes"] == 1], "between": [row for row in rows if row["nodes"] > 1]}
    fits = {
        name: fit_link(
            side, launch=overhead, devices_per_node=world.local_ranks, kinds=RINGS[device], runs_as=RUNS_AS[device]
        )
        for name, side in sides.items()
    }
    return {name: asdict(fit) for name, fit in fits.items() if fit is not None}


def cluster_of(document: dict[str, Any], world: World) -> Cluster:
    """The machine as torch reports it, with measured numbers in place of the catalogue's."""
    # CPU ranks divide the machine; GPUs exist whether or not a rank uses them.
    found = local_cluster(world.device.type, devices=None if world.device.type == "cuda" else world.local_ranks)
    flops: dict[str, float] = {}
    for row in document["matmul"]:
        flops[row["dtype"]] = max(row["flops"], flops.get(row["dtype"], 0.0))
    hardware = {**found.hardware, "flops": flops, "bandwidth": document["bandwidth"], "launch": document["launch"]}
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
    """Entry point of the worker: `meshwright.launch.rank` calls it on every rank."""
    report(run_probe(own_task().device))


def _slowest_rows(by_rank: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """The slowest row of each product that all ranks measured."""
    found: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in chain(*by_rank):
        found.setdefault((row["dtype"], *row["shape"]), []).append(row)
    return [min(rows, key=lambda row: row["flops"]) for rows in found.values() if len(rows) == len(by_rank)]


def _tell(world: World, what: str) -> None:
    if world.is_main:
        print(f"probe: {what}", file=sys.stderr, flush=True)


def _refuse(request: ProbeRequest) -> None:
    known_device(request.device)
    count_ranks(request.ranks, default=1)
    out = request.out
    if out is not None and (out.suffix != ".json" or not out.parent.is_dir()):
        raise OutputError(f"--out {str(out)!r} must be a .json file in an existing folder, such as cluster.json.")


def _write(path: Path, cluster: dict[str, Any]) -> None:
    try:
        path.write_text(json.dumps(cluster, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise OutputError(f"Cannot write the cluster file {str(path)!r}: {error}.") from error
