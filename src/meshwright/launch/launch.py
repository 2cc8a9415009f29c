"""Start the ranks of this machine, restart them when one fails, and return results or raise the first failure."""

from __future__ import annotations

import logging
import os
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

from meshwright.deferred_warnings import show_written
from meshwright.environment import FOLDER, LOOPBACK, environment_for_ranks, environment_without_ranks
from meshwright.errors import BadInput
from meshwright.launch.agent import UNUSED, Agent, Agree, Interrupts
from meshwright.launch.attempt import RankOptions
from meshwright.launch.hangs import HangWatch
from meshwright.launch.janitor import cleaned_up_after
from meshwright.launch.node_options import NodeOptions
from meshwright.launch.preemption import GRACE
from meshwright.torch_private.elastic import SignalException

WORKER = "meshwright.commands.worker"
ENDING = ("SIGINT", "SIGHUP", "SIGQUIT")
"""Signals that end the launcher and its ranks at once."""
SILENT = ("torch.distributed.elastic", "torch.distributed.elastic.agent.server.api")
"""Torch's loggers, silenced because we report failures ourselves."""


def launch(
    task: Any,
    ranks: int,
    *,
    results: list[Any],
    max_restarts: int = 0,
    grace: float | None = None,
    worker: str = WORKER,
    patience: float = 0.0,
    hang_ends: bool = False,
    nodes: NodeOptions | None = None,
    adapt: Callable[[int, Agree], Any] | None = None,
) -> None:
    """Run a worker module's `main()` once per rank and wait. `results` gets what rank 0 reports, also on failure.

    If a rank crashes or is killed, all ranks restart, at most `max_restarts` times; after a user's mistake they do not.
    The first failure of the last attempt is raised. With `grace`, SIGTERM and SIGUSR1 ask the ranks to save and end
    within that many seconds; without it, SIGTERM ends them at once. With `patience`, a rank that is silent for that
    many seconds beyond its longest step counts as failed; with `hang_ends`, that ends the run. Ranks end with this
    process, whatever ends it.

    With `nodes`, launchers on several machines do this together: a failure on one restarts the ranks of all, and a node
    that is lost is waited for, or done without. `adapt` makes the task for a number of ranks, with a function
    through which all nodes take what node 0 makes; without it, the task is the same for any number.
    """
    with ExitStack() as outside, tempfile.TemporaryDirectory(prefix="meshwright-") as folder:
        # Exited last, after the folder is removed.
        outside.enter_context(cleaned_up_after(Path(folder), FOLDER, environment_without_ranks()))
        for logger in SILENT:
            logging.getLogger(logger).setLevel(logging.CRITICAL)
        options = RankOptions(launcher=os.getpid(), grace=grace, patience=patience)
        interrupts = Interrupts(ENDING if grace else (*ENDING, "SIGTERM"))
        agent = Agent(
            (sys.executable, "-u", "-m", "meshwright.launch.rank", worker),
            ranks,
            Path(folder),
            interrupts=interrupts,
            max_restarts=max_restarts,
            grace=grace or GRACE,
            watch=HangWatch(patience) if patience else None,
            hang_ends=hang_ends,
            nodes=nodes,
            adapt=None if adapt is None else lambda attempt, *world: attempt.hand_out(options, adapt(*world)),
        )
        agent.attempt.hand_out(options, task)
        try:
            with (
                environment_for_ranks(
                    ranks, folder, ending=(UNUSED,), interface=nodes.interface if nodes else LOOPBACK
                ),
                interrupts,
                agent.forwarding if grace else nullcontext(),
            ):
                agent.run()
                agent.close()
        except BadInput:  # found before the ranks of an attempt started
            agent.close()
            raise
        except SignalException as signalled:
            raise KeyboardInterrupt(signalled.sigval.name) from None
        finally:
            results += agent.attempt.results()
            for rank in range(ranks):
                show_written(agent.attempt.warnings(rank))
        if agent.failure is not None:
            raise agent.failure.error(agent.attempt.number)
