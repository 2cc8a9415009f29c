"""Whether the watch for hangs and slow ranks stays quiet on sound runs.

    python benchmarks/sound_runs.py --json docs/data/sound_runs.json    # about half an hour on two cores

Twenty short runs of several models and strategies, on two to four CPU ranks: with compiling, slow first steps, saves,
evaluations and loaders. Each is trained under the watch's default patience and under a tight one. Every word of the
watch, every restart and every failure is an alarm.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

ROOT = Path(__file__).parents[1]
DEFAULT_S, TIGHT_S = 120.0, 2.0
"""Patience: seconds beyond its longest step that a rank may be silent."""
ALARM = re.compile(r"silent for|different collectives|is slow:|restart \d", re.IGNORECASE)
LIMIT_S = 400
GPT, CNN, RESNET = ("examples/gpt.py", "examples/cnn.py", "examples/resnet_groupnorm.py")
SMALL = "benchmarks/sound_jobs.py"


@dataclass(frozen=True)
class Run:
    """One sound run."""

    job: str
    strategy: str
    ranks: int
    steps: int
    words: tuple[str, ...] = ()
    """Further options of `train`."""

    @property
    def name(self) -> str:
        return " ".join([Path(self.job).name, self.strategy, f"on {self.ranks}", *self.words])


RUNS = (
    Run(GPT, "ddp", 2, 120),
    Run(GPT, "zero1", 4, 80),
    Run(GPT, "zero2", 2, 120, ("--save-every", "20")),
    Run(GPT, "fsdp", 2, 120, ("--save-every", "20")),
    Run(GPT, "hsdp=2x2", 4, 80),
    Run(GPT, "tp=2", 2, 100),
    Run(GPT, "cp=2", 2, 100),
    Run(GPT, "tp=2,fsdp", 4, 60),
    Run(GPT, "pp=2:1f1b", 2, 100),
    Run(GPT, "pp=2:gpipe,ddp", 4, 60),
    Run(GPT, "ddp,compile", 2, 100),
    Run(GPT, "fsdp,compile", 2, 100),
    Run(CNN, "ddp", 2, 150),
    Run(CNN, "fsdp", 4, 100),
    Run(RESNET, "zero2", 2, 60),
    Run(f"{SMALL}:slow_start", "ddp", 2, 150),
    Run(f"{SMALL}:slow_save", "fsdp", 2, 150, ("--save-every", "50")),
    Run(f"{SMALL}:slow_evaluation", "ddp", 2, 150),
    Run(f"{SMALL}:uneven_loader", "zero1", 4, 150),
    Run(f"{SMALL}:job", "ddp", 2, 300, ("--workers", "1")),
)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of a run."""

    run: str
    patience: float
    seconds: float
    code: int | None
    """None: it did not end in time."""
    alarms: tuple[str, ...]

    @property
    def quiet(self) -> bool:
        return self.code == 0 and not self.alarms


def watch(run: Run, patience: float, folder: Path) -> Outcome:
    """Train it, and collect what the watch says."""
    options = {"strategy": run.strategy, "ranks": run.ranks, "steps": run.steps, "patience": patience, "out": folder}
    words = [text for name, value in options.items() for text in (f"--{name}", str(value))]
    command = [sys.executable, "-m", "meshwright", "train", str(ROOT / run.job), *words, *run.words, "--device", "cpu"]
    start = time.perf_counter()
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
        code, told = done.returncode, done.stderr
    except subprocess.TimeoutExpired as error:
        code, told = None, (error.stderr or b"").decode()
    lines = re.split(r"[\r\n]+", told)
    alarms = [line for line in lines if ALARM.search(line)]
    if code != 0 and not alarms:
        alarms = [line for line in lines if line][-1:]
    seconds = time.perf_counter() - start
    return Outcome(run=run.name, patience=patience, seconds=seconds, code=code, alarms=tuple(alarms))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--patience", type=float, nargs="+", default=[DEFAULT_S, TIGHT_S], help="seconds")
    parser.add_argument("--only", help="runs whose name contains this")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    outcomes = []
    with tempfile.TemporaryDirectory() as folder:
        for patience in options.patience:
            for number, run in enumerate(RUNS):
                if options.only and options.only not in run.name:
                    continue
                outcome = watch(run, patience, Path(folder) / f"{patience:g}-{number}")
                outcomes.append(outcome)
                verdict = "quiet" if outcome.quiet else f"ALARM (exit {outcome.code}): {' / '.join(outcome.alarms)}"
                print(f"patience {patience:g} s, {run.name}: {outcome.seconds:.0f} s, {verdict}", flush=True)
                if options.json:
                    _write(options.json, outcomes)
    loud = [outcome for outcome in outcomes if not outcome.quiet]
    print(f"{len(outcomes)} runs, {len(loud)} with an alarm")
    raise SystemExit(bool(loud))


def _write(path: Path, outcomes: list[Outcome]) -> None:
    machine = {"machine": f"{os.cpu_count()} cores, {platform.machine()}", "torch": torch.__version__}
    path.write_text(json.dumps({**machine, "runs": [asdict(outcome) for outcome in outcomes]}, indent=1) + "\n")


if __name__ == "__main__":
    main()
