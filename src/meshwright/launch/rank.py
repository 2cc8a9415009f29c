"""Where a started rank begins: `python -m meshwright.launch.rank MODULE` runs `main()` of the module.

It listens for signals before it imports the module, because that loads torch and takes seconds.
"""

from __future__ import annotations

import faulthandler
import sys
from importlib import import_module

from meshwright.environment import own_rank
from meshwright.importing import importing
from meshwright.launch.attempt import Attempt, leave, own_attempt
from meshwright.launch.heartbeat import Heartbeat, dump_on_signal
from meshwright.launch.parent_death import end_with
from meshwright.launch.preemption import Preemption


def main() -> None:
    attempt = own_attempt()
    if attempt is None:
        raise SystemExit("meshwright.launch.rank is started by meshwright itself; use `meshwright train`.")
    orders = attempt.orders()
    end_with(orders.launcher)
    stacks = dump_on_signal(attempt.stack_file(own_rank()))
    faulthandler.enable()  # a crash in C leaves its Python stack on stderr
    if orders.patience:
        Heartbeat.own = Heartbeat(attempt.heartbeat(own_rank()))
    if orders.grace is not None:
        Preemption(grace=orders.grace).begin()
    with stacks:
        _work(sys.argv[1], attempt)


def _work(module: str, attempt: Attempt) -> None:
    """Do it and go; on failure leave last words for the launcher.

    All is written and closed by then. What Python and torch take down at their end takes long, and rarely fails: that
    would be a failed rank, and a restart of a run that has ended.
    """
    try:
        with importing():
            work = import_module(module)
        work.main()
        attempt.finish(own_rank())
    except BaseException as error:
        attempt.leave_words(own_rank(), error)
        leave(getattr(error, "exit_code", 1))
    leave(0)


if __name__ == "__main__":
    main()
