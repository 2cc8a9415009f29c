"""Forecasts for models that nobody tuned them on: told first, measured afterwards on one GPU, then held together.

    PYTHONPATH=src python benchmarks/unseen_gpu.py forecast --json docs/data/unseen_forecasts.json   # without a GPU
    PYTHONPATH=src python benchmarks/unseen_gpu.py measure --json docs/data/unseen_gpu.json          # on the GPU
    PYTHONPATH=src python benchmarks/unseen_gpu.py kernels --json docs/data/unseen_kernels.json      # on the GPU
    PYTHONPATH=src python benchmarks/unseen_gpu.py score --json docs/data/unseen_gpu.json \\
        --forecasts docs/data/unseen_forecasts.json    # or unseen_kernels.json
    PYTHONPATH=src python benchmarks/unseen_gpu.py score --out docs/data/unseen_scores.json  # for error bars

`--round N` takes the cases of a later round (unseen_cases.py) in place of the first's.
Forecasts are committed before anything is measured, so nothing can be fitted to the measurement. Each case is forecast
in a process of its own with a time limit; a case without a forecast is a row that says why. `kernels` is the grade of
measured kernels: it times a case's operators one by one, and the model's Python, and knows nothing of its steps.
`score --out` writes the errors of the blind forecasts of all rounds in `SCORED`, which `error_bars.py` reads.
`describe --facts FOLDER` elsewhere and `--facts FOLDER` with these two save the GPU the time to look at the models.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path
from statistics import mean, median
from typing import Any
from unittest.mock import patch

import torch
from gpu_cases import Case, job_of
from gpu_steps import attempt, facts_of, facts_path, measure_all
from kernel_cases import by_kernels, name_of, prepare
from plan_gpu import account_for, errors_of, planner_of, trace
from turns import Turns
from unseen_cases import ROUNDS

from meshwright.api import job_planner
from meshwright.api.job_planner import Planner
from meshwright.describe.model import describe
from meshwright.facts.costs import ModelCosts
from meshwright.planner.error_bars import model_of

DATA = Path(__file__).parents[1] / "docs" / "data"
LIMIT_S = 1800
SCORED = {3: "third", 4: "fourth", 5: "fifth", 6: "sixth", 7: "seventh"}
"""Rounds that the planner's error bars are made from, and what their files are named after: those that the H200's table
forecast, and that were measured after the forecasts were committed."""
KEPT = {"accounted": "accounted", "reserved": "reserved", "time": "table", "kernels": "kernels"}
"""Names of errors in the file of scores, and in `score`."""


def forecast(case: Case) -> dict[str, Any]:
    """What the grades say, in the units of the measurement: `compute_ms` by the catalogue, `table_ms` by the table."""
    row: dict[str, Any] = vars(case).copy()
    for grade, of in (("account", by_account), ("trace", trace)):
        try:
            row |= of(row)
        except Exception as error:
            row[f"{grade}_error"] = f"{type(error).__name__}: {error}"
    return row


def by_account(row: dict[str, Any]) -> dict[str, float]:
    of = planner_of(row["job"])
    costs: dict[tuple[str, str], ModelCosts] = {}  # measured once for both
    with patch.object(job_planner, "shipped_table", lambda device: None):
        told = account_for(row, Planner(of.job, of.facts, of.global_batch, costs=costs))
    by_table = account_for(row, Planner(of.job, of.facts, of.global_batch, costs=costs))
    return {**told, "table_ms": by_table["compute_ms"]}


def forecast_all(number: int, path: Path, only: list[str], processes: int) -> None:
    """Finished cases are kept: the same command goes on."""
    rows = json.loads(path.read_text())["rows"] if path.exists() else []
    done = {name_of(row) for row in rows}
    names = [name_of(vars(case)) for case in ROUNDS[number]]
    waiting = [place for place, name in enumerate(names) if _chosen(name, only) and name not in done]
    with ThreadPoolExecutor(processes) as pool:
        for row in pool.map(lambda place: _forecast_apart(number, place), waiting):
            print(_line(row), flush=True)
            rows.append(row)
            rows.sort(key=lambda row: names.index(name_of(row)))
            path.write_text(json.dumps({"torch": torch.__version__, "rows": rows}, indent=1) + "\n")


def _forecast_apart(number: int, place: int) -> dict[str, Any]:
    """One forecast in a process of its own, with a time limit."""
    case = ROUNDS[number][place]
    command = [sys.executable, __file__, "one", "--round", str(number), "--case", str(place)]
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        return _failed(case, f"took longer than {LIMIT_S} s")
    return json.loads(ran.stdout.splitlines()[-1]) if ran.returncode == 0 else _failed(case, ran.stderr[-300:])


def describe_all(number: int, folder: Path, only: list[str]) -> None:
    """Write what is known of each model, so that the machine with the GPU need not find it out."""
    folder.mkdir(parents=True, exist_ok=True)
    cases = cases_of(number, only)
    for text in dict.fromkeys(case.job for case in cases):
        path = facts_path(folder, text)
        if not path.exists():
            path.write_text(json.dumps(describe(job_of(text)).to_json()))
            print(path, flush=True)
    for case in cases:
        _prepare(case, folder)


def cases_of(number: int, only: list[str]) -> list[Case]:
    return [case for case in ROUNDS[number] if _chosen(name_of(vars(case)), only)]


def _chosen(name: str, only: list[str]) -> bool:
    return any(part in name for part in only)


def _prepare(case: Case, folder: Path) -> None:
    """What `kernels` needs of a case; if it cannot be had, `kernels` says why."""
    try:
        prepare(case, folder)
        print(name_of(vars(case)), flush=True)
    except Exception as error:
        print(f"{name_of(vars(case))}: {type(error).__name__}: {error}", flush=True)


def _failed(case: Case, reason: str) -> dict[str, Any]:
    return {**vars(case), "account_error": reason, "trace_error": reason}


def _line(row: dict[str, Any]) -> str:
    told = {
        name: round(row[name], 2) for name in ("traced_gib", "reserved_gib", "account_gib", "compute_ms") if name in row
    }
    reasons = {name: row[name][:160] for name in ("account_error", "trace_error") if name in row}
    return f"{name_of(row)}: {told | reasons}"


def _look_at(case: Case, turns: Turns, detail: bool, results: Any, facts: Path | None, inside: list[str]) -> None:
    attempt(case, turns, _chosen(name_of(vars(case)), inside), results, facts)


def score(measured: Path, forecasts: Path) -> None:
    told = _by_case(forecasts)
    errors: dict[str, list[float]] = {}
    for row in json.loads(measured.read_text())["rows"]:
        if "error" in row:
            print(f"| {name_of(row)} | {row['error'][:80]} |")
            continue
        found = _errors(row, told.get(name_of(row), {}))
        for name, error in found.items():
            errors.setdefault(name, []).append(error)
        shown = " | ".join(f"{100 * error:+.1f}" for error in found.values())
        print(
            f"| {name_of(row)} | {row['peak_gib']:.2f} | {row['reserved_gib']:.2f} | {row['step_ms']:.1f} | {shown} |"
        )
    for name, found_errors in errors.items():
        off = [abs(error) for error in found_errors]
        print(
            f"{name}: {len(off)} rows, mean {mean(off):.2%}, median {median(off):.2%}, "
            f"from {min(found_errors):+.1%} to {max(found_errors):+.1%}"
        )


def _by_case(path: Path) -> dict[str, dict[str, Any]]:
    return {name_of(row): row for row in json.loads(path.read_text())["rows"]}


def _errors(row: dict[str, Any], case: dict[str, Any]) -> dict[str, float]:
    """What the forecast of a case was off, as shares of what was measured."""
    found = errors_of(row, {name: value for name, value in case.items() if name not in ("rank", "ranks")})
    for grade in ("table", "kernels"):
        if f"{grade}_ms" in case:
            found[grade] = case[f"{grade}_ms"] / row["step_ms"] - 1
    return found


def keep_scores(out: Path, facts: Path | None = None) -> None:
    """Write each blind error of the rounds in `SCORED`, one row a line."""
    rows = [row for number in SCORED for row in _scores_of(number, facts)]
    lines = ",\n".join(f"  {json.dumps(row)}" for row in rows)
    out.write_text(f'{{\n "rows": [\n{lines}\n ]\n}}\n')


def _scores_of(number: int, facts: Path | None) -> list[dict[str, Any]]:
    """A round's errors: memory by the account and by traces, time by the shipped table and by measured kernels."""
    measured, told, kernels = (
        _by_case(DATA / f"unseen_{SCORED[number]}_{what}.json") for what in ("gpu", "forecasts", "kernels")
    )
    rows = []
    for name, row in measured.items():
        if "error" in row:
            continue
        found = _errors(row, told.get(name, {})) | _errors(row, kernels.get(name, {}))
        errors = {kept: round(found[key], 5) for kept, key in KEPT.items() if key in found}
        case = {key: row[key] for key in ("job", "strategy", "ranks", "rank")}
        rows.append({"round": number, **case, "model": _model_of(row["job"], facts), "errors": errors})
        print(rows[-1], flush=True)
    return rows


@cache
def _model_of(job: str, facts: Path | None) -> str:
    return model_of(facts_of(job, job_of(job), facts))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["forecast", "describe", "measure", "kernels", "score", "one"])
    parser.add_argument("--round", type=int, choices=sorted(ROUNDS), default=1, help="which cases (default: 1)")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--forecasts", type=Path)
    parser.add_argument("--out", type=Path, help="file for the errors of all rounds that error bars are made from")
    parser.add_argument("--only", nargs="+", default=[""], help="cases whose text holds one of these")
    parser.add_argument(
        "--inside", nargs="+", default=[], help="measured cases of which is kept what is alive at the peak"
    )
    parser.add_argument("--processes", type=int, default=1, help="forecasts that are made at a time (default: 1)")
    parser.add_argument("--facts", type=Path, help="folder that `describe` fills, and `measure` and `kernels` read")
    parser.add_argument("--case", type=int, help="number of the case, for `one`")
    options = parser.parse_args()
    if options.what == "one":
        print(json.dumps(forecast(ROUNDS[options.round][options.case])))
    elif options.what == "forecast":
        forecast_all(options.round, options.json, options.only, options.processes)
    elif options.what == "describe":
        describe_all(options.round, options.facts, options.only)
    elif options.what == "score" and options.out:
        keep_scores(options.out, options.facts)
    elif options.what in ("measure", "kernels"):
        import transformers  # noqa: F401  # once, before processes are forked

        attempted = partial(_look_at, inside=options.inside) if options.what == "measure" else by_kernels
        measured = partial(attempted, facts=options.facts)
        measure_all(cases_of(options.round, options.only), options.json, attempt=measured)
    else:
        score(options.json, options.forecasts)


if __name__ == "__main__":
    main()
