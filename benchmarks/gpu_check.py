"""Show on a machine with one GPU that the code which is tested on CPU ranks trains on CUDA too.

    PYTHONPATH=src python benchmarks/gpu_check.py --json gpu.json
    PYTHONPATH=src python benchmarks/gpu_check.py --device cpu --small      # the same paths, without a GPU

1. `single` in every precision and with every policy: the loss falls on real text, and in fp32 it is the CPU's.
2. `dp` on the one GPU taken twice: the gradients of one process.
3. As rank 0 of a fake world of eight, every data strategy: steps run; bytes of parameters, gradients and optimizer are
   those that the strategy accounts for; peak memory and the time of a step without communication.

A case that fails is a row with its error; the others go on. Exit 1 if one failed or was not run.
"""

from __future__ import annotations

import argparse
import gc
import json
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import cache, partial
from pathlib import Path
from statistics import mean
from typing import Any

import torch
import torch.distributed as dist
from gpt_model import Shape
from peers import meshwright_job
from torch.optim import AdamW

import meshwright as mw
from meshwright.assemble.check import check
from meshwright.assemble.step import Trainer
from meshwright.assemble.world import fake_world
from meshwright.describe.model import describe
from meshwright.describe.observe import call_loss, call_model
from meshwright.facts.model import ModelFacts
from meshwright.jobs.load import load_job
from meshwright.recording.blueprint import record
from meshwright.runtime.measure import held_states
from meshwright.runtime.place import place_of
from meshwright.strategies import DATA_STRATEGIES, data_strategy
from meshwright.strategies.engine import ApplyContext
from meshwright.verify.plain_training import seeded_batch

EXAMPLES = Path(__file__).parents[1] / "examples"
WORLD = 8
TOLERANCE = 0.05
"""How far held bytes may be from the account."""
LARGE = Shape(layers=24, width=1024, heads=16, length=1024, vocabulary=50304)  # 354M parameters
SMALL = Shape(layers=2, width=64, heads=4, length=64, vocabulary=512)
SAMPLES_PER_RANK = 4
SINGLES = ("fp32", "bf16", "fp16", "bf16,ac=full", "bf16,ac=selective", "bf16,compile", "bf16,offload=optimizer")
SHARDED = ("ddp", "zero1", "zero2", "fsdp", "fsdp:grad-op", "fsdp:no-shard", "hsdp=2x4")


@dataclass
class Row:
    """What one case came to."""

    case: str
    status: str = "failed"
    """ok, failed, skipped (it has no meaning here) or not run; `finding` says why."""
    seconds: float = 0.0
    step_ms: float | None = None
    peak_gib: float | None = None
    reserved_gib: float | None = None
    states: dict[str, dict[str, float]] = field(default_factory=dict)
    """Per cause: bytes held, bytes accounted for, and the ratio."""
    losses: list[float] = field(default_factory=list)
    finding: str = ""
    """What was seen, or the error."""
    trace: str = ""
    """Where an error came from."""


@dataclass(frozen=True)
class Case:
    name: str
    run: Callable[[Row], None]
    """Fills in the row; raises where something is not as it must be."""


class Wrong(Exception):
    """The code ran, but what it gave is not right."""


class Skipped(Exception):
    """The case has no meaning here."""


def main() -> int:
    options = parse_options()
    if options.device == "cuda" and not torch.cuda.is_available():
        sys.exit("PyTorch finds no GPU here; use --device cpu --small to try the script itself.")
    full_precision()
    device = torch.device(options.device, 0) if options.device == "cuda" else torch.device("cpu")
    start, rows = time.perf_counter(), []
    for case in cases(device, small=options.small):
        if options.only not in case.name:
            continue
        if time.perf_counter() - start > options.seconds:
            rows.append(Row(case=case.name, status="not run", finding=f"{options.seconds} s were over"))
        else:
            rows.append(run_case(case, device, options.case_seconds))
            print(show_row(rows[-1]), file=sys.stderr, flush=True)
        write(options.json, rows, device, time.perf_counter() - start)
    show(rows, device)
    return 0 if all(row.status in ("ok", "skipped") for row in rows) else 1


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--small", action="store_true", help="few cases of small models and few steps")
    parser.add_argument("--only", default="", metavar="TEXT", help="cases whose name holds this")
    parser.add_argument("--seconds", type=int, default=360, help="start no case after so long")
    parser.add_argument("--case-seconds", type=int, default=90, help="give a case up after so long")
    parser.add_argument("--json", metavar="FILE", help="write the rows there, after every case")
    return parser.parse_args()


def full_precision() -> None:
    """fp32 means fp32: no TF32, so that a GPU's losses can be a CPU's."""
    torch.set_float32_matmul_precision("highest")
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False


def cases(device: torch.device, *, small: bool) -> Iterator[Case]:
    gpt = load_example("gpt")
    for terms in ("fp32", "fp32,ac=selective") if small else SINGLES:  # bf16 takes minutes on many CPUs
        yield Case(f"gpt single,{terms}", partial(train_alone, gpt, f"single,{terms}", device, 12 if small else 30))
    yield Case("gpt single,fp32 as on CPU", partial(compare_with_cpu, gpt, device, 5))
    yield Case("gpt dp on one GPU twice", partial(compare_data_parallel, gpt, device))
    for name, job in fake_world_jobs(small):
        for text in fake_world_strategies(name, small):
            yield Case(f"{name} {text} as 1 of {WORLD}", partial(train_in_fake_world, job, text, device, small))


def fake_world_strategies(name: str, small: bool) -> list[str]:
    if small and name != "large-gpt":
        return ["ddp,fp32", "fsdp,fp32"]
    precisions = ("fp32",) if name in ("cnn", "resnet") else ("fp32", "bf16")
    return [f"{data},{precision}" for data in SHARDED for precision in precisions]


def fake_world_jobs(small: bool) -> Iterator[tuple[str, mw.Job]]:
    yield "gpt", load_example("gpt")
    yield "large-gpt", large_job(SMALL if small else LARGE, fused=not small)
    yield "cnn", load_example("cnn")
    yield "resnet", load_example("resnet")


@cache
def load_example(name: str) -> mw.Job:
    return load_job(str(EXAMPLES / f"{name}.py"))


def large_job(shape: Shape, *, fused: bool) -> mw.Job:
    return meshwright_job(shape, SAMPLES_PER_RANK * WORLD, partial(AdamW, lr=3e-4, fused=fused))


@cache
def facts_of(job: mw.Job) -> Any:
    return describe(job)


def run_case(case: Case, device: torch.device, limit: int) -> Row:
    """One case by itself: whatever it leaves behind is freed, whatever it raises is its row's finding."""
    row, start = Row(case=case.name), time.perf_counter()
    free(device)
    try:
        with time_limit(limit):
            case.run(row)
        row.status = "ok"
    except Skipped as reason:
        row.status, row.finding = "skipped", str(reason)
    except Exception as error:
        row.finding = f"{type(error).__name__}: {str(error).strip() or 'no message'}"
        row.trace = "" if isinstance(error, Wrong) else traceback.format_exc()
    if dist.is_initialized():
        dist.destroy_process_group()
    free(device)
    row.seconds = time.perf_counter() - start
    return row


def free(device: torch.device) -> None:
    torch._dynamo.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


@contextmanager
def time_limit(seconds: int) -> Iterator[None]:
    """A collective that waits for ranks which do not exist must not hold up the rest."""

    def give_up(number: int, frame: Any) -> None:
        raise TimeoutError(f"nothing came back in {seconds} s")

    signal.signal(signal.SIGALRM, give_up)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)


def train_alone(job: mw.Job, strategy: str, device: torch.device, steps: int, row: Row) -> None:
    row.losses = losses_of(job, strategy, device, steps, row)
    first, last = mean(row.losses[:3]), mean(row.losses[-3:])
    row.finding = f"loss {first:.3f} to {last:.3f} in {steps} steps"
    if not last < 0.95 * first:
        raise Wrong(f"the {row.finding}: it did not fall by 5 %")


def losses_of(job: mw.Job, strategy: str, device: torch.device, steps: int, row: Row | None = None) -> list[float]:
    """Train on the job's own data as a user would."""
    with mw.setup(job, strategy, device=device.type, facts=facts_of(job)) as run:
        results, ends = [], []
        for batch in run.batches(steps=steps):
            results.append(run.step(batch))
            wait(device)
            ends.append(time.perf_counter())
        if row is not None:
            row.step_ms = (ends[-1] - ends[steps // 2 - 1]) / (steps - steps // 2) * 1e3
            note_peak(row, device)
        return [result.loss for result in results]


def compare_with_cpu(job: mw.Job, device: torch.device, steps: int, row: Row) -> None:
    row.losses = losses_of(job, "single", device, steps)
    expected = losses_of(job, "single", torch.device("cpu"), steps)
    apart = max(abs(a - b) / abs(b) for a, b in zip(row.losses, expected, strict=True))
    row.finding = f"losses of {steps} steps are {apart:.1e} apart"
    if not apart <= 1e-4:
        raise Wrong(f"{row.finding}, more than 1e-4: {row.losses} where the CPU has {expected}")


def compare_data_parallel(job: mw.Job, device: torch.device, row: Row) -> None:
    """`nn.DataParallel` needs GPUs, but does not mind to get one twice."""
    if device.type != "cuda":
        raise Skipped("nn.DataParallel does nothing without a GPU")
    single, parallel = (gradients_of(job, kind, device) for kind in ("single", "dp"))
    # Some gradients are zero but for rounding (the bias of the keys), so each is measured against the largest of all.
    largest = max(float(gradient.abs().max()) for gradient in single.values())
    apart = {name: float((parallel[name] - gradient).abs().max()) / largest for name, gradient in single.items()}
    worst = max(apart, key=lambda name: apart[name])
    row.finding = f"gradients are {apart[worst]:.1e} of the largest apart, at most: {worst}"
    if not apart[worst] <= 1e-5:
        raise Wrong(row.finding)


def gradients_of(job: mw.Job, kind: str, device: torch.device) -> dict[str, torch.Tensor]:
    blueprint = record(job.model, seed=0)
    context = ApplyContext(
        strategy=mw.Strategy.parse("dp=2" if kind == "dp" else kind),
        facts=facts_of(job),
        device=device,
        mesh=None,
        fill=lambda: blueprint.fill(device),
        devices=(0, 0),
    )
    engine = DATA_STRATEGIES[kind].apply(blueprint.model, context)
    batch = {name: tensor.to(device) for name, tensor in seeded_batch(job, 0).items()}
    total, weight = call_loss(job, call_model(job, engine, batch), batch)
    (total / weight).backward()
    return {name: p.grad for name, p in engine.model.named_parameters() if p.grad is not None}


def train_in_fake_world(job: mw.Job, text: str, device: torch.device, small: bool, row: Row) -> None:
    """Real memory and real compute of rank 0, where collectives return at once: losses mean nothing here."""
    facts = facts_of(job)
    world = fake_world(WORLD, device)
    strategy = check(job, facts, mw.Strategy.parse(text), place_of(world))
    trainer = Trainer(job, facts, strategy, world, seed=0)
    batch = seeded_batch(job, 0)
    trainer.step(batch)  # the optimizer makes its state in the first step
    reset_peak(device)
    trainer.forward_backward(batch)
    held = held_states(trainer)
    trainer.update()
    row.step_ms = time_steps(trainer, batch, device, 2 if small else 5)
    note_peak(row, device)
    compare_states(row, held, accounted(facts, strategy))


def time_steps(trainer: Trainer, batch: Any, device: torch.device, steps: int) -> float:
    wait(device)
    start = time.perf_counter()
    for _ in range(steps):
        trainer.step(batch)
    wait(device)
    return (time.perf_counter() - start) / steps * 1e3


def accounted(facts: ModelFacts, strategy: mw.Strategy) -> dict[str, float]:
    """Bytes of a rank's states, of a model that was built in fp32."""
    layout = data_strategy(strategy).layout(strategy)
    elements = sum(parameter.count for parameter in facts.parameters)
    used = sum(parameter.count for parameter in facts.trainable if parameter.used)
    update = used * (layout.update_bytes or 4)
    masters = 4 * elements if layout.masters else 0
    return {
        "parameters": elements * (layout.parameter_bytes or 4) / layout.parameters,
        "gradients": update / layout.gradients,
        "optimizer": (update * facts.optimizer_slots + masters) / layout.optimizer,
    }


def compare_states(row: Row, held: mw.Forecast, account: dict[str, float]) -> None:
    for cause, bytes_held in held.memory.items():
        expected = account[cause]
        ratio = bytes_held / expected if expected else float(bytes_held == 0)
        row.states[cause] = {"held": bytes_held, "account": expected, "ratio": ratio}
    wrong = {cause: state["ratio"] for cause, state in row.states.items() if abs(state["ratio"] - 1) > TOLERANCE}
    if wrong:
        raise Wrong("held / accounted: " + ", ".join(f"{cause} {ratio:.3f}" for cause, ratio in wrong.items()))


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def reset_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()


def note_peak(row: Row, device: torch.device) -> None:
    if device.type == "cuda":
        row.peak_gib = torch.cuda.max_memory_allocated() / 2**30
        row.reserved_gib = torch.cuda.max_memory_reserved() / 2**30


def write(path: str | None, rows: list[Row], device: torch.device, seconds: float) -> None:
    if path:
        document = {
            "device": device_name(device),
            "torch": torch.__version__,
            "seconds": seconds,
            "rows": [asdict(row) for row in rows],
        }
        Path(path).write_text(json.dumps(document, indent=1) + "\n")


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name() if device.type == "cuda" else "CPU"


def cells(row: Row) -> list[str]:
    numbers = [(row.step_ms, ".2f"), (row.peak_gib, ".3f"), (row.reserved_gib, ".3f")]
    states = [row.states.get(cause, {}).get("ratio") for cause in ("parameters", "gradients", "optimizer")]
    return ["" if n is None else format(n, form) for n, form in [*numbers, *((state, ".3f") for state in states)]]


def show_row(row: Row) -> str:
    numbers = " ".join(cell for cell in cells(row) if cell)
    return f"{row.status:7} {row.case}: {numbers} {row.finding} ({row.seconds:.1f} s)"


def show(rows: list[Row], device: torch.device) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{device_name(device)}, torch {torch.__version__}", title_justify="left")
    table.add_column("case", no_wrap=True)
    table.add_column("", no_wrap=True)
    for column in ("step ms", "peak GiB", "reserved", "parameters", "gradients", "optimizer"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(row.case, row.status, *cells(row))
    console = Console(width=140)
    console.print(table)
    console.print("parameters, gradients, optimizer: bytes held / bytes accounted for")
    for row in rows:
        if row.finding:
            console.print(f"{row.case}: {row.finding}", markup=False, highlight=False)


if __name__ == "__main__":
    sys.exit(main())
