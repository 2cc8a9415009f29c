"""What loops do to a laid-out model, under several strategies: right, refused, or failing loudly; never wrong.

PYTHONPATH=src python benchmarks/own_loop_misuse.py [--strategies ddp;zero1] [--only NAME;NAME] [--out FILE.json]

The programs are those of tests/misuse_programs.py and tests/loop_programs.py, each beside plain PyTorch in one process.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import misuse_programs as programs
import rank_pool

STRATEGIES = ["ddp", "zero1", "zero2", "fsdp", "tp=2", "op=2", "hsdp=2x2"]
STARTING = rank_pool.LIMIT_SECONDS
PATIENCE = 30
"""Seconds after which ranks are taken to wait for each other."""


def outcome(pool: rank_pool.RankPool, plain: programs.Outcome, strategy: str, name: str) -> dict[str, str]:
    pool(programs.ready)  # starting the ranks again may take longer than a program
    try:
        rank_pool.LIMIT_SECONDS = PATIENCE
        found = pool(programs.under, strategy, name)
    except rank_pool.SilentRanks as error:  # one of them may have raised, which would end a real run
        found = list(error.answers.values())
        if not any(kind == "refused" for kind, _, _ in found):
            return {"verdict": "fails", "told": str(error)}
    except (RuntimeError, TimeoutError, rank_pool.RankError) as error:  # ranks that wait for each other, or ended
        return {"verdict": "fails", "told": f"{type(error).__name__}: {error}"[:200]}
    finally:
        rank_pool.LIMIT_SECONDS = STARTING
    told = next((message for kind, message, _ in found if kind != "done"), "")
    return {"verdict": programs.verdict(plain, found, strategy), "told": told[:400]}


def add(path: Path, row: dict[str, Any]) -> None:
    """Add a program's row to the file, in the order of the programs."""
    rows = {one["program"]: one for one in json.loads(path.read_text())} if path.exists() else {}
    under = rows.get(row["program"], {}).get("under", {}) | row["under"]
    rows[row["program"]] = row | {"under": {one: under[one] for one in [*STRATEGIES, *under] if one in under}}
    order = list(programs.PROGRAMS)
    path.write_text(json.dumps(sorted(rows.values(), key=lambda one: order.index(one["program"])), indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategies", default=";".join(STRATEGIES), help="with ; between them")
    parser.add_argument("--only", default="", help="parts of the programs' names, with ; between them")
    parser.add_argument(
        "--all", action="store_true", help="the loops of tests/loop_programs.py, too, which are all right"
    )
    parser.add_argument("--out", type=Path, help="added to after each program; what it holds of others stays")
    given = parser.parse_args()
    torch.set_num_threads(1)
    pools = {ranks: rank_pool.RankPool(ranks) for ranks in (2, 4)}
    for name in programs.PROGRAMS if given.all else [one.__name__ for one in programs.NEW]:
        if any(part in name for part in given.only.split(";")):
            plain = programs.plainly(name)
            under = {
                strategy: outcome(pools[4 if "x" in strategy else 2], plain, strategy, name)
                for strategy in given.strategies.split(";")
            }
            print(name, *(f"{s}: {one['verdict']}" for s, one in under.items()), sep="  ", flush=True)
            if given.out is not None:
                add(given.out, {"program": name, "plain": plain[0], "under": under})
    for pool in pools.values():
        pool.close()


if __name__ == "__main__":
    main()
