"""A rewritten program for torch.compile, which fuses what stands between products and collectives.

Equal programs share one function, so alike blocks are compiled once. What joins a block's parameters and sums their
gradients stays outside of the graph: there it is views and one function in backward, in the graph it would be copies.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.strategies.float8_linear import float8_linear
from meshwright.strategies.program_collectives import (
    AddUpAll,
    AddUpRows,
    GatherParts,
    GatherRows,
    PartialGradients,
    TakePart,
    add_up_all,
    add_up_rows,
    copy_all_in,
    gather_parts,
    gather_rows,
    take_part,
)
from meshwright.strategies.tensor.block_parameters import block_parameters
from meshwright.strategies.tensor.product import product
from meshwright.strategies.tensor.program import Instruction, Local, Program, locals_in
from meshwright.torch_private.autograd import without_modes_in_backward

MADE: dict[Any, Callable[..., tuple[Tensor, ...]]] = {}
"""Compiled functions, by what they do. Emptied while a step is traced, which imitates the compiler."""


def compiled(program: Program) -> Callable[..., tuple[Tensor, ...]] | None:
    """None if the program has functions that torch.compile cannot trace, or that must draw what others draw."""
    first = program.instructions[:1]
    if not first or first[0].function not in _BEFORE_GRAPHS:
        return _graph(program)
    read = {local.number for one in program.instructions[1:] for local in locals_in((one.args, one.kwargs))}
    read |= {*program.outputs}
    inputs = tuple(number for number in (*program.inputs, *first[0].results) if number in read)
    graph = _graph(replace(program, inputs=inputs, instructions=program.instructions[1:]))
    if graph is None:
        return None
    call = Instruction(graph, tuple(map(Local, inputs)), {}, program.outputs, False, True)
    return replace(program, instructions=(*first, call)).compile()


def _graph(program: Program) -> Callable[..., tuple[Tensor, ...]] | None:
    if any(_is_opaque(one.function) for one in program.instructions):
        return None
    instructions = tuple(
        replace(one, function=_IN_GRAPHS.get(one.function, one.function)) for one in program.instructions
    )
    traceable = replace(program, instructions=instructions)
    key = traceable.identity()
    if key not in MADE:
        MADE[key] = _without_modes(torch.compile(traceable.compile(), dynamic=False))
    return MADE[key]


def _without_modes(graph: Callable[..., tuple[Tensor, ...]]) -> Callable[..., tuple[Tensor, ...]]:
    """A compiled function whose backward the region's mode does not see. In forward it is off already."""

    def run(*inputs: Tensor) -> tuple[Tensor, ...]:
        results = graph(*inputs)
        without_modes_in_backward(results)
        return results

    return run


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
    gather_parts: GatherParts.apply,
    take_part: TakePart.apply,
    add_up_rows: AddUpRows.apply,
    add_up_all: AddUpAll.apply,
    product: _joined_product,
    float8_linear: float8_linear,
}
_BEFORE_GRAPHS = (block_parameters, copy_all_in)
