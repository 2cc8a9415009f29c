"""The results of `gpu_speed.py` as markdown: times and memory, kernels by kind beside their floors, the best peer."""

from __future__ import annotations

from typing import Any

KINDS = ("products", "attention", "streaming", "optimizer", "copies", "other")
PEER_ROW = "Llama-8B shape, 1x8192, fsdp of 64"
OURS, PEERS = "fsdp,bf16,compile", ("hand-written, compiled", "Accelerate", "Lightning Fabric", "torchtitan")


def tables(document: dict[str, Any], rows: list[str]) -> str:
    found = {row: [each for each in document["results"] if each["row"] == row] for row in rows}
    runs = {each["run"] for ways in found.values() for each in ways}
    where = (
        f"{document['device']}, PyTorch {document['versions']['torch']}, in {len(runs)} run{'s' * (len(runs) != 1)}."
    )
    parts = [where, times(found), kinds(found, document["rates"]), beside_peers(found.get(PEER_ROW, []))]
    return "\n\n".join(part for part in parts if part)


def times(found: dict[str, list[dict[str, Any]]]) -> str:
    lines = [
        "| | | ms a step (quartiles) | peak, GiB | kernels, ms | launches | host, ms | losses apart |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row, ways in found.items():
        for number, each in enumerate(ways):
            lines.append(f"| {'' if number else row} | {name_of(each['way'])} | {' | '.join(numbers(each))} |")
    return "\n".join(lines)


def numbers(each: dict[str, Any]) -> list[str]:
    if "ms" not in each:
        return [f"not measured: {each.get('not_measured') or each.get('error', '')}".replace("|", "/"), *[""] * 5]
    kernels = each.get("kernels_ms", {})
    low, high = each["quartiles_ms"]
    return [
        f"{each['ms']:.1f} ({low:.1f} - {high:.1f})",
        f"{each.get('peak_gib', 0.0):.2f}",
        f"{kernels.get('all', 0.0):.1f}",
        f"{kernels.get('launches', 0):,}",
        f"{each.get('host_ms', 0.0):.1f}",
        f"{each['loss_apart']:.1e}" if "loss_apart" in each else "",
    ]


def kinds(found: dict[str, list[dict[str, Any]]], rates: dict[str, Any]) -> str:
    lines = [f"| kernels, ms | | {' | '.join(KINDS)} | all |", "| --- | --- |" + " --- |" * (len(KINDS) + 1)]
    for row, ways in found.items():
        floor = rates.get(row, {}).get("floors_ms")
        if floor:
            rate = f"floor at {rates[row]['tflops']:.0f} TFLOP/s, {rates[row]['tbytes']:.2f} TB/s"
            lines.append(line(row, rate, {**floor, "all": sum(floor.values())}))
        lines += [line("", name_of(each["way"]), each["kernels_ms"]) for each in ways if "kernels_ms" in each]
    return "\n".join(lines) if len(lines) > 2 else ""


def line(row: str, way: str, ms: dict[str, float]) -> str:
    cells = [f"{ms[kind]:.1f}" if kind in ms else "" for kind in (*KINDS, "all")]
    return f"| {row} | {way} | {' | '.join(cells)} |"


def beside_peers(ways: list[dict[str, Any]]) -> str:
    """Our tokens a second and peak by those of the fastest peer."""
    by_way = {each["way"]: each for each in ways if "ms" in each and "peak_gib" in each}
    peers = [by_way[way] for way in PEERS if way in by_way]
    if OURS not in by_way or not peers:
        return ""
    ours, best = by_way[OURS], min(peers, key=lambda each: each["ms"])
    return (
        f"{PEER_ROW}: `{OURS}` has {best['ms'] / ours['ms']:.3f} of the tokens a second of the fastest peer "
        f"({best['way']}) at {ours['peak_gib'] / best['peak_gib']:.3f} of its peak memory."
    )


def name_of(way: str) -> str:
    return f"`{way}`" if way.split(",")[0].split("=")[0] in ("tp", "fsdp", "single") else way
