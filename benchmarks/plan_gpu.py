"""Hold the planner against one real GPU: memory and compute of one rank of many worlds, measured and foretold.

    PYTHONPATH=src python benchmarks/plan_gpu.py measure --json docs/data/plan_gpu.json     # on the GPU; ten minutes
    PYTHONPATH=src python benchmarks/plan_gpu.py score --json docs/data/plan_gpu.json       # anywhere, without a GPU

`measure` runs each case in a process of its own: one rank of a fake world, real tensors, weights made up on the device,
a first step to warm up and then the peak, what the allocator reserved, and the median time of a step without
communication. `score` traces and accounts for the same cases on fake tensors and prints both beside the measurement;
with `--out docs/data/plan_gpu_scores.json` it also writes all errors, which `error_bars.py` reads.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from statistics import mean
from typing import Any

from gpu_cases import T5, TORCH, Case, job_of_model
from gpu_steps import measure_all

import meshwright as mw
from meshwright.api.job_planner import Planner
from meshwright.describe.model import describe
from meshwright.facts.cluster import Cluster
from meshwright.facts.costs import ModelCosts
from meshwright.facts.model import ModelFacts
from meshwright.facts.strategy import Strategy
from meshwright.planner.error_bars import model_of
from meshwright.planner.search import consider
from meshwright.tracing import trace_step
from meshwright.units import GIB

NO_LINKS = {side: {"bandwidth": 1e18, "latency": 1e-12} for side in ("within", "between")}
"""A rank of a fake world waits for nobody."""
PAIRS = {
    "traced": ("traced_gib", "peak_gib"),
    "reserved": ("reserved_gib", "reserved_gib"),
    "account": ("account_gib", "peak_gib"),
    "accounted": ("accounted_gib", "reserved_gib"),
    "time": ("compute_ms", "step_ms"),
}
"""What is told and what is measured."""


def _cases() -> list[Case]:
    one, three, eight = "preset:llama3.2-1b:seq=2048", "preset:llama3.2-3b:seq=2048", "preset:llama3-8b:seq=4096"
    gpt, bert, vit, resnet = "preset:gpt2-xl", "preset:bert-large", "preset:vit-large", "preset:resnet-152"
    singles = [Case(f"{one},batch={n}", f"single,bf16{policy}") for n in (4, 8) for policy in ("", ",ac=full")]
    singles += [Case(f"{one},batch=8", f"single,bf16{policy}") for policy in (",ac=selective", ",compile", ",mb=2")]
    singles += [Case(f"{gpt}:batch=4", f"single,bf16{policy}") for policy in ("", ",ac=selective", ",compile")]
    singles += [Case(f"{bert}:batch=16", f"single,{policy}") for policy in ("bf16", "fp32", "bf16,compile")]
    singles += [Case(f"{vit}:batch=32", f"single,bf16{policy}") for policy in ("", ",ac=full", ",compile")]
    singles += [Case(f"{resnet}:batch=64", "single,fp32"), Case(f"{T5}:batch=8", "single,bf16")]
    singles += [Case(f"{TORCH}:batch=8", f"single,bf16{policy}") for policy in ("", ",ac=full")]
    worlds = [
        *(Case(f"{one},batch=64", f"{data},bf16", 8) for data in ("ddp", "zero1", "zero2", "fsdp", "fsdp:grad-op")),
        *(Case(f"{three},batch=32", f"{data},bf16", 8) for data in ("ddp", "zero1", "fsdp", "hsdp=2x4")),
        *(Case(f"{eight},batch={n}", f"fsdp,bf16{policy}", n) for n in (8, 64) for policy in ("", ",ac=full")),
        Case(f"{eight},batch=8", "fsdp:grad-op,bf16,ac=selective", 8),
        Case(f"{eight},batch=8", "fsdp,bf16,compile", 8),
        Case(f"{gpt}:batch=32", "fsdp,bf16", 8),
        Case(f"{vit}:batch=256", "ddp,bf16", 8),
        Case(f"{TORCH}:batch=64", "fsdp,bf16", 8),
        Case(f"{three},batch=8", "tp=2,bf16", 2),
        Case(f"{three},batch=8", "tp=8,bf16", 8),
        Case(f"{eight},batch=16", "tp=4,fsdp,bf16", 16),
        *(Case(f"{three},batch=16", "pp=4:1f1b,bf16,mb=2", 4, rank) for rank in (0, 1, 3)),
    ]
    long = "preset:llama3-8b:seq=8192"
    accumulated = [
        Case(f"{long},batch={n}", f"{data},bf16,ac=selective{mb}", 8, 0, 2)
        for data in ("fsdp", "zero2", "hsdp=2x4")
        for n, mb in ((8, ""), (64, ",mb=1"), (64, ",mb=1,sync=last"))
    ]
    return singles + worlds + accumulated


@cache
def planner_of(text: str) -> Planner:
    model, _, batch = text.rpartition("batch=")
    job, facts, costs = _described(model.rstrip(":,"))
    return Planner(replace(job, global_batch=int(batch)), facts, int(batch), costs=costs)


@cache
def _described(model: str) -> tuple[mw.Job, ModelFacts, dict[tuple[str, str], ModelCosts]]:
    job = job_of_model(model)
    return job, describe(job), {}


def account_for(row: dict[str, Any], planner: Planner | None = None) -> dict[str, float]:
    """What the planner's quick grade says of a measured case, in the same units."""
    planner, strategy = planner or planner_of(row["job"]), Strategy.parse(row["strategy"]).resolve(row["ranks"])
    nodes = max(1, row["ranks"] // 8)
    cluster = Cluster(nodes=nodes, devices_per_node=min(8, row["ranks"]), device="H200-141GB", hardware=NO_LINKS)
    planner.measure_for(strategy)
    plan = consider(planner.context(cluster), strategy)
    place = row["rank"] * strategy.stage_ranks // row["ranks"]
    own = plan.stages[place] if plan.stages else plan.forecast
    slack = own.memory.get("allocator", 0)
    return {
        "account_gib": (own.peak - slack) / GIB,
        "accounted_gib": own.peak / GIB,
        "compute_ms": own.step * 1e3,
    }


def trace(row: dict[str, Any]) -> dict[str, float]:
    """What a step on fake tensors shows of a measured case."""
    of, strategy = planner_of(row["job"]), Strategy.parse(row["strategy"])
    traced = trace_step(of.job, of.facts, strategy, ranks=row["ranks"], rank=row["rank"])
    return {"traced_gib": traced.peak / GIB, "reserved_gib": traced.reserved / GIB}


def errors_of(row: dict[str, Any], told: dict[str, float]) -> dict[str, float]:
    """What was told, by what was measured, less one."""
    return {name: told[key] / row[measured] - 1 for name, (key, measured) in PAIRS.items() if key in told}


def score(path: Path, only: str, out: Path | None = None, *, traces: bool = True) -> None:
    rows = [row for row in json.loads(path.read_text())["rows"] if "error" not in row]
    errors: dict[str, list[float]] = {}
    scored = []
    for row in rows:
        if only not in f"{row['job']} {row['strategy']}":
            continue
        found = errors_of(row, account_for(row) | (trace(row) if traces else {}))
        known = {name: round(error, 5) for name, error in found.items()}
        case = {name: row[name] for name in ("job", "strategy", "ranks", "rank")}
        scored.append({**case, "model": model_of(planner_of(row["job"]).facts), "errors": known})
        for name, error in found.items():
            errors.setdefault(name, []).append(error)
            if name == "traced" and "compile" in row["strategy"]:
                errors.setdefault("traced, compile", []).append(error)
        shown = " | ".join(f"{100 * error:+.1f}" for name, error in found.items() if name != "accounted")
        rank = f"{row['rank']} of {row['ranks']}"
        measured = f"{row['peak_gib']:.2f} | {row['reserved_gib']:.2f} | {row['step_ms']:.0f}"
        case = f"{row['job'].removeprefix('preset:')} | `{row['strategy']}` | {rank}"
        print(f"| {case} | {measured} | {shown} |", flush=True)
    for name, found_errors in errors.items():
        off = mean(map(abs, found_errors))
        print(f"{name}: mean {off:.2%}, from {min(found_errors):+.1%} to {max(found_errors):+.1%}")
    if out is not None:
        _keep_traces(out, scored)
        lines = ",\n".join(f"  {json.dumps(row)}" for row in scored)
        out.write_text(f'{{\n "rows": [\n{lines}\n ]\n}}\n')


def _keep_traces(out: Path, scored: list[dict[str, Any]]) -> None:
    """Take over the errors of traces that an earlier run wrote and this one did not find."""
    names = ("job", "strategy", "ranks", "rank")
    earlier = json.loads(out.read_text())["rows"] if out.exists() else []
    known = {tuple(row[name] for name in names): row["errors"] for row in earlier}
    for row in scored:
        row["errors"] = known.get(tuple(row[name] for name in names), {}) | row["errors"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["measure", "score"])
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--out", type=Path, help="where `score` writes the errors of every case")
    parser.add_argument("--account", action="store_true", help="score the account alone, without traces")
    parser.add_argument("--only", default="", help="cases whose text holds this")
    parser.add_argument("--without", nargs="*", default=[], help="leave out jobs whose text holds one of these")
    parser.add_argument("--detail", action="store_true", help="also keep kernels and what is alive at the peak")
    options = parser.parse_args()
    if options.what == "measure":
        cases = [
            case
            for case in _cases()
            if options.only in f"{case.job} {case.strategy}" and not any(text in case.job for text in options.without)
        ]
        measure_all(cases, options.json, options.detail)
    else:
        score(options.json, options.only, options.out, traces=not options.account)


if __name__ == "__main__":
    main()
