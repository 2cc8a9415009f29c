"""A worker that does as its task says, for tests of the launcher. Imports no torch, so its ranks start at once."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from meshwright.environment import own_rank
from meshwright.errors import NonFiniteLoss
from meshwright.launch.attempt import Attempt, own_attempt, report
from meshwright.launch.heartbeat import own_heartbeat
from meshwright.launch.preemption import Preemption

LIMIT_SECONDS = 120  # a rank that waits in vain ends here


def main() -> None:
    attempt = own_attempt()
    assert attempt is not None
    globals()[attempt.task()["does"]](attempt, own_rank())


def is_killed_once(attempt: Attempt, rank: int) -> None:
    """Rank 1 kills itself while rank 0 waits, in C as it were, for what never comes."""
    if attempt.number == 0:
        if rank == 1:
            wait_for((attempt.path / "waiting").exists)
            os.kill(os.getpid(), signal.SIGKILL)
        (attempt.path / "waiting").touch()
        wait_for_the_end()
    report(attempt.number)


def rank_three_is_killed_once(attempt: Attempt, rank: int) -> None:
    """On the second of two nodes; the others report the attempt and the ranks of all nodes."""
    if attempt.number == 0:
        if rank == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        wait_for_the_end()
    report([attempt.number, int(os.environ["WORLD_SIZE"])])


def rank_three_loses_its_loss(attempt: Attempt, rank: int) -> None:
    if rank == 3:
        raise NonFiniteLoss("The loss became nan.")
    wait_for_the_end()


def waits_unless_alone(attempt: Attempt, rank: int) -> None:
    """As long as there is a second node."""
    if int(os.environ["WORLD_SIZE"]) > 2:
        print("waiting", file=sys.stderr, flush=True)
        wait_for_the_end()
    report([attempt.number, int(os.environ["WORLD_SIZE"])])


def leaves_a_child(attempt: Attempt, rank: int) -> None:
    """As a rank with data-loading processes that is killed."""
    if rank == 1:
        child = multiprocessing.get_context("fork").Process(target=wait_for_the_end)
        child.start()
        Path(attempt.task()["seen"]).write_text(str(child.pid))
        os.kill(os.getpid(), signal.SIGKILL)
    wait_for_the_end()


def starts_a_child(attempt: Attempt, rank: int) -> None:
    """As a rank with data-loading processes, that waits."""
    child = multiprocessing.get_context("fork").Process(target=wait_for_the_end)
    child.start()
    part = Path(attempt.task()["seen"]) / f"part-{rank}"
    part.write_text(f"{os.getpid()} {child.pid}")
    part.rename(part.with_name(f"pids-{rank}"))
    wait_for_the_end()


def raises(attempt: Attempt, rank: int) -> None:
    if rank == 1:
        raise ValueError(f"bad sample in attempt {attempt.number}")
    wait_for_the_end()


def loses_its_loss(attempt: Attempt, rank: int) -> None:
    if rank == 1:
        raise NonFiniteLoss("The loss became nan.")
    wait_for_the_end()


def meets_on_gloo(attempt: Attempt, rank: int) -> None:
    """Rank 0 connects in the second attempt while rank 1 is late."""
    import torch
    import torch.distributed as dist

    seen = Path(attempt.task()["seen"])
    if attempt.number == 1 and rank == 0:
        seen.touch()
    if attempt.number == 1 and rank == 1:
        wait_for(seen.exists)
    dist.init_process_group("gloo")
    total = torch.ones(1)
    dist.all_reduce(total)
    if attempt.number == 0 and rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()
    report([attempt.number, total.item()])


def is_asked(attempt: Attempt, rank: int) -> None:
    """Rank 0 signals the launcher, as a scheduler would, and again; both stop when they hear of it."""
    with Preemption() as preemption:
        if rank == 0:
            wait_for(lambda: len(attempt.listeners()) == 2)
            for _ in range(2):
                os.kill(os.getppid(), signal.Signals[attempt.task()["signal"]])
        wait_for(lambda: preemption.asked is not None)
        report(preemption.asked)


def does_not_end(attempt: Attempt, rank: int) -> None:
    if rank == 0:
        os.kill(os.getppid(), signal.SIGTERM)
    wait_for_the_end()


def is_stuck(attempt: Attempt, rank: int) -> None:
    """Not even a thread of it runs."""
    if rank == 0:
        os.kill(os.getppid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGSTOP)


def is_interrupted(attempt: Attempt, rank: int) -> None:
    if rank == 0:
        os.kill(os.getppid(), signal.SIGINT)
    wait_for_the_end()


def waits(attempt: Attempt, rank: int) -> None:
    wait_for_the_end()


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_SECONDS
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError("what was waited for did not come")
        time.sleep(0.01)


def wait_for_the_end() -> None:
    threading.Event().wait(LIMIT_SECONDS)
    raise TimeoutError("nobody ended this rank")


def leaves_with_a_code(attempt: Attempt, rank: int) -> None:
    """Rank 1 goes without a word, and rank 0 complains of it before anybody looks."""
    if rank == 1:
        os._exit(int(attempt.task()["code"]))
    wait_for(lambda: not _is_running(attempt.pids().get(1)))
    raise ConnectionError("Connection closed by peer")


def hangs(attempt: Attempt, rank: int) -> None:
    """Rank 1 stays in what might be a forward pass, or stops; rank 0 waits for it as in a collective."""
    own_heartbeat().step(1)
    if rank == 1 and attempt.task()["how"] == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif rank == 1:
        forward_that_hangs(attempt.task()["how"])
    exec(compile("wait()", "/x/torch/distributed/collectives.py", "exec"), {"wait": wait_for_the_end})


def forward_that_hangs(how: str) -> None:
    while how == "busy":
        pass
    wait_for_the_end()


def _is_running(pid: int | None) -> bool:
    """Also a process that nobody has looked at yet is gone."""
    try:
        return pid is None or "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:1]
    except OSError:
        return False
