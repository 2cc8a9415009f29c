"""Hold models of packages from the registry against plain PyTorch under many strategies; write the table of the docs.

python benchmarks/registry_models.py --json docs/data/registry_models.json --table docs/registry-models.md
python benchmarks/registry_models.py --models "timm Swin" "peft LoRA on a Llama" --strategies single ddp tp=2

What to install is said in registry_jobs.py. The reference is a plain loop over the package's own model, in float64
where it runs so. A verdict is "equal", "refused" (by an error that says why), "DIFFERS" or "CRASH". A run goes on where
an earlier one ended; --again repeats what was bad. Exit 1 if anything differs or crashes.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import sys
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).parents[1] / "tests"))  # the judge and the ranks are the tests' own
sys.path.append(str(Path(__file__).parent))  # the pool's ranks are given this path, too

from registry_jobs import JOBS

from rank_pool import RankPool
from zoo.programs import Case, Outcome, examine, plain_of

STRATEGIES = ("single", "ddp", "zero1", "zero2", "fsdp", "tp=2", "op=2", "pp=2:1f1b", "layers=2")
PACKAGES = ("torch", "timm", "diffusers", "peft", "segmentation-models-pytorch", "torch-geometric", "x-transformers")
Results = dict[tuple[str, str], dict[str, Any]]


def case_of(name: str) -> Case:
    """In float64 if the model runs so; packages compute some things in float32 whatever the model's dtype."""
    for double in (True, False):
        case = Case("registry_jobs", name, double=double, exact=False)
        try:
            plain_of(case)
        except Exception as error:
            print(
                f"{name}: not in {'float64' if double else 'float32'}: {type(error).__name__}: {error}", file=sys.stderr
            )
        else:
            return case
    raise RuntimeError(f"{name} does not train in plain PyTorch.")


def known(path: Path | None, again: bool) -> Results:
    """What an earlier run has found."""
    if path is None or not path.exists():
        return {}
    rows = json.loads(path.read_text())["results"]
    kept = [row for row in rows if row["model"] in JOBS and (row["verdict"] in ("equal", "refused") or not again)]
    return {(row["model"], row["strategy"]): row for row in kept}


def write(path: Path, results: Results) -> None:
    versions = {name: importlib.metadata.version(name) for name in (*PACKAGES, "transformers", "meshwright")}
    rows = [results[name, s] for name in JOBS for s in STRATEGIES if (name, s) in results]
    path.write_text(json.dumps({"versions": versions, "results": rows}, indent=1) + "\n")


def table(results: Results) -> str:
    lines = ["| model | " + " | ".join(f"`{s}`" for s in STRATEGIES) + " |", "| --- " * (len(STRATEGIES) + 1) + "|"]
    for name in JOBS:
        cells = [results[name, s]["verdict"] if (name, s) in results else "" for s in STRATEGIES]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(JOBS), choices=JOBS, metavar="M")
    parser.add_argument("--strategies", nargs="+", default=list(STRATEGIES), choices=STRATEGIES, metavar="S")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--again", action="store_true", help="repeat bad pairs of the file")
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    results, pool = known(asked.json, asked.again), RankPool(2)
    for number, name in enumerate(asked.models, 1):
        missing = [strategy for strategy in asked.strategies if (name, strategy) not in results]
        case = case_of(name) if missing else None
        for strategy in missing:
            start = time.perf_counter()
            found = examine(case, strategy, None if strategy == "single" else pool)
            results[name, strategy] = row_of(name, strategy, found)
            seconds = time.perf_counter() - start
            print(
                f"[{number}/{len(asked.models)}] {name:36} {strategy:10} {seconds:5.1f} s  {str(found)[:300]}",
                flush=True,
            )
            if asked.json:  # after each, so that a run which is ended early leaves what it found
                write(asked.json, results)
    pool.close()
    print(table(results))
    counts = Counter(row["verdict"] for row in results.values())
    print(", ".join(f"{count} {verdict}" for verdict, count in counts.most_common()))
    sys.exit(0 if counts.keys() <= {"equal", "refused"} else 1)


def row_of(name: str, strategy: str, found: Outcome) -> dict[str, Any]:
    return {"model": name, "strategy": strategy, "verdict": found.verdict, "reason": found.reason}


if __name__ == "__main__":
    main()
