"""Rehearsals of large models on one real GPU: measured against forecast, and `--tune`.

    PYTHONPATH=src python benchmarks/rehearse_gpu.py forecast --forecasts docs/data/rehearse_forecasts.json
    PYTHONPATH=src python benchmarks/rehearse_gpu.py measure --json docs/data/rehearse_gpu.json
    PYTHONPATH=src python benchmarks/rehearse_gpu.py tune --json docs/data/rehearse_tune.json --only vit
    PYTHONPATH=src python benchmarks/rehearse_gpu.py table --json docs/data/rehearse_gpu.json

`forecast` needs no GPU: it traces every rehearsed rank on fake tensors, several at a time. `measure` reads what it
wrote, and makes the forecasts that are missing on other cores while the GPU works. Results are written after each
rehearsal. With `--small`, everything is tried on the CPU with a small model, for those who change this
file. `exhaust_gpu.py` holds `--tune` against an exhaustive search.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from math import inf
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from meshwright.api.compared_rank import Compared
from meshwright.api.described_presets import describe_job, read_preset
from meshwright.api.job_planner import Planner
from meshwright.api.rank_forecast import forecast_rank
from meshwright.api.rehearsal_site import RehearsalSite, make_site
from meshwright.api.rehearser import Rehearser, forecast_key
from meshwright.api.tune import TuneOptions, tune
from meshwright.facts.cluster import Cluster
from meshwright.facts.costs import ModelCosts
from meshwright.facts.model import ModelFacts
from meshwright.facts.rank_forecast import RankForecast
from meshwright.facts.strategy import Strategy
from meshwright.jobs.load import load_job
from meshwright.planner.candidates import Allowed
from meshwright.rehearse.process import preloaded

DEVICE = "H200-141GB"
LLAMA = "preset:llama3-8b"


@dataclass(frozen=True)
class Case:
    """A strategy to rehearse; every role of it if `roles`."""

    strategy: str
    world: int
    batch: int
    roles: bool = False
    job: str = LLAMA


CASES = (
    Case("fsdp,bf16,ac=selective", 64, 64),
    Case("fsdp,bf16", 64, 64),
    Case("fsdp,bf16,ac=full", 64, 64),
    Case("fsdp:grad-op,bf16,ac=selective", 64, 64),
    Case("fsdp,bf16,ac=selective,mb=1", 64, 512),
    Case("hsdp=8x8,bf16,ac=selective", 64, 64),
    Case("tp=8,fsdp,bf16", 64, 8),
    Case("pp=4:1f1b,fsdp,bf16,ac=selective,mb=1", 64, 128, roles=True),
    Case("zero1,bf16,ac=selective", 64, 64),
    Case("zero2,bf16,ac=full", 64, 64),
    Case("fsdp,bf16,ac=selective,offload=optimizer", 64, 64),
    Case("fsdp,bf16,compile", 64, 64),
)
SMALL = (
    Case("fsdp", 4, 16, job="examples/gpt.py"),
    Case("pp=2:1f1b", 2, 16, roles=True, job="examples/gpt.py"),
)
TUNED = (
    (LLAMA, 8, 64),
    (LLAMA, 64, 512),
    ("preset:vit-large", 8, 1024),
    ("preset:gpt2-xl", 8, 256),
    ("hf-qwen", 8, 64),
)
"""Job, ranks and global batch."""
SMALL_TUNED = (("examples/gpt.py", 2, 16),)
WAIT = 180.0
"""Seconds that one rehearsal may take."""
TRIALS = 8


SHAPES = {
    "hf-qwen": (896, 4864, 24, 14, 2),
    "hf-qwen-3b": (2048, 11008, 36, 16, 2),
    "hf-qwen-wide": (4096, 14336, 12, 32, 8),
}
"""Width, inner width, layers, heads and heads of keys of Hugging Face configs with about 0.5B, 3B and 3B parameters."""


def hugging_face_job(name: str, folder: Path) -> str:
    """A Hugging Face config, written to a folder."""
    from transformers import Qwen2Config

    width, inner, layers, heads, keys = SHAPES[name]
    Qwen2Config(
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=keys,
        vocab_size=151936,
        tie_word_embeddings=True,
    ).save_pretrained(folder)
    return f"hf:{folder}:seq=2048"


@cache
def described(job: str) -> tuple[ModelFacts, dict[tuple[str, str], ModelCosts]]:
    """The stored description of a preset, whichever PyTorch made it: describing takes the GPU's time."""
    name = job.removeprefix("preset:")
    stored = read_preset(name) if job.startswith("preset:") and ":" not in name else None
    if stored is None:
        known = describe_job(job)
        return known.facts, known.costs
    costs = ModelCosts.from_json(stored["costs"])
    return ModelFacts.from_json(stored["facts"]), {(costs.precision, costs.recompute): costs}


def open_case(job: str, world: int, batch: int, forecasts: dict[str, RankForecast]) -> Rehearser:
    facts, costs = described(job)
    planner = Planner(replace(load_job(job), global_batch=batch), facts, batch, costs=costs)
    return Rehearser(job=job, planner=planner, site=site_of(world, job), timeout=WAIT, tell=say, forecasts=forecasts)


def site_of(world: int, job: str = LLAMA) -> RehearsalSite:
    if any(job == case.job for case in SMALL):
        cluster = Cluster(devices_per_node=world, device="cpu")
        return make_site("cpu", cluster, cluster)
    per_node = min(8, world)
    cluster = Cluster(nodes=world // per_node, devices_per_node=per_node, device=DEVICE)
    return make_site("cuda", cluster, cluster)


def say(words: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {words}", file=sys.stderr, flush=True)


def ranks_of(rehearser: Rehearser, case: Case, strategy: Strategy) -> list[int]:
    return rehearser.roles(strategy) if case.roles else [0]


def chosen(only: str, small: bool) -> list[Case]:
    return [case for case in (SMALL if small else CASES) if only in f"{case.job} {case.strategy}"]


def parts_of(cases: list[Case]) -> Iterator[tuple[Case, int, str]]:
    """Each rank to rehearse, with the key of its forecast."""
    for case in cases:
        strategy = Strategy.parse(case.strategy).resolve(case.world)
        for rank in ranks_of(open_case(case.job, case.world, case.batch, {}), case, strategy):
            yield case, rank, forecast_key(strategy, case.world, rank, case.batch)


def forecast_one(part: tuple[Case, int, str]) -> tuple[str, dict[str, Any]]:
    """One forecast, in a process of a pool."""
    case, rank, key = part
    torch.set_num_threads(1)
    rehearser = open_case(case.job, case.world, case.batch, {})
    strategy = Strategy.parse(case.strategy).resolve(case.world)
    return key, forecast_rank(rehearser.planner, rehearser.site, strategy, rank).to_json()


@contextmanager
def forecasting(path: Path, cases: list[Case], processes: int) -> Iterator[Callable[[], dict[str, RankForecast]]]:
    """Start the forecasts that the file lacks. The function that it yields waits for them and completes the file."""
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    missing = [part for part in parts_of(cases) if part[2] not in found]
    with get_context("forkserver").Pool(max(1, min(processes, len(missing)))) as pool:
        made = pool.imap_unordered(forecast_one, missing)

        def finish() -> dict[str, RankForecast]:
            for key, forecast in made:
                found[key] = forecast
                say(f"forecast of {key}: {(forecast['peak'] or 0) / 2**30:.2f} GiB")
                path.write_text(json.dumps(found, indent=1) + "\n")
            return {key: RankForecast.from_json(value) for key, value in found.items()}

        yield finish


def measure_all(path: Path, forecasts: Path, cases: list[Case], processes: int) -> None:
    """Rehearse every case, then compare all of them with their forecasts."""
    found: list[tuple[Case, str, Compared]] = []
    parts = list(parts_of(cases))
    nothing = {key: RankForecast() for _, _, key in parts}
    with forecasting(forecasts, cases, processes) as finish:
        for case, rank, key in parts:
            strategy = Strategy.parse(case.strategy).resolve(case.world)
            found.append((case, key, open_case(case.job, case.world, case.batch, nothing).rehearse(strategy, rank)))
            write_rows(path, found, {})
        write_rows(path, found, finish())
    table(path)


def write_rows(path: Path, found: list[tuple[Case, str, Compared]], known: dict[str, RankForecast]) -> None:
    rows = [
        {
            "job": case.job,
            "batch": case.batch,
            **replace(compared, forecast=known.get(key, compared.forecast)).to_json(),
        }
        for case, key, compared in found
    ]
    path.write_text(json.dumps({"torch": torch.__version__, "rows": rows}, indent=1) + "\n")


def tune_all(path: Path, only: str, trials: int, seconds: float, small: bool) -> None:
    rows: list[dict[str, Any]] = []
    allowed = Allowed(precisions=("fp32" if small else "bf16",), offload=("",))
    options = TuneOptions(allowed=allowed, trials=trials, seconds=seconds)
    for name, world, batch in SMALL_TUNED if small else TUNED:
        if only in f"{name} {world}":
            with untraced(name, world, batch) as rehearser:
                rows.append({**tune(rehearser, options), "job": name})
            write_tuned(path, rows)


@contextmanager
def untraced(name: str, world: int, batch: int) -> Iterator[Rehearser]:
    """A rehearser for trials, which are measured anyway: memory is forecast in closed form."""
    with tempfile.TemporaryDirectory() as folder:
        job = hugging_face_job(name, Path(folder)) if name in SHAPES else name
        rehearser = open_case(job, world, batch, {})
        rehearser.traced, rehearser.steps = False, 2
        yield rehearser


def write_tuned(path: Path, rows: list[dict[str, Any]]) -> None:
    shown = ("job", "world", "strategy", "step_ms", "peak_gib", "why")
    print(json.dumps({key: rows[-1][key] for key in shown}), flush=True)
    path.write_text(json.dumps({"torch": torch.__version__, "rows": rows}, indent=1) + "\n")


def line_of(row: dict[str, Any]) -> str:
    measured, forecast, error = row["measured"], row["forecast"], row["error"]
    name = f"`{row['strategy']}` | {row['rank']} of {row['world']} | {row['batch']}"
    if row["status"] != "ok":
        return f"| {name} | {row['status']}: {row['reason']} |"
    memory = f"{_number(measured['peak_gib'])} | {_number(forecast['peak_gib'])} | {_share(error['memory'])}"
    reserved = (
        f"{_number(measured['reserved_gib'])} | {_number(forecast['reserved_gib'])} | {_share(error['reserved'])}"
    )
    times = f"{measured['compute_ms']:.0f} | {_number(forecast['compute_ms'], 0)} | {_share(error['time'])}"
    return f"| {name} | {memory} | {reserved} | {times} |"


def _number(value: float | None, digits: int = 2) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def _share(error: float | None) -> str:
    return "" if error is None else f"{100 * error:+.1f} %"


def table(path: Path) -> None:
    columns = [f"{name} | forecast | error" for name in ("allocated GiB", "reserved GiB", "compute ms")]
    print(f"| {' | '.join(['strategy', 'rank', 'batch', *columns])} |")
    print(f"|{' --- |' * 12}")
    for row in json.loads(path.read_text())["rows"]:
        print(line_of(row))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("forecast", "measure", "tune", "table"))
    parser.add_argument("--forecasts", type=Path, default=Path("docs/data/rehearse_forecasts.json"))
    parser.add_argument("--json", type=Path, default=Path("docs/data/rehearse_gpu.json"))
    parser.add_argument("--only", default="", help="cases whose job and strategy, or job and ranks, hold this text")
    parser.add_argument("--processes", type=int, default=8, help="forecasts that are made at a time")
    parser.add_argument("--trials", type=int, default=TRIALS, help="rehearsals of one tuning at most")
    parser.add_argument("--seconds", type=float, default=inf, help="no rehearsal of a tuning begins after this time")
    parser.add_argument("--small", action="store_true", help="try this script on the CPU with a small model")
    options = parser.parse_args()
    get_context("forkserver").set_forkserver_preload(preloaded("hf:"))  # before the pool starts its server
    cases = chosen(options.only, options.small)
    if options.what == "forecast":
        with forecasting(options.forecasts, cases, options.processes) as finish:
            finish()
    elif options.what == "measure":
        measure_all(options.json, options.forecasts, cases, options.processes)
    elif options.what == "tune":
        tune_all(options.json, options.only, options.trials, options.seconds, options.small)
    else:
        table(options.json)


if __name__ == "__main__":
    main()
