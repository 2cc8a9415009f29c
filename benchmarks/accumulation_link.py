"""When sharded gradients of several micro-batches are better reduced in each, or once a step, by the speed of a link.

    python benchmarks/accumulation_link.py --json docs/data/accumulation_link.json

Two CPU ranks, each on a host of its own (tests/hosts.py: namespaces whose links `tc` limits). Both ways take turns in
one run, and their ratio is compared with the planner's for a cluster file that `probe` makes of the limited link. It
needs root.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from gpt_model import GPT, Shape, make_up_batch
from torch import nn
from torch.nn import functional as F
from torch.optim import AdamW

from meshwright import Job
from meshwright.api.job_planner import Planner
from meshwright.assemble.step import Trainer
from meshwright.assemble.world import World, join
from meshwright.describe.model import describe
from meshwright.describe.observe import make_batch
from meshwright.facts.catalogue import MEASURED
from meshwright.facts.cluster import Cluster
from meshwright.facts.model import ModelFacts
from meshwright.facts.plan import Plan
from meshwright.facts.strategy import Strategy
from meshwright.planner.search import choose
from meshwright.probe.probe import measure

sys.path.append(str(Path(__file__).parents[1] / "tests"))  # the hosts are the tests' own
from hosts import DEVICE, Host, make_hosts, wait_for

SHAPE = Shape(layers=6, width=256, heads=4, length=64, vocabulary=512)
"""4.9 million parameters: 20 MB of gradients."""
STRATEGIES = ("zero2", "fsdp")
WAYS = {"each": "", "last": ",sync=last"}
CASES = [(2, 1), (4, 1), (8, 1), (2, 8), (4, 8), (8, 8), (2, 64)]
"""Micro-batches of a step, and samples of each: with many samples, computing takes much longer than sending."""
PORT = 29500
TIED = 0.05
"""Ways whose measured times differ by less than this share count as equally fast."""


def build() -> nn.Module:
    return GPT(SHAPE)


def loss(logits: torch.Tensor, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
    y = batch["y"]
    return F.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="sum"), y.numel()


def job_of(samples: int) -> Job:
    return Job(
        model=build,
        inputs=lambda batch: (batch["x"],),
        loss=loss,
        optimizer=lambda params: AdamW(params, lr=1e-4),
        sample=lambda n: make_up_batch(SHAPE, n, torch.Generator().manual_seed(0)),
        global_batch=samples,
    )


@dataclass(frozen=True)
class Case:
    """One strategy and number of micro-batches, which is trained both ways."""

    strategy: str
    micro_batches: int
    samples: int
    """Of a micro-batch of one rank."""

    def text(self, way: str) -> str:
        return f"{self.strategy},mb={self.samples}{WAYS[way]}"


def one_rank(options: argparse.Namespace) -> None:
    """Measure all cases at one rate; rank 0 adds its rows to the file."""
    os.environ |= {"MASTER_PORT": str(PORT), "GLOO_SOCKET_IFNAME": DEVICE}
    torch.set_num_threads(1)
    world = join(rank=options.rank, ranks=2, local_rank=0, local_ranks=1, device=torch.device("cpu"))
    facts = describe(job_of(2))
    rows: list[dict[str, Any]] = json.loads(options.out.read_text()) if options.out.exists() else []
    cluster = measure(world)["cluster"]
    link = cluster["hardware"]["between"]
    # What gloo itself takes, as it would between ranks on one node: measured first, without a limit.
    cluster["hardware"]["within"] = rows[0]["link"] if rows else {key: link[key] for key in ("bandwidth", "latency")}
    cluster["hardware"]["sources"] |= {"within.bandwidth": MEASURED, "within.latency": MEASURED}
    for strategy, sizes in product(STRATEGIES, options.cases):
        case = Case(strategy, *sizes)
        found = measure_both(case, facts, world, options.rounds)
        if world.is_main:
            forecast = forecast_both(case, facts, cluster)
            rows.append({"gigabits": options.rate, "link": dict(link), **found, **forecast})
            print(words_of(rows[-1]), file=sys.stderr, flush=True)
    if world.is_main:
        options.out.write_text(json.dumps(rows))
    world.leave()


def measure_both(case: Case, facts: ModelFacts, world: World, rounds: int) -> dict[str, Any]:
    """Seconds of a step by way, and the ratio of both, as medians over rounds in which the ways take turns."""
    job = job_of(2 * case.samples * case.micro_batches)
    batch = make_batch(job, job.global_batch)
    trainers = {way: Trainer(job, facts, Strategy.parse(case.text(way)).resolve(2), world, seed=0) for way in WAYS}
    for trainer in trainers.values():
        trainer.step(batch)
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    for turn in range(rounds):
        for way in sorted(WAYS, reverse=bool(turn % 2)):
            dist.barrier()
            start = time.perf_counter()
            assert trainers[way].step(batch).loss  # reading it waits for the step
            dist.barrier()
            seconds[way].append(time.perf_counter() - start)
    ratios = sorted(each / last for each, last in zip(seconds["each"], seconds["last"], strict=True))
    return {
        "strategy": case.strategy,
        "samples": case.samples,
        "micro_batches": case.micro_batches,
        "seconds": {way: median(found) for way, found in seconds.items()},
        "ratio": median(ratios),
        "quartiles": [ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]],
    }


def forecast_both(case: Case, facts: ModelFacts, cluster: dict[str, Any]) -> dict[str, Any]:
    """The planner's seconds by way, and the way that it recommends."""
    job = job_of(2 * case.samples * case.micro_batches)
    planner, on = Planner(job, facts, job.global_batch), Cluster.from_json(cluster)
    plans = planner.search_named(on, [Strategy.parse(case.text(way)) for way in WAYS]).plans
    by_way: dict[str, Plan] = {plan.strategy.sync: plan for plan in plans}
    forecast = {way: by_way[way].forecast.step for way in WAYS}
    return {
        "forecast": forecast,
        "forecast_ratio": forecast["each"] / forecast["last"],
        "forecast_parts": {way: dict(by_way[way].forecast.time) for way in WAYS},
        "chosen": choose(planner.context(on), plans)[0].strategy.sync,
    }


def faster(row: dict[str, Any]) -> str:
    """The faster way measured; "tie" within `TIED`."""
    return "tie" if abs(row["ratio"] - 1) < TIED else "each" if row["ratio"] < 1 else "last"


def is_right(row: dict[str, Any]) -> bool:
    return faster(row) in ("tie", row["chosen"])


def words_of(row: dict[str, Any]) -> str:
    rate = f"{row['gigabits']:g} Gbit/s" if row["gigabits"] else "unlimited"
    seconds = " ".join(f"{way} {row['seconds'][way] * 1e3:6.0f} ms" for way in WAYS)
    measured = f"{seconds}, ratio {row['ratio']:.2f} ({faster(row)})"
    verdict = "right" if is_right(row) else "WRONG"
    planned = f"planner {row['forecast_ratio']:.2f} ({row['chosen']}) {verdict}"
    case = f"{row['strategy']:5} {row['micro_batches']} x {row['samples']:2} samples"
    return f"{rate:>10}  {case}  {measured}  {planned}"


def main() -> None:
    options = _options()
    if options.rank is not None:
        one_rank(options)
        return
    with tempfile.TemporaryDirectory() as folder, make_hosts(2) as hosts:
        out = Path(folder) / "rows.json"
        for gigabits in sorted(options.gigabits):  # without a limit first
            for host in hosts:
                host.limit(gigabits)
            _run_ranks(hosts, out, gigabits, options.minutes)
        rows = json.loads(out.read_text())
    for line in table(rows):
        print(line)
    if options.json:
        document = {
            "machine": f"{os.cpu_count()} cores, {platform.machine()}",
            "torch": torch.__version__,
            "parameters": sum(parameter.numel() for parameter in build().parameters()),
            "length": SHAPE.length,
            "rounds": options.rounds,
            "rows": rows,
        }
        options.json.write_text(json.dumps(document, indent=1) + "\n")
    if wrong := [row for row in rows if not is_right(row)]:
        raise SystemExit(f"The planner chose the slower way in {len(wrong)} of {len(rows)} cases.")


def table(rows: list[dict[str, Any]]) -> Iterator[str]:
    yield "| link | strategy | micro-batches x samples | each / last, measured | planner | planner's choice |"
    yield "| --- | --- | --- | --- | --- | --- |"
    for row in rows:
        rate = f"{row['gigabits']:g} Gbit/s" if row["gigabits"] else "unlimited"
        low, high = row["quartiles"]
        cells = [
            rate,
            f"`{row['strategy']}`",
            f"{row['micro_batches']} x {row['samples']}",
            f"{row['ratio']:.2f} ({low:.2f} to {high:.2f})",
            f"{row['forecast_ratio']:.2f}",
            f"`{row['chosen']}`, {'right' if is_right(row) else 'wrong'}" + " (tie)" * (faster(row) == "tie"),
        ]
        yield f"| {' | '.join(cells)} |"


def _run_ranks(hosts: list[Host], out: Path, gigabits: float, minutes: float) -> None:
    """Run one rank on each host. What is still running after `minutes` ends with the hosts."""
    ranks = []
    for rank, host in enumerate(hosts):
        own = ["--rank", str(rank), "--rate", str(gigabits), "--out", str(out)]
        command = [sys.executable, __file__, *sys.argv[1:], *own]
        ranks.append(host.start(command, env={"MASTER_ADDR": hosts[0].address}))
    if any(wait_for(ranks, 60 * minutes)):
        raise SystemExit("A rank failed.")


def _sizes(text: str) -> tuple[int, int]:
    micro_batches, samples = text.split("x")
    return int(micro_batches), int(samples)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabits", type=float, nargs="+", default=[0.0, 1.0], help="per second; 0: no limit")
    parser.add_argument("--cases", type=_sizes, nargs="+", default=CASES, help="micro-batches x samples, such as 4x8")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--minutes", type=float, default=20.0, help="end the ranks of one rate after this time")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--rate", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
