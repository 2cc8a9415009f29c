"""Verify architectures of Hugging Face transformers under strategies that divide the model; write the verdicts down.

python benchmarks/architectures.py --json docs/data/architectures.json
python benchmarks/architectures.py --architectures Llama T5 --strategies pp=2:gpipe tp=2

A verdict is "works" (as one process trains, to rounding), "refused" (with the reason, before anything is trained),
"wrong" (with the first difference) or "failed" (with the error). Exit 1 if any is wrong or failed. "held" is the
largest share of the parameters that a rank holds: a half would be ideal on two ranks.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections import Counter
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

import torch
import transformers

import meshwright
from meshwright.build.check import check
from meshwright.build.rehearsal import rehearse
from meshwright.build.step import Trainer
from meshwright.build.world import World
from meshwright.describe.model import describe
from meshwright.errors import Refused
from meshwright.facts.model import ModelFacts
from meshwright.facts.strategy import Strategy
from meshwright.runtime.place import place_of
from meshwright.runtime.verify import verify

sys.path.append(str(Path(__file__).parents[1] / "tests"))  # the jobs and the ranks are the tests' own

from architecture_jobs import ARCHITECTURES
from rank_pool import RankError, RankPool

STRATEGIES = ("pp=2:1f1b", "tp=2")


@dataclass(frozen=True, kw_only=True)
class Result:
    architecture: str
    strategy: str
    verdict: str
    reason: str | None = None
    loss_max_rel: float | None = None
    grad_norm_max_rel: float | None = None
    param_max_abs: float | None = None
    held: float | None = None
    """The largest share of the trainable parameters that a rank holds."""
    seconds: float = 0.0

    @property
    def good(self) -> bool:
        return self.verdict in ("works", "refused")


@cache
def facts_of(architecture: str) -> ModelFacts:
    return describe(ARCHITECTURES[architecture])


def examine(world: World, architecture: str, strategy: str, steps: int) -> Result:
    """Runs on every rank. A refusal is raised alike on all of them, before they meet."""
    job, facts = ARCHITECTURES[architecture], facts_of(architecture)
    try:
        rehearse(job, facts, check(job, facts, Strategy.parse(strategy), place_of(world)))
    except Refused as reason:
        return Result(architecture=architecture, strategy=strategy, verdict="refused", reason=str(reason))
    held: list[int] = []
    (verdict,) = verify(job, facts, [strategy], world, steps=steps, plant=lambda t: held.append(count_parameters(t)))
    return Result(
        architecture=architecture,
        strategy=strategy,
        verdict="works" if verdict.equal else "wrong",
        reason=verdict.first_difference,
        loss_max_rel=verdict.loss_max_rel,
        grad_norm_max_rel=verdict.grad_norm_max_rel,
        param_max_abs=verdict.param_max_abs,
        held=round(max(world.gather(held[0])) / sum(p.count for p in facts.trainable), 3),
    )


def count_parameters(trainer: Trainer) -> int:
    """Elements that this rank updates."""
    return sum(parameter.numel() for parameter in trainer.engine.parameters())


def examine_on(pool: RankPool, architecture: str, strategy: str, steps: int) -> Result:
    try:
        return pool(examine, architecture, strategy, steps)[0]
    except RankError as error:
        print(error, file=sys.stderr)
        reason = f"{error.kind}: {error.message.splitlines()[0] if error.message else ''}"
    except (TimeoutError, RuntimeError) as error:  # of the pool itself: a rank hung or ended
        reason = str(error)
    return Result(architecture=architecture, strategy=strategy, verdict="failed", reason=reason)


def line(result: Result) -> str:
    verdict = result.verdict if result.good else result.verdict.upper()
    text = f"{result.architecture:12} {result.strategy:14} {verdict:8} {result.seconds:5.1f} s"
    if result.loss_max_rel is not None:
        text += f"  loss {result.loss_max_rel:.1e} norm {result.grad_norm_max_rel:.1e} held {result.held:.2f}"
    return f"{text}  {result.reason}" if result.reason else text


def write(path: Path, results: list[Result], ranks: int) -> None:
    command = " ".join(["python", "benchmarks/architectures.py", *sys.argv[1:]])
    versions = {"meshwright": meshwright.__version__, "torch": torch.__version__}
    versions |= {"transformers": transformers.__version__, "python": platform.python_version()}
    document = {"command": command, "ranks": ranks, "versions": versions, "results": [asdict(r) for r in results]}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--architectures", nargs="+", default=list(ARCHITECTURES), choices=ARCHITECTURES, metavar="A")
    parser.add_argument("--strategies", nargs="+", default=STRATEGIES)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    pool, results = RankPool(asked.ranks), []
    for architecture in asked.architectures:
        for strategy in asked.strategies:
            start = time.perf_counter()
            found = examine_on(pool, architecture, strategy, asked.steps)
            results.append(Result(**{**asdict(found), "seconds": round(time.perf_counter() - start, 1)}))
            print(line(results[-1]), flush=True)
            if asked.json:  # after each, so that a run which is ended early leaves what it found
                write(asked.json, results, asked.ranks)
    pool.close()
    for strategy in asked.strategies:
        counts = Counter(result.verdict for result in results if result.strategy == strategy)
        print(f"{strategy}: " + ", ".join(f"{count} {verdict}" for verdict, count in counts.most_common()))
    sys.exit(0 if all(result.good for result in results) else 1)


if __name__ == "__main__":
    main()
