"""How long saving and loading take, beside raw `torch.distributed.checkpoint` and raw `torch.save` of the full state.

    python benchmarks/checkpoint.py --json docs/data/checkpoint.json

A GPT with about 1 GB of parameters and Adam state, sharded by FSDP2 over two CPU ranks. All variants save the same
tensors of the same run into folders of one disk and flush them (`fsync`), and load them back; they take turns, in an
order that rotates, so that whatever else the machine does falls on all alike. Ratios are medians over rounds. What was
loaded is compared with what was saved, once for each variant. Memory is the peak of anonymous memory of a rank over
what it had before, looked at every two milliseconds.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from gpt_model import GPT, Shape, make_up_batch
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.nn import functional as F
from torch.optim import AdamW

from meshwright import Job
from meshwright.assemble.world import World, join
from meshwright.checkpoint.save import Saver, save_at
from meshwright.describe.model import describe
from meshwright.runtime.run import Run, setup

SHAPES = {
    "1GB": Shape(layers=12, width=736, heads=8, length=32, vocabulary=4096),
    "tiny": Shape(layers=2, width=64, heads=8, length=32, vocabulary=256),
}
RANKS = 2


def job_of(shape: Shape) -> Job:
    def loss(logits: torch.Tensor, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
        y = batch["y"]
        return F.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="sum"), y.numel()

    return Job(
        model=lambda: GPT(shape),
        inputs=lambda batch: (batch["x"],),
        loss=loss,
        optimizer=lambda params: AdamW(params, lr=1e-4),
        sample=lambda n: make_up_batch(shape, n, torch.Generator().manual_seed(0)),
        global_batch=RANKS,
    )


class Meshwright:
    name = "Meshwright"

    def __init__(self, run: Run) -> None:
        self.run = run

    def save(self, path: Path) -> None:
        save_at(self.run.saver, 0, path)

    def load(self, path: Path) -> None:
        self.run.load(path)


class RawDcp:
    """Model and optimizer through PyTorch's own state dicts and file storage."""

    name = "raw DCP"

    def __init__(self, run: Run) -> None:
        self.model, self.optimizer = run.trainer.engine.model, run.trainer.optimizer

    def save(self, path: Path) -> None:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        dcp.save({"model": model, "optimizer": optimizer}, storage_writer=dcp.FileSystemWriter(path))

    def load(self, path: Path) -> None:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        state = {"model": model, "optimizer": optimizer}
        dcp.load(state, storage_reader=dcp.FileSystemReader(path))
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


class RawTorch:
    """All of it gathered on rank 0, which writes one file; every rank maps it and takes its part."""

    name = "raw torch.save"
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)

    def __init__(self, run: Run) -> None:
        self.model, self.optimizer = run.trainer.engine.model, run.trainer.optimizer

    def save(self, path: Path) -> None:
        model, optimizer = get_state_dict(self.model, self.optimizer, options=self.options)
        if dist.get_rank() == 0:
            path.mkdir()
            with (path / "state.pt").open("wb") as file:
                torch.save({"model": model, "optimizer": optimizer}, file)
                file.flush()
                os.fsync(file.fileno())
        dist.barrier()

    def load(self, path: Path) -> None:
        state = torch.load(path / "state.pt", weights_only=True, mmap=True)
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
            options=self.options,
        )


class Background:
    """Our save in the background: how long the caller stands still, and how long it takes in all."""

    def __init__(self, run: Run) -> None:
        self.saver = Saver(run.trainer)

    def save(self, path: Path) -> tuple[float, float]:
        begun = time.perf_counter()
        self.saver.save(0, path.with_name(f".{path.name}"), lambda folder: folder.rename(path), background=True)
        stalled = time.perf_counter() - begun
        self.saver.wait()
        return stalled, time.perf_counter() - begun


def anonymous_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("RssAnon")).split()[1]) * 1024


@contextmanager
def watching(peaks: list[int]) -> Iterator[None]:
    """Adds the peak over what there was before."""
    before, peak, done = anonymous_bytes(), 0, threading.Event()

    def look() -> None:
        nonlocal peak
        while not done.wait(0.002):
            peak = max(peak, anonymous_bytes())

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        peaks.append(max(0, peak - before))


def timed(action: Callable[[], Any]) -> float:
    dist.barrier()
    begun = time.perf_counter()
    action()
    dist.barrier()
    return time.perf_counter() - begun


def local_state(run: Run) -> list[torch.Tensor]:
    tensors = [p.to_local().clone() for p in run.trainer.optimized]  # type: ignore[attr-defined]
    for parameter in run.trainer.optimized:
        state = run.trainer.optimizer.state[parameter]
        tensors += [state[key].to_local().clone() for key in ("exp_avg", "exp_avg_sq")]
    return tensors


def spoil(run: Run) -> None:
    """So that a load which does nothing is found out."""
    with torch.no_grad():
        for parameter in run.trainer.optimized:
            parameter.to_local().add_(1.0)  # type: ignore[attr-defined]
            for key in ("exp_avg", "exp_avg_sq"):
                run.trainer.optimizer.state[parameter][key].to_local().add_(1.0)


def one_rank(rank: int, folder: str, options: argparse.Namespace) -> None:
    torch.set_num_threads(1)

    world = join(
        rank=rank,
        ranks=RANKS,
        local_rank=rank,
        local_ranks=RANKS,
        device=torch.device("cpu"),
        store=dist.FileStore(f"{folder}/store", RANKS),
    )
    job = job_of(SHAPES[options.size])
    run = setup(job, "fsdp", facts=describe(job), world=world)
    run.step(job.sample(RANKS))
    found = measure(world, run, Path(folder), options)
    if world.is_main:
        (Path(folder) / "found.json").write_text(json.dumps(found))
    run.close()


def measure(world: World, run: Run, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    variants = [Meshwright(run), RawDcp(run), RawTorch(run)]
    background = Background(run)
    expected = local_state(run)
    found: dict[str, Any] = {"bytes": sum(world.gather(sum(t.nbytes for t in expected)))}
    rows: dict[str, dict[str, list[float]]] = {v.name: {"save": [], "load": [], "save_memory": []} for v in variants}
    rows["Meshwright"] |= {"stall": [], "background": [], "background_memory": []}
    for number in range(-1, options.rounds):  # the first one warms up: memory is made, groups meet
        order = variants[number % 3 :] + variants[: number % 3]
        for variant in order:
            row, path, peaks = rows[variant.name], folder / f"{variant.name}-{number}".replace(" ", "-"), []
            with watching(peaks):
                seconds = timed(lambda v=variant, p=path: v.save(p))  # type: ignore[misc]
            spoil(run)
            loading = timed(lambda v=variant, p=path: v.load(p))  # type: ignore[misc]
            same = all(torch.equal(a, b) for a, b in zip(local_state(run), expected, strict=True))
            if not all(world.gather(same)):
                raise SystemExit(f"{variant.name} did not bring back what it saved")
            if number >= 0:
                row["save"].append(seconds)
                row["load"].append(loading)
                row["save_memory"].append(max(world.gather(peaks[0])))
        peaks = []
        dist.barrier()
        with watching(peaks):
            stalled, whole = background.save(folder / f"background-{number}")
        stalls, wholes = world.gather(stalled), world.gather(whole)
        if number >= 0:
            rows["Meshwright"]["stall"].append(max(stalls))
            rows["Meshwright"]["background"].append(max(wholes))
        memory = max(world.gather(peaks[0]))
        rows["Meshwright"]["background_memory"].append(memory)
        dist.barrier()
        if world.is_main:
            if number >= 0:
                said = ", ".join(
                    f"{v.name} {rows[v.name]['save'][-1]:.2f}/{rows[v.name]['load'][-1]:.2f} s" for v in variants
                )
                print(f"round {number + 1}/{options.rounds}: {said}, stall {max(stalls):.2f} s", file=sys.stderr)
            for path in folder.iterdir():
                if path.is_dir():
                    shutil.rmtree(path)
        dist.barrier()
    found["rows"] = rows
    return found


def ratios(rows: dict[str, dict[str, list[float]]]) -> dict[str, float]:
    """Medians over rounds of what was measured in the same round."""
    own = rows["Meshwright"]

    def against(other: str, what: str) -> float:
        return median(a / b for a, b in zip(own[what], rows[other][what], strict=True))

    return {
        "save_over_dcp": against("raw DCP", "save"),
        "load_over_dcp": against("raw DCP", "load"),
        "save_over_torch": against("raw torch.save", "save"),
        "load_over_torch": against("raw torch.save", "load"),
        "stall_over_save": median(a / b for a, b in zip(own["stall"], own["save"], strict=True)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--size", choices=SHAPES, default="1GB")
    parser.add_argument("--folder", help="where to write; a temporary one if not given")
    parser.add_argument("--json")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="checkpoint-benchmark-") as folder:
        torch.multiprocessing.spawn(one_rank, args=(folder, options), nprocs=RANKS)
        found = json.loads((Path(folder) / "found.json").read_text())
    found["ratios"] = ratios(found["rows"])
    found["machine"] = {"torch": torch.__version__, "python": platform.python_version(), "cores": os.cpu_count()}
    print(f"state: {found['bytes'] / 1e9:.2f} GB on {RANKS} ranks; medians of {options.rounds} rounds")
    for name, row in found["rows"].items():
        memory = max(row["save_memory"]) / 2**20
        print(
            f"{name:15} save {median(row['save']):6.2f} s  load {median(row['load']):6.2f} s  +{memory:5.0f} MiB a rank"
        )
    own = found["rows"]["Meshwright"]
    print(
        f"{'in background':15} stall {median(own['stall']):5.2f} s of {median(own['background']):.2f} s  "
        f"+{max(own['background_memory']) / 2**20:.0f} MiB a rank"
    )
    for name, value in found["ratios"].items():
        print(f"{name:18} {value:.3f}")
    if options.json:
        Path(options.json).write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
