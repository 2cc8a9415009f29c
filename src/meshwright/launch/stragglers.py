"""Find a rank that is slower than the others, although all take their steps together.

A fast rank waits for a slow one. So each rank measures how long it waits: a thread looks at its main thread twenty
times a second, and counts the looks at which it sleeps inside a collective or a backward pass. The rest of a step is
the rank's own time. Waiting for data-loading processes does not count either: they read ahead, so if those of two ranks
are almost equally fast, one rank waits for its loader in every step and the other one never does.

A GPU works on while its host waits for it, so this says nothing about ranks on GPUs; there the thread is not started.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from statistics import median

from meshwright.launch.heartbeat import Beat, Heartbeat
from meshwright.launch.stacks import waits_for_loaders, waits_for_peers

LOOK_EVERY_S = 0.05
WINDOW_S = 10.0
"""Seconds over which ranks are compared."""
FEWEST_STEPS = 5
SLOWER = 1.5
"""A rank whose own time is this many times that of the others is slow,"""
LOST = 0.2
"""if the others lose this share of a step by it. In steps that mostly wait, small differences look large."""
_INNERMOST = 6


def measure_waiting(heartbeat: Heartbeat) -> None:
    """Start the thread that adds up how long the calling thread, which trains, waits for its peers and its loaders."""
    heartbeat.measures_waiting = True
    arguments = (heartbeat, threading.current_thread())
    threading.Thread(target=_measure, args=arguments, name="waiting", daemon=True).start()


def _measure(heartbeat: Heartbeat, thread: threading.Thread) -> None:
    looked = time.monotonic()
    while thread.is_alive():
        time.sleep(LOOK_EVERY_S)
        now = time.monotonic()
        if _waits(thread):
            heartbeat.waited += now - looked
        looked = now


def _waits(thread: threading.Thread) -> bool:
    files: list[str] = []
    frame = sys._current_frames().get(thread.ident or 0)
    while frame is not None and len(files) < _INNERMOST:
        files.append(frame.f_code.co_filename)
        frame = frame.f_back
    return (waits_for_peers(files) or waits_for_loaders(files)) and _sleeps(thread)


def _sleeps(thread: threading.Thread) -> bool:
    """Whether the kernel says so: a backward pass computes in the same frame in which it waits."""
    try:
        stat = Path(f"/proc/self/task/{thread.native_id}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] == "S"


class StragglerWatch:
    """Compares the own time of ranks, step by step, and tells once which one is slow."""

    def __init__(self) -> None:
        self._since: dict[int, Beat] = {}
        self._step = 0.0
        """Seconds of a step in the last window."""
        self._told: set[int] = set()

    def own_times(self, beats: Mapping[int, Beat]) -> dict[int, float]:
        """Seconds of a step in which each rank does not wait, once there is a window of them; then a new one begins."""
        if not beats:  # ranks have just started, or have all finished
            return {}
        first = {rank: self._since.setdefault(rank, beat) for rank, beat in beats.items() if beat.step > 1}
        if len(first) < len(beats) or not all(_is_window(first[rank], beat) for rank, beat in beats.items()):
            return {}
        self._since = dict(beats)
        self._step = max((beat.at - first[rank].at) / (beat.step - first[rank].step) for rank, beat in beats.items())
        return {rank: _own_time(first[rank], beat) for rank, beat in beats.items()}

    def tell(self, times: Mapping[int, float], hosts: Mapping[int, str]) -> str:
        """A sentence about a rank that has become slow; empty if there is none. `hosts`: of ranks, if several."""
        if len(times) < 2:
            return ""
        slowest = max(times, key=times.__getitem__)
        usual = median(seconds for rank, seconds in times.items() if rank != slowest)
        slow = times[slowest] > SLOWER * max(usual, LOOK_EVERY_S / FEWEST_STEPS)
        slow = slow and times[slowest] - usual > LOST * self._step
        if not slow or slowest in self._told:
            return ""
        self._told.add(slowest)
        where = f" on {hosts[slowest]}" if slowest in hosts else ""
        return (
            f"Rank {slowest}{where} is slow: of each step it works {times[slowest] * 1e3:.0f} ms, "
            f"the others {usual * 1e3:.0f} ms, and then they wait for it"
        )


def _is_window(first: Beat, last: Beat) -> bool:
    return last.at - first.at >= WINDOW_S and last.step - first.step >= FEWEST_STEPS


def _own_time(first: Beat, last: Beat) -> float:
    return max(0.0, (last.at - first.at) - (last.waited - first.waited)) / (last.step - first.step)
