"""Entry point of a rank: `python -m meshwright.launch.rank MODULE` runs `main()` of the module.

It handles signals before it imports the module, because importing torch takes seconds.
"""

from __future__ import annotations

import faulthandler
import sys
from importlib import import_module

from meshwright.deferred_warnings import write_warnings
from meshwright.environment import own_rank
from meshwright.importing import importing
from meshwright.launch.attempt import Attempt, exit_now, own_attempt
from meshwright.launch.collective_log import answer_when_asked
from meshwright.launch.heartbeat import Heartbeat, dump_on_signal
from meshwright.launch.parent_death import end_with
from meshwright.launch.preemption import Preemption


def main() -> None:
    attempt = own_attempt()
    if attempt is None:
        raise SystemExit("meshwright.launch.rank is started by meshwright itself; use `meshwright train`.")
    options = attempt.options()
    write_warnings(attempt.warnings(own_rank()))
    end_with(options.launcher)
    stacks = dump_on_signal(attempt.stack_file(own_rank()))
    faulthandler.enable()  # a crash in C leaves its Python stack on stderr
    if options.patience:
        Heartbeat.own = Heartbeat(attempt.heartbeat(own_rank()))
        answer_when_asked(attempt, own_rank())
    if options.grace is not None:
        Preemption(grace=options.grace).begin()
    with stacks:
        _work(sys.argv[1], attempt)


def _work(module: str, attempt: Attempt) -> None:
    """Run the worker and exit; on failure, report the error to the launcher.

    By then all files are written and closed, so the rank exits at once. The usual shutdown of Python and torch is slow,
    and if it failed, the launcher would restart a run that has ended.
    """
    try:
        with importing():
            worker = import_module(module)
        worker.main()
        attempt.finish(own_rank())
    except BaseException as error:
        attempt.report_error(own_rank(), error)
        exit_now(getattr(error, "exit_code", 1))
    exit_now(0)


if __name__ == "__main__":
    main()
