"""Real gloo ranks that live for the whole test run: starting four processes that import torch costs seconds.

All of them are forked from one process that has imported what most of them need, and has run nothing.
"""

from __future__ import annotations

import gc
import multiprocessing
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

LIMIT_SECONDS = 300  # for one call; a hang ends here instead of in CI's own limit
TO_END = 10
"""Seconds until a rank that was asked to end is killed."""
IMPORTED_ONCE = ["meshwright.verify.verify", "meshwright.runtime.run", "transformers.models.gpt2.modeling_gpt2"]
"""What is not installed is passed over."""
MOST_THREADS = 400
"""Every group of ranks has two, which sleep while it is not used."""


class RankPool:
    """`pool(function, *args)` runs `function(world, *args)` on every rank and returns what each gave.

    A function must be importable (a module-level one in tests/rank_programs.py). If a rank raises, the pool ends all
    of its ranks, because the others may wait for that one, and starts new ones for the next call.
    """

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []

    def __call__(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        if self._is_crowded():
            self.close()
        if not self._processes:
            self._start()
        for pipe in self._pipes:
            pipe.send((function, args))
        answers: dict[int, Any] = {}
        while len(answers) < self.ranks:
            waiting = [pipe for rank, pipe in enumerate(self._pipes) if rank not in answers]
            ready = wait(waiting, timeout=LIMIT_SECONDS)
            if not ready:
                self.close()
                raise SilentRanks(self.ranks, answers)
            for pipe in ready:
                rank = self._pipes.index(pipe)
                answers[rank] = self._receive(rank)
        return [answers[rank] for rank in range(self.ranks)]

    def _is_crowded(self) -> bool:
        tasks = [Path(f"/proc/{process.pid}/task") for process in self._processes]
        return any(task.is_dir() and len(list(task.iterdir())) > MOST_THREADS for task in tasks)

    def close(self) -> None:
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            process.join(TO_END)
            if process.is_alive():  # it hears no signal while it waits for another rank
                process.kill()
                process.join()
        self._processes, self._pipes = [], []

    def _receive(self, rank: int) -> Any:
        try:
            failed, value = self._pipes[rank].recv()
        except EOFError:
            self.close()
            raise RuntimeError(f"rank {rank} ended") from None
        if failed:
            self.close()
            raise RankError(rank, *value)
        return value

    def _start(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(IMPORTED_ONCE)
        self._folder = tempfile.TemporaryDirectory(prefix="meshwright-test-")
        meeting = Path(self._folder.name) / "store"
        for rank in range(self.ranks):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, self.ranks, str(meeting), theirs), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)


class SilentRanks(TimeoutError):
    """Ranks that did not answer in time, and what the others gave."""

    def __init__(self, ranks: int, answers: dict[int, Any]) -> None:
        super().__init__(f"ranks {sorted(set(range(ranks)) - set(answers))} did not answer")
        self.answers = answers


class RankError(Exception):
    """What a rank raised, with its kind's name and traceback."""

    def __init__(self, rank: int, kind: str, message: str, trace: str) -> None:
        super().__init__(f"rank {rank}: {kind}: {message}\n{trace}")
        self.kind, self.message = kind, message


def _serve(rank: int, ranks: int, meeting: str, pipe: Connection) -> None:
    import warnings

    import torch.distributed as dist

    from meshwright.assemble.world import join

    gc.freeze()  # what was imported before the fork is shared memory until a garbage collection touches it
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    _share_one_device()
    store = dist.FileStore(meeting, ranks)
    device = torch.device("cpu")
    world = join(rank=rank, ranks=ranks, local_rank=rank, local_ranks=ranks, device=device, store=store)
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((False, function(world, *args)))
        except Exception as error:
            pipe.send((True, (type(error).__name__, str(error), traceback.format_exc())))


def _share_one_device() -> None:
    """Give all groups of this process one gloo device: each device has a thread that wakes a hundred times a second."""
    from torch.distributed import distributed_c10d

    gloo = distributed_c10d.ProcessGroupGloo
    device = gloo.create_default_device()

    class OnOneDevice(gloo):  # type: ignore[misc, valid-type]
        def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
            options = gloo._Options()
            options._devices, options._timeout = [device], timeout
            super().__init__(store, rank, size, options)

    distributed_c10d.ProcessGroupGloo = OnOneDevice
