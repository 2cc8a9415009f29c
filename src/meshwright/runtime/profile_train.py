"""Write torch.profiler traces of chosen training steps from chosen ranks.

    train --profile 5-7 --profile-ranks 0,3     # OUT/profile/rank-0_steps-5-7.json, which Perfetto opens

A profiled step is slower and takes memory: profile few steps, and not the first ones, which fill allocators and caches.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.profiler import profile

from meshwright.errors import BadInput
from meshwright.runtime.profile_step import make_profiler, synchronize

FOLDER = "profile"
MOST = 100
"""The most steps in one trace: each takes megabytes, which stay in memory until the trace is written."""


@dataclass(frozen=True, kw_only=True)
class ProfileOptions:
    """The steps to profile, counted from 1, and the ranks."""

    first: int
    last: int
    ranks: tuple[int, ...] | None = (0,)
    """None: all."""

    @classmethod
    def parse(cls, steps: str, ranks: str = "0") -> ProfileOptions:
        """Parse `5` or `5-7`, and `0,3` or `all`."""
        found = re.fullmatch(r"(\d+)(?:-(\d+))?", steps.strip())
        first, last = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
        if not 1 <= first <= last < first + MOST:
            raise BadInput(f"--profile {steps!r} names no steps: write 5 or 5-7, from 1 on, {MOST} steps at most.")
        return cls(first=first, last=last, ranks=_read_ranks(ranks))


def _read_ranks(text: str) -> tuple[int, ...] | None:
    if text.strip() == "all":
        return None
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() for word in words):
        raise BadInput(f"--profile-ranks {text!r} names no ranks: write 0 or 0,3 or all.")
    return tuple(int(word) for word in words)


class TrainProfiler:
    """Wraps every step of a loop, and profiles the chosen ones."""

    def __init__(self, options: ProfileOptions | None, out: Path | None, *, rank: int, device: torch.device) -> None:
        chosen = options is not None and out is not None and (options.ranks is None or rank in options.ranks)
        self._options = options if chosen else None
        self._folder = None if out is None else out / FOLDER
        self._rank, self._device = rank, device
        self._profile: profile | None = None
        self._first = self._last = 0

    @contextmanager
    def around(self, step: int) -> Iterator[None]:
        """Context of one step: starts the trace before the first chosen step and writes it after the last."""
        options = self._options
        if options is not None and self._profile is None and options.first <= step <= options.last:
            self._profile, self._first = make_profiler(self._device), step
            self._profile.start()
        yield
        self._last = step
        if options is not None and step >= options.last:
            self.close()

    def close(self) -> None:
        """Write the trace, also if the run ends before the last chosen step."""
        running, self._profile = self._profile, None
        if running is None or self._folder is None:
            return
        synchronize(self._device)
        running.stop()
        self._folder.mkdir(parents=True, exist_ok=True)
        name = f"rank-{self._rank}_steps-{self._first}-{self._last}.json"
        running.export_chrome_trace(str(self._folder / name))
