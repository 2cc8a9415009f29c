"""Watch how a model's code cuts the outputs of its linear layers: into heads, and into pieces such as q, k and v."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import nn

from meshwright.describe.calls import Value
from meshwright.describe.flow import Watcher
from meshwright.describe.linear_layers import is_linear, output_width
from meshwright.describe.repeats import PassObserver
from meshwright.torch_private.operators import RESHAPE_ALIAS, UNSAFE_VIEW

aten = torch.ops.aten
_VIEWS = {aten.view.default, UNSAFE_VIEW.default, aten.reshape.default, RESHAPE_ALIAS.default}
_SPLITS = {aten.split.Tensor, aten.split_with_sizes.default, aten.chunk.default}
_SLICE = aten.slice.Tensor


class OutputCuts(PassObserver):
    """Notes into how many heads and pieces the outputs of linear layers are cut."""

    def __init__(self, watcher: Watcher, layers: Mapping[str, nn.Module]) -> None:
        self._watcher, self._layers = watcher, layers
        self.heads: dict[str, int] = {}
        self.pieces: dict[str, int] = {}
        self._slices: dict[str, set[tuple[int, int]]] = {}
        """Start and end of the slices of each layer's output that were taken so far."""
        self._learned: dict[str, list[tuple[dict[str, int], str, int]]] = {}
        """For each block that ran first: the table, the name in the block, and the number that was noted."""

    def may_repeat(self, inputs: Sequence[torch.Tensor]) -> bool:
        """Not if the block may cut the output of a layer before it."""
        return all(self._origin(x) is None for x in inputs)

    def learned(self, block: str) -> None:
        self._learned[block] = [
            (noted, name.removeprefix(block), number)
            for noted in (self.heads, self.pieces)
            for name, number in noted.items()
            if name.startswith(f"{block}.")
        ]

    def repeated(self, block: str, first: str) -> None:
        for noted, name, number in self._learned[first]:
            noted.setdefault(block + name, number)

    def look(self, func: Any, args: tuple[Any, ...], result: Any) -> None:
        if (func in _VIEWS or func in _SPLITS or func is _SLICE) and args[0].dim() > 0:
            name = self._origin(args[0])
            if name is None or not is_linear(self._layers[name]):
                return
            if func is _SLICE:
                self._note_slice(name, *args)
            else:
                self._note(name, args[0], result)

    def _note_slice(self, name: str, x: torch.Tensor, dim: int = 0, *span: Any) -> None:
        """Slices that tile the output evenly are its pieces."""
        width = output_width(self._layers[name])
        if dim % x.dim() != x.dim() - 1 or x.shape[-1] != width:
            return
        first, last, each = slice(*(span or (None,))).indices(width)
        if each == 1 and 0 < last - first < width:
            taken = self._slices.setdefault(name, set())
            taken.add((first, last))
            size = last - first
            if sorted(taken) == [(place, place + size) for place in range(0, width, size)]:
                self.pieces[name] = len(taken)

    def _note(self, name: str, x: torch.Tensor, result: Any) -> None:
        width = output_width(self._layers[name])
        if not isinstance(result, torch.Tensor):
            sizes = {part.shape[-1] for part in result}
            if x.shape[-1] == width and len(sizes) == 1 and len(result) * sizes.pop() == width:
                self.pieces[name] = len(result)
            return
        factors = _factors(x, result)
        if x.shape[-1] * self.pieces.get(name, 1) == width and factors:
            # (3, heads, head width) is a fused query, key and value; (heads, 3, head width) is not.
            fused = len(factors) > 2 and factors[0] == 3 and factors[1] != 3
            self.pieces[name] = 3 if fused else self.pieces.get(name, 1)
            self.heads.setdefault(name, factors[1] if fused else factors[0])

    def _origin(self, x: torch.Tensor) -> str | None:
        """The layer whose output, perhaps normalised, this tensor is; None if there is not exactly one."""
        sources = [source for source in self._watcher.sources(x) if not isinstance(source, str)]
        while len(sources) == 1 and isinstance(sources[0], Value):
            call = self._watcher.calls[sources[0].call]
            if call.name in self._layers:
                return call.name
            sources = [source for source in call.needs if not isinstance(source, str)]
        return None


def _factors(x: torch.Tensor, result: torch.Tensor) -> tuple[int, ...]:
    """The sizes into which a view cuts the last dim; empty if it does not cut it."""
    for count in range(2, result.dim() + 1):
        tail = tuple(result.shape[-count:])
        if prod(tail) == x.shape[-1]:
            return tail if tail[-1] != x.shape[-1] or result.dim() > x.dim() else ()
    return ()
