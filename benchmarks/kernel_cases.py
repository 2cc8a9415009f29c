"""The grade of measured kernels for one case: its operators and the model's Python, timed one by one on a GPU machine.

What needs no GPU (looking at the model, tracing a step and its costs) may be done elsewhere: `prepare` writes it into a
folder, and `by_kernels` reads it there.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from gpu_cases import Case, job_of
from gpu_steps import facts_of, facts_path
from plan_gpu import account_for
from turns import Turns

from meshwright.api.job_planner import Planner
from meshwright.api.probe_kernels import describe_device, longest_kernels, measured_table, trace_operators
from meshwright.facts.costs import ModelCosts
from meshwright.facts.strategy import Strategy
from meshwright.tracing.operator_calls import StepCalls

KERNELS_S = 8.0
"""For all kernels of a case, the largest first."""


@dataclass
class Prepared:
    """What can be known of a case's step without a GPU."""

    step: StepCalls
    costs: dict[tuple[str, str], ModelCosts]


class _WithOperators(pickle.Pickler):
    """Operators are written by their names."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, torch._ops.OpOverload):
            return _operator, (value.namespace, value._opname, value._overloadname)
        return NotImplemented


def _operator(namespace: str, name: str, overload: str) -> Any:
    return getattr(getattr(getattr(torch.ops, namespace), name), overload)


def name_of(row: dict[str, Any]) -> str:
    return f"{row['job']} {row['strategy']} {row['rank']}/{row['ranks']}"


def prepare(case: Case, folder: Path) -> None:
    path = _prepared_path(case, folder)
    if path.exists():
        return
    known = _look(_planner(case, folder, {}), case)
    with path.open("wb") as file:
        _WithOperators(file).dump(known)


def _look(planner: Planner, case: Case) -> Prepared:
    strategy = Strategy.parse(case.strategy)
    step = trace_operators(planner, strategy, "cuda", case.ranks, lambda words: None, rank=case.rank)
    costs: dict[tuple[str, str], ModelCosts] = {}
    Planner(planner.job, planner.facts, planner.global_batch, costs=costs).measure(
        strategy.precision, strategy.recompute
    )
    return Prepared(step=step, costs=costs)


def _prepared_path(case: Case, folder: Path) -> Path:
    name = name_of(vars(case)).replace("/", " of ").replace(" ", "_")
    return facts_path(folder, name).with_suffix(".pickle")


def _planner(case: Case, folder: Path | None, costs: dict[tuple[str, str], ModelCosts]) -> Planner:
    job = job_of(case.job)
    return Planner(job, facts_of(case.job, job, folder), job.global_batch, costs=costs)


def by_kernels(case: Case, turns: Turns, detail: bool, results: Any, facts: Path | None = None) -> None:
    """A case's step by its kernels and its host, timed on this machine; what is not timed runs beside other cases."""
    row: dict[str, Any] = vars(case).copy()
    try:
        strategy = Strategy.parse(case.strategy)
        with turns.beside():
            planner = _planner(case, facts, {})
            path = None if facts is None else _prepared_path(case, facts)
            known = pickle.loads(path.read_bytes()) if path is not None and path.exists() else _look(planner, case)
            untimed = Planner(planner.job, planner.facts, planner.global_batch, costs=known.costs)
            untimed.measure_for(strategy)
        with turns.alone():
            device = torch.device("cuda", 0)
            table, calls, found = measured_table(
                planner,
                [strategy],
                device,
                describe_device(device),
                world=case.ranks,
                seconds=KERNELS_S,
                steps=[known.step],
            )
            timed = Planner(
                planner.job, planner.facts, planner.global_batch, costs=known.costs, kernels=(table,), time_host=True
            )
            timed._compiled = untimed._compiled  # traced once
            row["kernels_ms"] = account_for(row, timed)["compute_ms"]
        row |= {"operators": len(calls), "failed": len(found.failed), "why": sorted(set(found.failed.values()))[:5]}
        row["kernels_alone_ms"] = sum(kernel.seconds * kernel.count for kernel in table.kernels) * 1e3
        row["longest"] = [
            longest | {"operator": longest["operator"][:120], "ms": round(longest["ms"], 4)}
            for longest in longest_kernels(table, calls, 12)
        ]
        row |= {"launch_us": table.launch * 1e6, "reference_ms": table.host * 1e3, "notes": timed.notes}
    except Exception as error:
        row["error"] = f"{type(error).__name__}: {error}"
    results.put(row)
