"""Out of memory on a real GPU: what the doctor says, and whether the strategy that it names runs.

    PYTHONPATH=src python benchmarks/out_of_memory_gpu.py --json docs/data/out_of_memory_gpu.json

A Llama of 1.2 billion parameters trains on 64 samples of 4,096 tokens at once, which no GPU holds. `train` must end
with exit 2 without a restart, and name a strategy; the same command with that strategy must end with exit 0.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

JOB = """
from dataclasses import replace

from meshwright.jobs.load import load_job

base = load_job("{job}")


def data():
    tokens = base.sample(4 * base.global_batch)
    return [dict(zip(tokens, row)) for row in zip(*tokens.values())]


job = replace(base, data=data)
"""
NEAREST = re.compile(r"nearest strategy that fits is (\S+): \d")


def train(job: Path, strategy: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "meshwright", "train", str(job), "--strategy", strategy, "--steps", "2"]
    started = time.monotonic()
    ran = subprocess.run([*command, "--max-restarts", "3"], capture_output=True, text=True)
    errors = [line for line in ran.stderr.splitlines() if line.startswith(("error:", "The ")) or "restart" in line]
    print(f"{strategy}: exit {ran.returncode} after {time.monotonic() - started:.0f} s", *errors, sep="\n", flush=True)
    return {"strategy": strategy, "exit": ran.returncode, "said": errors, "end": ran.stderr.splitlines()[-3:]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--job", default="preset:llama3.2-1b:seq=4096,batch=64")
    parser.add_argument("--strategy", default="single,bf16")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        job = Path(folder) / "job.py"
        job.write_text(JOB.format(job=given.job))
        first = train(job, given.strategy)
        named = NEAREST.search("\n".join(first["said"]))
        second = train(job, named[1]) if named else None
    if given.json:
        given.json.write_text(json.dumps({"first": first, "named": second}, indent=1) + "\n")
    sys.exit(0 if first["exit"] == 2 and second and second["exit"] == 0 else 1)


if __name__ == "__main__":
    main()
