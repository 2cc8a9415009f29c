"""Blind steps that waited for their host, forecast by a constant a launch and by the model's own timed Python.

    PYTHONPATH=src:benchmarks python benchmarks/timed_hosts.py --json docs/data/timed_hosts.json    # needs no GPU

The timed host launches each operator at its own price (`planner/launch_costs.py`), or all at that of a small sum. The
last column is by operator too, on a host as fast as the one that was measured (`reference_ms` of the row).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any
from unittest.mock import patch

from kernel_cases import name_of
from plan_gpu import account_for, planner_of
from unseen_cases import ROUNDS

from meshwright.api import job_planner
from meshwright.api.job_planner import Planner
from meshwright.facts.costs import ModelCosts
from meshwright.facts.host_passes import HostPasses
from meshwright.planner import launch_costs
from meshwright.planner.host_costs import HOST_REFERENCE

DATA = Path(__file__).parents[1] / "docs" / "data"
CASES = {
    4: ("fourth", ("biogpt", "hubert", "cvt")),
    5: ("fifth", ("moonshine",)),
    6: ("sixth", ("xlstm", "t5gemma", "pix2struct", "painter")),
    7: ("seventh", ("git:", "planning", "gates", "video-jepa")),
}
"""Rounds, what their files are named after, and steps."""


def forecasts(row: dict[str, Any]) -> dict[str, float]:
    of = planner_of(row["job"])
    costs: dict[tuple[str, str], ModelCosts] = {}
    passes: dict[str, HostPasses | None] = {}  # timed once

    def told(**options: Any) -> float:
        planner = Planner(of.job, of.facts, of.global_batch, costs=costs, **options)
        planner._passes = passes
        return account_for(row, planner)["compute_ms"]

    found = {"constant_ms": told(), "by_operator_ms": told(time_host=True)}
    with patch.multiple(launch_costs, LAUNCHES={}, USUAL=1.0):
        found["one_price_ms"] = told(time_host=True)
    slower = row["reference_ms"] / 1e3 / HOST_REFERENCE
    with patch.object(job_planner, "HOST_REFERENCE", row["reference_ms"] / 1e3), patch_launches(slower):
        found["own_host_ms"] = told(time_host=True)
    return found


def patch_launches(times: float) -> Any:
    prices = {name: work * times for name, work in launch_costs.LAUNCHES.items()}
    return patch.multiple(launch_costs, LAUNCHES=prices, USUAL=launch_costs.USUAL * times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    rows = []
    for number, (name, wanted) in CASES.items():
        measured = json.loads((DATA / f"unseen_{name}_gpu.json").read_text())["rows"]
        known = {name_of(row): row for row in measured if "error" not in row}
        for case in ROUNDS[number]:
            row = known.get(name_of(vars(case)))
            if row is None or not case.job.startswith(wanted):
                continue
            told = forecasts(row)
            kept = {key: row[key] for key in ("job", "strategy", "rank", "ranks", "step_ms", "reference_ms")}
            rows.append({"round": number, **kept, "kernels_ms": sum(row["kernel_ms"].values()), **told})
            off = " | ".join(f"{100 * (ms / row['step_ms'] - 1):+.0f} %" for ms in told.values())
            print(f"| {name_of(row)} | {row['step_ms']:.0f}, {rows[-1]['kernels_ms']:.0f} | {off} |", flush=True)
            lines = ",\n".join(f"  {json.dumps(row)}" for row in rows)
            options.json.write_text(f'{{\n "columns": {json.dumps(list(told))},\n "rows": [\n{lines}\n ]\n}}\n')


if __name__ == "__main__":
    main()
