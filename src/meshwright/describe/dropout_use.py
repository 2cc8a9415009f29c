"""Whether a model draws random numbers while it is followed."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from meshwright.describe.flow import Watcher


class DropoutWatcher(Watcher):
    """Also notes whether anything is drawn at random."""

    def __init__(self, names: Collection[str]) -> None:
        super().__init__(names)
        self.drops = False
        self.seen = self._look

    def _look(self, func: Any, args: tuple[Any, ...], result: Any) -> None:
        name = func.overloadpacket.__name__
        self.drops = self.drops or name in RANDOM or (ATTENTION in name and any(0 < x < 1 for x in _numbers(args)))


RANDOM = ("native_dropout", "bernoulli", "bernoulli_", "rand", "rand_like", "randn_like", "multinomial")
ATTENTION = "scaled_dot_product"


def _numbers(args: tuple[Any, ...]) -> list[float]:
    return [value for value in args if isinstance(value, float)]
