"""Run a rehearsal in a separate process, so that errors, hangs and leaks stay there, and end it at a time limit."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from meshwright.errors import BadInput, one_line
from meshwright.facts.rehearsal import FAILED, KILLED, REFUSED, TIMEOUT, Rehearsal
from meshwright.launch.attempt import exit_now
from meshwright.launch.parent_death import end_with
from meshwright.rehearse.task import RehearsalTask

Tell = Callable[[str], None]
PRELOADED = ("meshwright.rehearse.rank",)
"""Imported once, by the process from which those of all rehearsals are forked."""
PRELOADED_FOR = {"hf:": ("transformers.modeling_utils", "transformers.models.auto.modeling_auto")}
"""What jobs of a kind import besides, which takes seconds."""


def rehearse_apart(task: RehearsalTask, *, timeout: float, tell: Tell = lambda words: None) -> Rehearsal:
    """Rehearse in a new process. Raises only the user's interrupt; every other end is a result.

    `tell` is called with a few words when the rehearsal goes on to its next part.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(preloaded(task.job))
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_main, args=(task, there))
    started = time.perf_counter()
    process.start()
    there.close()
    try:
        found = _await(here, started + timeout, tell)
        if found is None:
            found = _end_of(process, timeout, is_late=time.perf_counter() >= started + timeout)
    finally:
        _end(process)
        here.close()
    return Rehearsal(**{**vars(found), "took": time.perf_counter() - started})


def preloaded(job: str) -> list[str]:
    """The modules that the first rehearsal of a job imports for all."""
    besides = (modules for start, modules in PRELOADED_FOR.items() if job.startswith(start))
    return [*PRELOADED, *(module for modules in besides for module in modules)]


def _await(answers: Connection, until: float, tell: Tell) -> Rehearsal | None:
    """The process's result; None if it ended without one, or not in time."""
    while answers.poll(max(0.0, until - time.perf_counter())):
        try:
            kind, value = answers.recv()
        except EOFError:
            return None
        if kind == "result":
            return Rehearsal.from_json(value)
        tell(value)
    return None


def _end_of(process: Any, timeout: float, *, is_late: bool) -> Rehearsal:
    """How a process ended that gave no result."""
    if is_late:
        return Rehearsal(status=TIMEOUT, reason=f"It had not ended after {timeout:g} s and was stopped.")
    process.join(10)
    code = process.exitcode
    if code is not None and code < 0:
        name = signal.Signals(-code).name
        hint = "; this machine may have run out of memory" if name == "SIGKILL" else ""
        return Rehearsal(status=KILLED, reason=f"Its process was ended by {name}{hint}.")
    return Rehearsal(status=FAILED, reason=f"Its process ended with exit code {code} and without a result.")


def _end(process: Any) -> None:
    """End the process and those that it started."""
    if process.is_alive():
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):  # it has no group of its own yet
            process.kill()
    process.join()


def _main(task: RehearsalTask, answers: Connection) -> None:
    """Entry point of the process."""
    os.setsid()
    end_with(os.getppid())
    os.dup2(2, 1)  # what a job prints must not be mixed with the result
    try:
        from meshwright.rehearse.rank import rehearse

        found = rehearse(task, lambda words: answers.send(("at", words)))
    except BadInput as error:
        found = Rehearsal(status=REFUSED, reason=str(error))
    except Exception as error:
        traceback.print_exc()
        found = Rehearsal(status=FAILED, reason=one_line(error))
    answers.send(("result", found.to_json()))
    answers.close()
    exit_now(0)
