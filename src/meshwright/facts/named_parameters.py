"""Parameters with their names, as an optimizer factory receives them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn


class NamedParameters(list["nn.Parameter"]):
    """A list of parameters that `AdamW(params)` accepts; `named()` gives their names, for parameter groups."""

    def __init__(self, named: Iterable[tuple[str, nn.Parameter]]) -> None:
        pairs = list(named)
        super().__init__(parameter for _, parameter in pairs)
        self._names = [name for name, _ in pairs]

    def named(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Pairs of the unsplit model's parameter name and the parameter."""
        return zip(self._names, self, strict=True)
