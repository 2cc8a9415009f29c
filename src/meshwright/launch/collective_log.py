"""A rank's thread that writes down its last collectives when the launcher asks. Imports torch only if the rank did."""

from __future__ import annotations

import json
import sys
import threading
import time

from meshwright.launch.attempt import Attempt

LAST = 50
"""Collectives that are told."""
_LOOK_EVERY_S = 0.5


def answer_when_asked(attempt: Attempt, rank: int) -> None:
    """Start the thread; it lives as long as the process. It answers while the main thread waits in a collective."""
    threading.Thread(target=_answer, args=(attempt, rank), name="collectives", daemon=True).start()


def _answer(attempt: Attempt, rank: int) -> None:
    answered = 0
    while True:
        time.sleep(_LOOK_EVERY_S)
        asked = attempt.times_asked()
        if asked > answered:
            answered = asked
            attempt.tell_collectives(rank, json.dumps(_collectives()), asked)


def _collectives() -> list[object]:
    if "torch.distributed" not in sys.modules:
        return []
    from meshwright.torch_private.flight_recorder import recorded_collectives

    return [*recorded_collectives()[-LAST:]]
