"""Keep torch.profiler's traces of chosen steps of a training, from chosen ranks.

    train --profile 5-7 --profile-ranks 0,3     # OUT/profile/rank-0_steps-5-7.json, which Perfetto opens

A profiled step is slower and takes memory, so there should be few, and not the first ones, in which allocators and
caches fill.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from meshwright.errors import BadInput

FOLDER = "profile"
MOST = 100
"""Steps in one trace: each is megabytes, and all of it is held in memory until the last."""


@dataclass(frozen=True, kw_only=True)
class ProfileOptions:
    """Which steps, counted from 1, and which ranks."""

    first: int
    last: int
    ranks: tuple[int, ...] | None = (0,)
    """None: all."""

    @classmethod
    def parse(cls, steps: str, ranks: str = "0") -> ProfileOptions:
        """Reads `5` or `5-7`, and `0,3` or `all`."""
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
    """Around every step of a loop. Steps that nobody wished for pass through."""

    def __init__(self, wish: ProfileOptions | None, out: Path | None, *, rank: int, device: torch.device) -> None:
        chosen = wish is not None and out is not None and (wish.ranks is None or rank in wish.ranks)
        self._wish = wish if chosen else None
        self._folder = None if out is None else out / FOLDER
        self._rank, self._device = rank, device
        self._profile: profile | None = None
        self._begun_at = 0
        self._seen = 0

    @contextmanager
    def around(self, step: int) -> Iterator[None]:
        """The step with this number; a trace begins and ends with it where that is wished."""
        wish = self._wish
        if wish is not None and self._profile is None and wish.first <= step <= wish.last:
            self._begin(step)
        yield
        self._seen = step
        if wish is not None and step >= wish.last:
            self.close()

    def close(self) -> None:
        """Write down what was traced; also where a run ends before the last step that was wished for."""
        running, self._profile = self._profile, None
        if running is None or self._folder is None:
            return
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        running.stop()
        self._folder.mkdir(parents=True, exist_ok=True)
        name = f"rank-{self._rank}_steps-{self._begun_at}-{self._seen}.json"
        running.export_chrome_trace(str(self._folder / name))

    def _begin(self, step: int) -> None:
        on_gpu = [ProfilerActivity.CUDA] if self._device.type == "cuda" else []
        self._profile, self._begun_at = profile(activities=[ProfilerActivity.CPU, *on_gpu], acc_events=True), step
        self._profile.start()
