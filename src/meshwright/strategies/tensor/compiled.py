"""A rewritten program for torch.compile, which fuses what stands between products and collectives.

Equal programs share one function, so alike blocks are compiled once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.strategies.collectives import (
    AddUpAll,
    AddUpRows,
    GatherRows,
    PartialGradients,
    add_up_all,
    add_up_rows,
    copy_all_in,
    gather_rows,
)
from meshwright.strategies.tensor.product import product
from meshwright.strategies.tensor.program import Program

_made: dict[Any, Callable[..., tuple[Tensor, ...]]] = {}


def compiled(program: Program) -> Callable[..., tuple[Tensor, ...]] | None:
    """None if the program has functions that torch.compile cannot trace, or that must draw what others draw."""
    if any(_is_opaque(one.function) for one in program.instructions):
        return None
    instructions = tuple(
        replace(one, function=_IN_GRAPHS.get(one.function, one.function)) for one in program.instructions
    )
    traceable = replace(program, instructions=instructions)
    key = traceable.identity()
    if key not in _made:
        _made[key] = torch.compile(traceable.compile(), dynamic=False)
    return _made[key]


def _is_opaque(function: Any) -> bool:
    """Whether a function is ours and not made for graphs: its autograd function takes a mesh."""
    owner = getattr(function, "__self__", function)
    return getattr(owner, "__module__", "").startswith("meshwright") and function not in _IN_GRAPHS


def _joined_product(x: Tensor, count: int, *parameters: Tensor) -> Tensor:
    biases = parameters[count:]
    return F.linear(x, torch.cat(parameters[:count]), torch.cat(biases) if biases else None)


_IN_GRAPHS: dict[Any, Any] = {
    copy_all_in: PartialGradients.apply,
    gather_rows: GatherRows.apply,
    add_up_rows: AddUpRows.apply,
    add_up_all: AddUpAll.apply,
    product: _joined_product,
}
