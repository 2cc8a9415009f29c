"""Measure one rank of a fake world on a real GPU: memory, time and kernels of a step, what is alive at its peak."""

from __future__ import annotations

import json
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

import torch
from gpu_cases import Case, job_of
from torch.utils._pytree import tree_map
from turns import Turns

import meshwright as mw
from meshwright.assemble.step import Trainer
from meshwright.assemble.world import fake_world
from meshwright.describe.model import describe
from meshwright.describe.observe import make_batch
from meshwright.facts.model import ModelFacts
from meshwright.facts.strategy import Strategy
from meshwright.tracing.host_passes import time_reference
from meshwright.units import GIB

AT_ONCE = 8
"""Cases that are described side by side, while none is timed."""
ON_DEVICE = 3
"""Cases that hold memory of the GPU at once: they compile side by side."""
SHOWN, NAMED = 12, 100
"""Kernels of a step that a row names, and letters of a name."""
KINDS = {
    "attention": ("sdpa", "fmha", "flash", "cudnn::fusion"),
    "products": ("gemm", "nvjet", "cutlass", "dgrad", "wgrad", "fprop"),
    "update": ("multi_tensor", "LpNorm"),
}
"""Words in the names of CUDA kernels."""


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
    with turns.on_device():
        with turns.beside():
            device = torch.device("cuda", 0)
            world = replace(fake_world(case.ranks, device, rank=case.rank), weightless=True)
            trainer = Trainer(job, facts, Strategy.parse(case.strategy).resolve(case.ranks), world, seed=0)
            make_up_weights(trainer)
            batch = tree_map(lambda leaf: leaf.pin_memory() if torch.is_tensor(leaf) else leaf, batch)
            trainer.step(batch)  # compiles, for some longer than all the rest
            torch.cuda.synchronize()
        with turns.alone():
            return _timed(case, trainer, batch, detail)


def _timed(case: Case, trainer: Trainer, batch: Any, detail: bool) -> dict[str, Any]:
    """What is measured while nothing else runs."""
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
    row["kernel_ms"], row["longest"] = by_kind(kernels), _longest(kernels)
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


def _longest(kernels: dict[str, tuple[int, float]]) -> list[list[Any]]:
    """Name, number and milliseconds of the kernels that take most of a step."""
    ordered = sorted(kernels.items(), key=lambda item: -item[1][1])
    return [[name[:NAMED], count, round(ms, 2)] for name, (count, ms) in ordered[:SHOWN]]


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
    turns, results = Turns(context, AT_ONCE, ON_DEVICE), context.Queue()
    running, rows = 0, []
    while waiting or running:
        while waiting and running < AT_ONCE:
            context.Process(target=attempt, args=(waiting.pop(0), turns, detail, results)).start()
            running += 1
        rows.append(results.get(timeout=300))
        running -= 1
        print(
            {name: value for name, value in rows[-1].items() if name not in ("kernels", "longest", "at_peak")},
            flush=True,
        )
        path.write_text(json.dumps({"torch": torch.__version__, "rows": rows}, indent=1) + "\n")
