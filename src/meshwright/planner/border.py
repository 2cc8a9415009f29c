"""Find the largest size that fits: double and bisect a cheap test, then measure as few sizes as possible around it."""

from __future__ import annotations

from collections.abc import Callable
from math import floor

MOST = 1 << 20
"""The largest size that is tried: a model that is this small does not need an answer."""
FINEST = 1e-3
"""Share of a size to which it is found if it is large: a forecast is no better."""


def largest_that(fits: Callable[[int], bool], most: int = MOST) -> int:
    """The largest size from 1 to `most` that fits, if all smaller ones do; 0 if none does."""
    low, high = 0, 1
    while high <= most and fits(high):
        low, high = high, 2 * high
    high = min(high, most + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def settle(excess: Callable[[int], float], guess: int, each: float, most: int = MOST) -> tuple[int, int]:
    """Two neighbours as measured: a size that fits, 0 if size 1 does not, and a larger one that does not.

    `excess` measures the bytes that a size needs beyond the room, so it is at most 0 if the size fits. `guess` is where
    to start, and `each` the bytes that one more is expected to need until sizes on both sides are measured. The second
    size is the next one, or the first within FINEST of it; it is above `most` if everything fits.
    """
    low, high, size = 0, most + 1, min(max(guess, 1), most)
    known: dict[int, float] = {}
    while high - low > max(1, FINEST * low):
        known[size] = excess(size)
        low, high = (size, high) if known[size] <= 0 else (low, size)
        if low in known and high in known:
            each = (known[high] - known[low]) / (high - low)
        # What an allocator reserves grows in steps, which a straight line follows only slowly: halve now and then.
        is_slow = len(known) % 4 == 0 and low and high <= most
        size = (low + high) // 2 if is_slow else floor(size - known[size] / max(each, 1.0))
        size = min(max(size, low + 1), high - 1)
    return low, high
