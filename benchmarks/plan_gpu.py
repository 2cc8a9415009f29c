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
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
import torch.nn.functional as F
import unseen_jobs
import unseen_second_jobs  # noqa: F401  # adds its jobs to the others
import unseen_third_jobs  # noqa: F401
from torch import nn
from torch.utils._pytree import tree_map
from turns import Turns

import meshwright as mw
from meshwright.api.job_planner import Planner
from meshwright.assemble.step import Trainer
from meshwright.assemble.world import fake_world
from meshwright.describe.model import describe
from meshwright.describe.observe import make_batch
from meshwright.facts.cluster import Cluster
from meshwright.facts.costs import ModelCosts
from meshwright.facts.model import ModelFacts
from meshwright.facts.strategy import Strategy
from meshwright.jobs.load import load_job
from meshwright.planner.search import consider
from meshwright.tracing import trace_step
from meshwright.tracing.host_passes import time_reference

GIB = 1 << 30
STEPS = 5
AT_ONCE = 8
"""Cases that are described side by side, while none is timed."""
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
T5, TORCH = "t5-large", "torch-transformer"
KINDS = {
    "attention": ("sdpa", "fmha", "flash", "cudnn::fusion"),
    "products": ("gemm", "nvjet", "cutlass", "dgrad", "wgrad", "fprop"),
    "update": ("multi_tensor", "LpNorm"),
}
"""Words in the names of CUDA kernels."""


@dataclass(frozen=True)
class Case:
    job: str
    strategy: str
    ranks: int = 1
    rank: int = 0
    steps: int = STEPS


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


class EncoderDecoder(nn.Module):
    """PyTorch's own transformer, of the size of T5-large, with a vocabulary around it."""

    def __init__(self, width: int = 1024, layers: int = 24, vocabulary: int = 32128) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.body = nn.Transformer(width, 16, layers, layers, 4096, dropout=0.1, batch_first=True, norm_first=True)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1], device=target.device)
        body = self.body(self.embedding(source), self.embedding(target), tgt_mask=mask, tgt_is_causal=True)
        return self.head(body)


def _translation(batch: int, length: int = 512, vocabulary: int = 32128) -> mw.Job:
    """Tokens to tokens."""

    def loss(output: torch.Tensor, batch: torch.Tensor) -> tuple[torch.Tensor, int]:
        target = batch[:, 1].flatten()
        return F.cross_entropy(output.flatten(0, 1), target, reduction="sum"), target.numel()

    return mw.Job(
        model=EncoderDecoder,
        inputs=lambda batch: (batch[:, 0], batch[:, 1]),
        loss=loss,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-4, fused=True),
        sample=lambda count: torch.randint(vocabulary, (count, 2, length)),
        global_batch=batch,
    )


def job_of(text: str) -> mw.Job:
    """The job of `MODEL,batch=SAMPLES`."""
    model, _, batch = text.rpartition("batch=")
    return replace(_job_of_model(model.rstrip(":,")), global_batch=int(batch))


def _job_of_model(name: str) -> mw.Job:
    if name in unseen_jobs.JOBS:
        return unseen_jobs.JOBS[name]()
    if name == TORCH:
        return _translation(batch=1)
    if name != T5:
        return load_job(name)
    from transformers import T5Config

    with tempfile.TemporaryDirectory() as folder:
        T5Config(d_model=1024, d_kv=64, d_ff=4096, num_layers=24, num_heads=16, vocab_size=32128).save_pretrained(
            folder
        )
        return load_job(f"hf:{folder}:seq=512")


def facts_path(folder: Path, job: str) -> Path:
    """Where a folder keeps what is known of a job's model."""
    return folder / f"{job.replace(':', '_')}.json"


def facts_of(text: str, job: mw.Job, folder: Path | None) -> ModelFacts:
    if folder is None or not facts_path(folder, text).exists():
        return describe(job)
    return ModelFacts.from_json(json.loads(facts_path(folder, text).read_text()))


def measure(case: Case, turns: Turns, detail: bool, known: Path | None = None) -> dict[str, Any]:
    """One rank of a fake world on this machine's GPU; what is not timed runs beside other cases.

    `known` is a folder with what is known of the models, found out elsewhere.
    """
    with turns.beside():
        job = job_of(case.job)
        facts, batch = facts_of(case.job, job, known), make_batch(job, job.global_batch)
    with turns.alone():
        device = torch.device("cuda", 0)
        world = replace(fake_world(case.ranks, device, rank=case.rank), weightless=True)
        trainer = Trainer(job, facts, Strategy.parse(case.strategy).resolve(case.ranks), world, seed=0)
        make_up_weights(trainer)
        batch = tree_map(lambda leaf: leaf.pin_memory() if torch.is_tensor(leaf) else leaf, batch)
        trainer.step(batch)
        torch.cuda.reset_peak_memory_stats()
        seconds = []
        for _ in range(case.steps):
            torch.cuda.synchronize()
            start = time.perf_counter()
            trainer.step(batch)
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - start)
        row = {
            **vars(case),
            "peak_gib": torch.cuda.max_memory_allocated() / GIB,
            "reserved_gib": torch.cuda.max_memory_reserved() / GIB,
            "held_gib": torch.cuda.memory_allocated() / GIB,
            "step_ms": median(seconds) * 1e3,
            "device": torch.cuda.get_device_name(),
            "reference_ms": time_reference() * 1e3,
        }
        kernels = _kernels(trainer, batch)
        row["kernel_ms"] = by_kind(kernels)
        return row | ({"kernels": kernels, **_look_inside(trainer, batch)} if detail else {})


def _kernels(trainer: Trainer, batch: Any) -> dict[str, tuple[int, float]]:
    """Number and milliseconds of a step's kernels, by name."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        trainer.step(batch)
        torch.cuda.synchronize()
    return {event.key: (event.count, event.device_time_total / 1e3) for event in profile.key_averages()}


def by_kind(kernels: dict[str, tuple[int, float]]) -> dict[str, float]:
    """Milliseconds of products and convolutions, of attention, of the update and of all other kernels."""
    found: dict[str, float] = dict.fromkeys((*KINDS, "other"), 0.0)
    for name, (_, ms) in kernels.items():
        if "HtoD" not in name:
            found[next((kind for kind, words in KINDS.items() if any(w in name for w in words)), "other")] += ms
    return {kind: round(ms, 2) for kind, ms in found.items()}


def _look_inside(trainer: Trainer, batch: Any) -> dict[str, Any]:
    """What is alive at the peak of a step, beside all its kernels."""
    before = _alive()
    torch.cuda.memory._record_memory_history(context=None, max_entries=1_000_000)
    trainer.step(batch)
    torch.cuda.synchronize()
    changes = torch.cuda.memory._snapshot()["device_traces"][0]
    torch.cuda.memory._record_memory_history(enabled=None)
    return {"at_peak": _at_peak(before, changes)}


def _alive() -> dict[int, int]:
    blocks = (block for segment in torch.cuda.memory._snapshot()["segments"] for block in segment["blocks"])
    return {block["address"]: block["size"] for block in blocks if block["state"] == "active_allocated"}


def _at_peak(alive: dict[int, int], changes: list[dict[str, Any]]) -> list[list[int]]:
    """Size and number of what is alive at the peak, the largest sums first."""
    total, most, best = sum(alive.values()), 0, {}
    for change in changes:
        if change["action"] == "alloc":
            alive[change["addr"]] = change["size"]
            total += change["size"]
            if total > most:
                most, best = total, dict(alive)
        elif change["action"] == "free_completed":
            total -= alive.pop(change["addr"], 0)
    sizes = Counter(best.values())
    return [[size, count] for size, count in sorted(sizes.items(), key=lambda item: -item[0] * item[1])[:60]]


@torch.no_grad()
def make_up_weights(trainer: Trainer) -> None:
    """Small numbers on the device itself: filling billions of weights from a seed takes minutes."""
    for held in trainer.engine.held():
        local = held.tensor.to_local() if hasattr(held.tensor, "to_local") else held.tensor
        if local.is_floating_point():
            local.normal_(std=0.02)
        else:
            local.zero_()
    trainer.engine.loaded()


def attempt(case: Case, turns: Turns, detail: bool, results: Any, facts: Path | None = None) -> None:
    try:
        results.put(measure(case, turns, detail, facts))
    except Exception as error:
        traceback.print_exc()
        results.put({**vars(case), "error": f"{type(error).__name__}: {error}"})


def measure_all(cases: Sequence[Case], path: Path, detail: bool = False, attempt: Any = attempt) -> None:
    """Each case in a process forked from this one, which never touches the GPU; some at a time, one on the GPU."""
    waiting = list(cases)
    context = get_context("fork")
    turns, results = Turns(context, AT_ONCE), context.Queue()
    running, rows = 0, []
    while waiting or running:
        while waiting and running < AT_ONCE:
            context.Process(target=attempt, args=(waiting.pop(0), turns, detail, results)).start()
            running += 1
        rows.append(results.get(timeout=300))
        running -= 1
        print({name: value for name, value in rows[-1].items() if name not in ("kernels", "at_peak")}, flush=True)
        path.write_text(json.dumps({"torch": torch.__version__, "rows": rows}, indent=1) + "\n")


@cache
def planner_of(text: str) -> Planner:
    model, _, batch = text.rpartition("batch=")
    job, facts, costs = _described(model.rstrip(":,"))
    return Planner(replace(job, global_batch=int(batch)), facts, int(batch), costs=costs)


@cache
def _described(model: str) -> tuple[mw.Job, ModelFacts, dict[tuple[str, str], ModelCosts]]:
    job = _job_of_model(model)
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
        scored.append({name: row[name] for name in ("job", "strategy", "ranks", "rank")} | {"errors": known})
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
