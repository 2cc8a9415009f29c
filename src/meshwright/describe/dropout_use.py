"""Find out whether a model draws random numbers in a forward pass."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from meshwright.describe.flow import Watcher


class DropoutWatcher(Watcher):
    """A watcher that also notes whether random numbers are drawn."""

    def __init__(self, names: Collection[str]) -> None:
        super().__init__(names)
        self.drops = False
        self.seen = self._look

    def _look(self, func: Any, args: tuple[Any, ...], result: Any) -> None:
        name = func.overloadpacket.__name__
        drops = ATTENTION in name and any(isinstance(value, float) and 0 < value < 1 for value in args)
        self.drops = self.drops or name in RANDOM or drops


RANDOM = ("native_dropout", "bernoulli", "bernoulli_", "rand", "rand_like", "randn_like", "multinomial")
ATTENTION = "scaled_dot_product"
