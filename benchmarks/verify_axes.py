"""Verify examples under tensor, operator-wise, layer-wise and pipeline parallelism and hybrids; keep the verdicts.

python benchmarks/verify_axes.py --json docs/data/verify_axes.json
python benchmarks/verify_axes.py --parallel 4      # several examples at a time, where there are cores for them
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

TRANSFORMERS = ("gpt", "hf_llama", "hf_gpt2", "hf_vit")
ON_FOUR = (
    *("tp=2", "tp=4", "pp=2:gpipe", "pp=4:gpipe", "pp=4:1f1b", "pp=2:interleaved", "pp=2:zb", "pp=2:zbv", "layers=2"),
    *("tp=2,ddp", "tp=2,fsdp", "pp=2:1f1b,ddp", "pp=2:1f1b,fsdp", "pp=2:interleaved,fsdp", "tp=2,pp=2:1f1b"),
)
CONVOLUTIONS = ("cnn", "resnet_groupnorm")
ON_TWO = ("op=2", "pp=2:1f1b", "layers=2")
ON_EIGHT = ("tp=2,pp=2:1f1b,fsdp=2",)


@dataclass(frozen=True)
class Task:
    example: str
    ranks: int
    strategies: tuple[str, ...]


TASKS = [
    *(Task(example, 4, ON_FOUR) for example in TRANSFORMERS),
    *(Task(example, 2, ON_TWO) for example in CONVOLUTIONS),
    *(Task(example, 8, ON_EIGHT) for example in ("gpt", "hf_llama")),
]


def verify(task: Task) -> list[dict[str, Any]]:
    """One call of the command line: all strategies of one example."""
    start = time.perf_counter()
    words = ["verify", f"examples/{task.example}.py", "--ranks", str(task.ranks), "--device", "cpu", "--json"]
    words += ["--strategies", *task.strategies]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "meshwright", *words], stdout=subprocess.PIPE, text=True, env=environment
    )
    rows = json.loads(done.stdout)["results"] if done.stdout else []
    rows = [row for row in rows if row["strategy"] in task.strategies]  # without that of one process
    equal = sum(row["equal"] for row in rows)
    print(
        f"{task.example} on {task.ranks}: {equal} of {len(task.strategies)} equal, {time.perf_counter() - start:.0f} s"
    )
    for row in rows:
        if not row["equal"]:
            print(f"    {row['strategy']}: {row['first_difference']}", flush=True)
    return [{"example": task.example, "ranks": task.ranks, **row} for row in rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--examples", nargs="+", default=[*TRANSFORMERS, *CONVOLUTIONS])
    parser.add_argument("--parallel", type=int, default=1)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    tasks = [task for task in TASKS if task.example in asked.examples]
    with ThreadPoolExecutor(asked.parallel) as pool:
        rows = [row for found in pool.map(verify, tasks) for row in found]
    wanted = sum(len(task.strategies) for task in tasks)
    worst = max((row["loss_max_rel"] or 0.0 for row in rows), default=float("nan"))
    equal = sum(row["equal"] for row in rows)
    print(f"{equal} of {wanted} equal; the largest relative difference of a loss is {worst:.1e}")
    if asked.json:
        where = {"torch": torch.__version__, "machine": platform.machine()}
        asked.json.write_text(json.dumps({**where, "rows": rows}, indent=1) + "\n")
    sys.exit(0 if equal == wanted and worst <= 1e-5 else 1)


if __name__ == "__main__":
    main()
