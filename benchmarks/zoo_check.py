"""Hold every model of tests/zoo against plain PyTorch under every strategy; print a table and write it down.

python benchmarks/zoo_check.py --json docs/data/zoo.json
python benchmarks/zoo_check.py --models lstm resnet_in_place --strategies single fsdp tp=2

The reference is a plain loop over the user's builder, in float64 where the model allows it. Compared are the initial
weights and buffers bit for bit, the loss of each step, every gradient of the first step, and all parameters and
buffers after three steps. A verdict is "equal", "refused" (by an error that says why), "DIFFERS" or "CRASH". With
--json a run goes on where an earlier one ended: pairs that the file holds are not run again, but for bad ones with
--again. Exit 1 if anything differs or crashes.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch

import meshwright

sys.path.append(str(Path(__file__).parents[1] / "tests"))  # the models and the ranks are the tests' own

from rank_pool import RankPool
from zoo.catalogue import STRATEGIES, ZOO, case_of, ranks_of
from zoo.programs import examine

ALL = ("single", *STRATEGIES)
MARKS = {"equal": "=", "refused": "r", "DIFFERS": "DIFFERS", "CRASH": "CRASH"}


class Pools:
    """Two and four ranks, started when they are first needed."""

    def __init__(self) -> None:
        self._pools: dict[int, RankPool] = {}

    def of(self, strategy: str) -> RankPool | None:
        if strategy == "single":
            return None
        return self._pools.setdefault(ranks_of(strategy), RankPool(ranks_of(strategy)))

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()


def known(path: Path | None, again: bool) -> dict[tuple[str, str], dict[str, Any]]:
    """What an earlier run has found."""
    if path is None or not path.exists():
        return {}
    results = json.loads(path.read_text())["results"]
    good = [r for r in results if not again or r["verdict"] in ("equal", "refused")]
    return {(r["model"], r["strategy"]): r for r in good if r["model"] in ZOO}


def write(path: Path, results: dict[tuple[str, str], dict[str, Any]]) -> None:
    versions = {"meshwright": meshwright.__version__, "torch": torch.__version__, "python": platform.python_version()}
    rows = [results[name, s] for name in ZOO for s in ALL if (name, s) in results]
    path.write_text(json.dumps({"versions": versions, "results": rows}, indent=1) + "\n")


def table(results: dict[tuple[str, str], dict[str, Any]]) -> str:
    names = [name for name in ZOO if any(key[0] == name for key in results)]
    lines = ["| model | " + " | ".join(f"`{s}`" for s in ALL) + " |", "| --- " * (len(ALL) + 1) + "|"]
    for name in names:
        cells = [MARKS[results[name, s]["verdict"]] if (name, s) in results else "" for s in ALL]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(ZOO), choices=ZOO, metavar="M")
    parser.add_argument("--strategies", nargs="+", default=list(ALL), choices=ALL, metavar="S")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--again", action="store_true", help="run bad pairs of the file again")
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    results, pools = known(asked.json, asked.again), Pools()
    for number, name in enumerate(asked.models, 1):
        for strategy in asked.strategies:
            if (name, strategy) in results:
                continue
            start = time.perf_counter()
            found = examine(case_of(name), strategy, pools.of(strategy))
            row = {"model": name, "strategy": strategy, "verdict": found.verdict, "reason": found.reason}
            results[name, strategy] = row
            seconds = time.perf_counter() - start
            print(
                f"[{number}/{len(asked.models)}] {name:24} {strategy:16} {seconds:4.1f} s  {_short(found)}", flush=True
            )
            if asked.json:  # after each, so that a run which is ended early leaves what it found
                write(asked.json, results)
    pools.close()
    print(table(results))
    counts = Counter(row["verdict"] for row in results.values())
    print(", ".join(f"{count} {verdict}" for verdict, count in counts.most_common()))
    sys.exit(0 if counts.keys() <= {"equal", "refused"} else 1)


def _short(found: Any) -> str:
    return str(found).split("\n")[0][:300]


if __name__ == "__main__":
    main()
