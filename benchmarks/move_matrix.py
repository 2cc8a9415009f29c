"""Load every strategy's checkpoint under every other, on every number of ranks, and train on; keep what came of it.

python benchmarks/move_matrix.py --json docs/data/move_matrix.json
python benchmarks/move_matrix.py --jobs narrow_gpt --strategies single fsdp tp=2     # small ones, in a minute

A move trains three steps under one strategy and saves; loads under another; saves again, which must be the same bit by
bit; and trains three more, which must see the samples, losses, parameters and optimizer state of six steps of one
process that was not interrupted. Dropout is off. Exit 1 if any move is not so.
"""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import sys
import time
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

import meshwright
from meshwright.assemble.check import check
from meshwright.assemble.dry_run import dry_run
from meshwright.errors import BadInput
from meshwright.facts.strategy import Strategy
from meshwright.runtime.place import place_for

sys.path.append(str(Path(__file__).parents[1] / "tests"))  # the jobs, the moves and the ranks are the tests' own

import rank_pool
from checkpoint_contents import ATOL, RTOL
from checkpoint_jobs import JOBS, facts_of, job_of
from checkpoint_moves import LOSS_RTOL, Matrix, Move, Node, in_memory
from rank_pool import RankPool

RANKS = (1, 2, 4)
STRATEGIES = (
    *("single", "ddp", "zero1", "zero2", "fsdp", "hsdp=2x2", "tp=2", "tp=2,fsdp"),
    *("pp=2:1f1b", "pp=2:interleaved,fsdp", "op=2", "layers=2"),
)


@dataclass(frozen=True, kw_only=True)
class Row:
    job: str
    source: Node
    target: Node
    problem: str | None
    exact: bool = False
    """Whether the checkpoint that is saved again right after loading is the same, bit by bit."""
    same_samples: bool = False
    loss_max_rel: float | None = None
    state_max_scaled: float | None = None
    """The largest difference of a parameter or a moment, over the largest magnitude of its kind."""


def nodes_of(job: str, strategies: list[str], numbers: list[int]) -> list[Node]:
    """Where each strategy runs: on as many ranks as the job and the strategy can take."""
    found = []
    for strategy in strategies:
        for ranks in numbers:
            try:
                made = job_of(job, strategy)
                resolved = check(made, facts_of(job), Strategy.parse(strategy), place_for("cpu", ranks))
                dry_run(made, facts_of(job), resolved)
            except BadInput:
                continue
            found.append(Node(strategy, ranks))
    return found


def rows_of(job: str, sources: list[Node], target: Node, arrived: Future[list[Move]]) -> list[Row]:
    if error := arrived.exception():
        lines = str(error).strip().splitlines()
        return [
            Row(job=job, source=source, target=target, problem=lines[0] if lines else repr(error)) for source in sources
        ]
    return [to_row(job, move) for move in arrived.result()]


def to_row(job: str, move: Move) -> Row:
    distance = move.arrival.distance
    return Row(
        job=job,
        source=move.source,
        target=move.target,
        problem=move.problem(),
        exact=move.arrival.changed is None,
        same_samples=move.same_samples,
        loss_max_rel=move.loss_difference,
        state_max_scaled=distance.scaled if distance else None,
    )


def table(rows: list[Row]) -> str:
    """Sources down, targets across: the largest relative difference of a loss, or that it went wrong."""
    nodes = list(dict.fromkeys(row.source for row in rows))
    cells = {(row.source, row.target): "WRONG" if row.problem else f"{row.loss_max_rel:.0e}" for row in rows}
    width = max(len(str(node)) for node in nodes) + 5
    lines = [" " * width + "".join(f"{index:>7}" for index in range(len(nodes)))]
    for index, source in enumerate(nodes):
        row = "".join(f"{cells[source, target]:>7}" for target in nodes)
        lines.append(f"{index:>3}  {source!s:<{width - 5}}{row}")
    return "\n".join(lines)


def write(path: Path, rows: list[Row]) -> None:
    command = " ".join(["python", "benchmarks/move_matrix.py", *sys.argv[1:]])
    versions = {"meshwright": meshwright.__version__, "torch": torch.__version__, "python": platform.python_version()}
    bounds = {"loss_rtol": LOSS_RTOL, "state_rtol": RTOL, "state_atol_of_largest": ATOL}
    head = json.dumps({"command": command, "versions": versions, "bounds": bounds}, indent=1)
    lines = [json.dumps(asdict(row) | {"source": str(row.source), "target": str(row.target)}) for row in rows]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(head.removesuffix("\n}") + ',\n "rows": [\n  ' + ",\n  ".join(lines) + "\n ]\n}\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", nargs="+", default=["gpt", "cnn"], choices=JOBS, metavar="JOB")
    parser.add_argument("--strategies", nargs="+", default=list(STRATEGIES))
    parser.add_argument("--ranks", nargs="+", type=int, default=list(RANKS), help="numbers of ranks to run on")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    rank_pool.LIMIT_SECONDS = 3600  # a pool's call goes on from all sources
    pools = {ranks: RankPool(ranks) for ranks in RANKS}
    folder, start = in_memory(), time.perf_counter()
    rows: list[Row] = []

    def tell(progress: str) -> None:
        print(f"{time.perf_counter() - start:7.0f} s  {progress}", flush=True)

    try:
        for job in asked.jobs:
            nodes = nodes_of(job, asked.strategies, asked.ranks)
            tell(f"{job}: {len(nodes)} nodes, {len(nodes) ** 2} moves")
            arrived = Matrix(job, nodes, folder, pools, tell=tell).run()
            found = [row for target in nodes for row in rows_of(job, nodes, target, arrived[target])]
            rows += found
            print(table(found), flush=True)
            for row in found:
                if row.problem:
                    print(f"WRONG  {row.problem}")
            if asked.json:  # after each job, so that a run which is ended early leaves what it found
                write(asked.json, rows)
            shutil.rmtree(folder / job)
    finally:
        shutil.rmtree(folder)
        for pool in pools.values():
            pool.close()
    right = sum(row.problem is None for row in rows)
    worst = max((row.loss_max_rel for row in rows if row.loss_max_rel is not None), default=float("nan"))
    print(f"{right} of {len(rows)} moves are right; the largest relative difference of a loss is {worst:.1e}")
    sys.exit(0 if right == len(rows) else 1)


if __name__ == "__main__":
    main()
