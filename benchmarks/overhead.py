"""What a step costs in Meshwright, Accelerate and Lightning Fabric, beside a hand-written PyTorch loop.

    python benchmarks/overhead.py --rounds 25 --steps 4 --json overhead.json      # ddp and fsdp on two CPU ranks
    python benchmarks/overhead.py --device cuda --json overhead.json              # one GPU, bf16, torch.compile
    python benchmarks/overhead.py --deepspeed --strategies zero1,zero2,fsdp       # beside DeepSpeed's stages 1, 2, 3

All variants live in the same processes and take turns: in each round every one of them takes a few steps, and the order
rotates from round to round, so that whatever else the machine does falls on all alike. A ratio is the median over
rounds of (median step of the variant in that round / median step of the hand-written loop in that round); of zero1 and
zero2, which nobody writes by hand, by that of Meshwright's own engine.

The numbers count only if all variants train: their losses must agree in every step of the first pass over the batches,
fall, and leave the same parameters on every rank. Otherwise the script says so and exits with 1. (Later steps do not
tell anything: Adam amplifies rounding, and a second copy of the same loop ends elsewhere, too.)
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from itertools import cycle
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from gpt_model import GPT, Shape, make_up_batch
from peers import (
    ON_DEEPSPEED,
    VARIANTS,
    Batch,
    CannotRun,
    HandWritten,
    HandWrittenAgain,
    Meshwright,
    Variant,
    Workload,
)

# About 10M parameters; a step takes a few hundred milliseconds on one core.
CPU_SHAPE = Shape(layers=6, width=368, heads=8, length=128, vocabulary=512)
CPU_SAMPLES_PER_RANK = 1
# GPT-2 small.
CUDA_SHAPE = Shape(layers=12, width=768, heads=12, length=1024, vocabulary=50304)
CUDA_SAMPLES = 16
BATCHES = 8
WARMUP_STEPS = 3
AGREEMENT = {"fp32": 1e-3, "bf16": 2e-2}
"""How far losses may be apart. In bf16 the variants differ by design: autocast keeps the residual stream in fp32."""


@dataclass
class Turn:
    """One variant among the others: what it is given and what it has shown."""

    variant: Variant
    batches: Iterator[Batch]
    """Without end."""
    rounds: list[list[float]] = field(default_factory=list)
    """Seconds of each step, per round."""
    losses: list[torch.Tensor] = field(default_factory=list)


def main() -> int:
    options = parse_options()
    document = run_cuda(options) if options.device == "cuda" else run_ranks(options)
    if options.json:
        Path(options.json).write_text(json.dumps(document, indent=1) + "\n")
    show(document)
    for failure in document["failures"]:
        print(f"THESE NUMBERS DO NOT COUNT: {failure}", file=sys.stderr)
    return 1 if document["failures"] else 0


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=25, help="times that every variant has its turn")
    parser.add_argument("--steps", type=int, default=4, help="steps in one turn")
    parser.add_argument("--ranks", type=int, default=2, help="CPU ranks; a GPU is used by one process")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--strategies", default="ddp,fsdp", help="for CPU ranks")
    parser.add_argument("--control", action="store_true", help="run the hand-written loop twice, to see the noise")
    parser.add_argument("--deepspeed", action="store_true", help="also DeepSpeed, by itself and as our engine")
    parser.add_argument("--json", metavar="FILE", help="write all results there")
    return parser.parse_args()


def run_ranks(options: argparse.Namespace) -> dict[str, Any]:
    """Each strategy in processes of its own: Accelerate keeps one state per process."""
    document = describe_run(options, CPU_SHAPE, CPU_SAMPLES_PER_RANK * options.ranks, "fp32")
    for strategy in options.strategies.split(","):
        with tempfile.TemporaryDirectory() as folder:
            result = Path(folder) / "result.json"
            arguments = (strategy, free_port(), str(result), options)
            torch.multiprocessing.spawn(one_rank, args=arguments, nprocs=options.ranks)
            add_results(document, json.loads(result.read_text()))
    return document


def one_rank(rank: int, strategy: str, port: int, result: str, options: argparse.Namespace) -> None:
    pose_as_torchrun(rank, options.ranks, port)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    workload = Workload(
        strategy=strategy,
        shape=CPU_SHAPE,
        global_batch=CPU_SAMPLES_PER_RANK * options.ranks,
        device=torch.device("cpu"),
        rank=rank,
        ranks=options.ranks,
    )
    results = measure(workload, options, quiet=rank > 0)
    if rank == 0:
        Path(result).write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


def run_cuda(options: argparse.Namespace) -> dict[str, Any]:
    if not torch.cuda.is_available():
        sys.exit("--device cuda was given, but PyTorch finds no GPU here; use --device cpu.")
    document = describe_run(options, CUDA_SHAPE, CUDA_SAMPLES, "bf16")
    workload = Workload(
        strategy="single",
        shape=CUDA_SHAPE,
        global_batch=CUDA_SAMPLES,
        device=torch.device("cuda", 0),
        bf16=True,
        compile=True,
    )
    add_results(document, measure(workload, options, quiet=False))
    if dist.is_initialized():  # Meshwright makes a world even of one process
        dist.destroy_process_group()
    return document


def add_results(document: dict[str, Any], results: dict[str, Any]) -> None:
    document["results"] += results["results"]
    document["failures"] += results["failures"]


def pose_as_torchrun(rank: int, ranks: int, port: int) -> None:
    """What the peers look for to learn that they are ranks already and need not start any."""
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "GROUP_RANK": "0",
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": "overhead",
        "OMP_NUM_THREADS": "1",
    }


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def measure(workload: Workload, options: argparse.Namespace, *, quiet: bool) -> dict[str, Any]:
    """Build all variants, let them take turns, and judge what came out. The same on every rank."""

    def say(text: str) -> None:
        if not quiet:
            print(f"{workload.strategy}: {text}", file=sys.stderr, flush=True)

    kinds = [*VARIANTS, *ON_DEEPSPEED * options.deepspeed, *[HandWrittenAgain] * options.control]
    turns, refused = build_variants(workload, kinds, say)
    for turn in turns:
        say(f"warming {turn.variant.name} up")
        take_turn(turn, workload, WARMUP_STEPS)
        turn.rounds.clear()
    for number in range(options.rounds):
        first = number % len(turns)
        for turn in turns[first:] + turns[:first]:
            take_turn(turn, workload, options.steps)
        latest = ", ".join(f"{turn.variant.name} {median(turn.rounds[-1]) * 1e3:.1f} ms" for turn in turns)
        say(f"round {number + 1}/{options.rounds}: {latest}")
    results = [summarise(turn, turns[0], workload) for turn in turns]
    failures = find_failures(turns, results, workload)
    return {"results": results + refused, "failures": failures}


def build_variants(
    workload: Workload, kinds: list[type[Variant]], say: Callable[[str], None]
) -> tuple[list[Turn], list[dict[str, Any]]]:
    """Those that run, and the reasons of those that do not."""
    generator = torch.Generator().manual_seed(1)
    batches = [make_up_batch(workload.shape, workload.global_batch, generator) for _ in range(BATCHES)]
    placed = [{name: tensor.to(workload.device) for name, tensor in batch.items()} for batch in batches]
    turns, refused = [], []
    for kind in kinds:
        say(f"building {kind.name}")
        try:
            variant = kind(workload)
            variant.require_strategy()
        except (CannotRun, ImportError) as error:
            reason = str(error) if isinstance(error, CannotRun) else f"not installed: {error}"
            refused.append({"strategy": workload.strategy, "variant": kind.name, "reason": reason})
            say(f"{kind.name} cannot run: {reason}")
            continue
        turns.append(Turn(variant, cycle([variant.takes(batch) for batch in placed])))
    if workload.device.type == "cpu":
        torch.set_num_threads(1)  # a peer may have set it
    return turns, refused


def take_turn(turn: Turn, workload: Workload, steps: int) -> None:
    timed = time_on_gpu if workload.device.type == "cuda" else time_on_cpu
    turn.rounds.append(timed(turn, steps))


def time_on_cpu(turn: Turn, steps: int) -> list[float]:
    if dist.is_initialized():
        dist.barrier()
    seconds = []
    for _ in range(steps):
        start = time.perf_counter()
        turn.losses.append(turn.variant.step(next(turn.batches)))
        seconds.append(time.perf_counter() - start)
    return seconds


def time_on_gpu(turn: Turn, steps: int) -> list[float]:
    """One number a turn: waiting after every step would hide how far the host runs ahead of the device."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    for _ in range(steps):
        turn.losses.append(turn.variant.step(next(turn.batches)))
    end.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) / 1e3 / steps]


def summarise(turn: Turn, reference: Turn, workload: Workload) -> dict[str, Any]:
    own, other = slowest_rank(turn, workload), slowest_rank(reference, workload)
    ratios = [median(a) / median(b) for a, b in zip(own, other, strict=True)]
    low, _, high = quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
    losses = mean_losses(turn, workload)
    return {
        "strategy": workload.strategy,
        "variant": turn.variant.name,
        "step_ms": median(step for steps in own for step in steps) * 1e3,
        "ratio": median(ratios),
        "ratio_quartiles": [low, high],
        "first_loss": losses[0],
        "last_loss": losses[-1],
        "first_losses": losses[:BATCHES],
        "round_ms": [median(steps) * 1e3 for steps in own],
    }


def slowest_rank(turn: Turn, workload: Workload) -> list[list[float]]:
    """A step takes as long as it takes its slowest rank."""
    seconds = torch.tensor(turn.rounds, dtype=torch.float64)
    if workload.ranks > 1:
        dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return seconds.tolist()


def mean_losses(turn: Turn, workload: Workload) -> list[float]:
    losses = torch.stack(turn.losses).double().cpu()
    if workload.ranks > 1 and not turn.variant.sees_global_loss:
        dist.all_reduce(losses)
        losses /= workload.ranks
    return losses.tolist()


def find_failures(turns: list[Turn], results: list[dict[str, Any]], workload: Workload) -> list[str]:
    """Why these numbers are not those of training, if they are not."""
    found = []
    expected = results[0]["first_losses"]
    bound = AGREEMENT["bf16" if workload.bf16 else "fp32"]
    built = {type(turn.variant) for turn in turns}
    needed = (Meshwright,) if workload.strategy in ("zero1", "zero2") else (HandWritten, Meshwright)
    for kind in needed:
        if kind not in built:
            found.append(f"{workload.strategy}: {kind.name} did not run")
    for turn, result in zip(turns, results, strict=True):
        where, last = f"{workload.strategy}, {turn.variant.name}", result["last_loss"]
        for step, (own, wanted) in enumerate(zip(result["first_losses"], expected, strict=True), 1):
            if not abs(own - wanted) <= bound:
                found.append(f"{where}: loss {own:.5f} in step {step}, where the hand-written loop has {wanted:.5f}")
                break
        if not last < result["first_loss"]:
            found.append(f"{where}: the loss did not fall ({result['first_loss']:.5f} to {last:.5f})")
        if workload.strategy == "ddp" and not same_on_all_ranks(turn.variant, workload):
            found.append(f"{where}: parameters are not the same on all ranks")
    return found


def same_on_all_ranks(variant: Variant, workload: Workload) -> bool:
    sums = torch.stack([tensor.double().sum() for tensor in variant.tensors()])
    gathered = [torch.empty_like(sums) for _ in range(workload.ranks)]
    dist.all_gather(gathered, sums)
    return all(torch.equal(gathered[0], other) for other in gathered)


def describe_run(options: argparse.Namespace, shape: Shape, global_batch: int, precision: str) -> dict[str, Any]:
    with torch.device("meta"):
        parameters = sum(p.numel() for p in GPT(shape).parameters())
    on_gpu = options.device == "cuda"
    return {
        "device": torch.cuda.get_device_name() if on_gpu else f"{platform.machine()} CPU, {os.cpu_count()} cores",
        "ranks": 1 if on_gpu else options.ranks,
        "precision": precision,
        "compile": on_gpu,
        "model": {**asdict(shape), "parameters": parameters},
        "global_batch": global_batch,
        "rounds": options.rounds,
        "steps": options.steps,
        "versions": {name: installed(name) for name in ("torch", "accelerate", "lightning", "deepspeed")},
        "agreement": AGREEMENT[precision],
        "processes": "all variants share the same processes and take turns in them",
        "results": [],
        "failures": [],
    }


def installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def show(document: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    model = document["model"]
    title = (
        f"{model['parameters'] / 1e6:.1f}M GPT, {document['precision']}{', compile' * document['compile']}, "
        f"{document['global_batch']} x {model['length']} tokens, {document['ranks']} rank(s), {document['device']}"
    )
    console = Console(width=None if sys.stdout.isatty() else 110)
    table = Table(title=title, title_justify="left")
    for column in ("strategy", "variant"):
        table.add_column(column, no_wrap=True)
    for column in ("step", "ratio", "quartiles", "last loss"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in document["results"]:
        table.add_row(
            row["strategy"], row["variant"], *(["cannot run", "", "", ""] if "reason" in row else numbers(row))
        )
    console.print(table)
    console.print(f"{document['rounds']} rounds of {document['steps']} steps; medians; {document['processes']}")
    for row in document["results"]:
        if "reason" in row:
            console.print(f"{row['strategy']}, {row['variant']}: {row['reason']}", highlight=False)


def numbers(row: dict[str, Any]) -> list[str]:
    low, high = row["ratio_quartiles"]
    return [f"{row['step_ms']:.1f} ms", f"{row['ratio']:.3f}", f"{low:.3f} - {high:.3f}", f"{row['last_loss']:.5f}"]


if __name__ == "__main__":
    sys.exit(main())
