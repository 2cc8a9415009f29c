"""Rewrites a recorded program into one that computes the same with fewer kernels, as an expert would write it.

1. Gradients of parameters that every rank holds whole (norms, biases) are summed over ranks in one message.
2. Linear layers that read the same tensor (query, key and value; gate and up) are one product. If their weights lie
   one after another in memory, as the copies of a step in 16 bits do, it is a plain linear layer with the joint weight;
   otherwise a function that joins them where it needs them, because autograd would keep the joint copy.
3. Gathered rows stay in the order in which ranks send them. Ranks' parts of a sequence arrive one after another, and
   putting each sample's parts beside each other copies the whole tensor. A layer that treats every row alone does not
   mind their order: only its outputs are put in order, which are a rank's share of the width, or they are scattered
   again as they are.

A program that changes tensors in place keeps its instructions. In all of them collectives name their group.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import prod
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from meshwright.strategies.collectives import ADD_UP, ADD_UP_PART, COPY_IN, JOIN, TAKE
from meshwright.strategies.float8_linear import float8_linear
from meshwright.strategies.mesh_axis import group_of, place_in
from meshwright.strategies.program_collectives import (
    add_up_all,
    add_up_rows,
    copy_all_in,
    gather_parts,
    gather_rows,
    take_part,
)
from meshwright.strategies.tensor.block_parameters import block_parameters
from meshwright.strategies.tensor.product import are_adjacent, product
from meshwright.strategies.tensor.program import Instruction, Local, Program, locals_in
from meshwright.strategies.tensor.rules import functions
from meshwright.strategies.tensor.shared_copies import with_shared_copies

_ELEMENTWISE = functions(
    "add sub mul div neg square exp sigmoid tanh relu gelu silu to float bfloat16 half double "
    "__add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __truediv__ __neg__"
)
_LINEAR = (F.linear, float8_linear)
"""In float8, a layer's rows have one scale, which does not depend on their order either."""
_CUTS = functions("split chunk split_with_sizes")


def rewrite(program: Program, mesh: DeviceMesh, held: Mapping[int, Tensor]) -> Program:
    """`held` are the tensors that modules hold, by their number in the program, as they are now."""
    if any(_changes_its_input(one) for one in program.instructions):
        return replace(program, instructions=tuple(_by_group(one, mesh) for one in program.instructions))
    joint = _with_joint_products(_with_joint_sums(with_shared_copies(program), mesh), mesh, held)
    return _InSentOrder(joint, mesh).rewritten()


def _changes_its_input(one: Instruction) -> bool:
    name = getattr(one.function, "__name__", "")
    in_place = name.endswith("_") and not name.endswith("__")
    return in_place or not one.results or bool(one.kwargs.get("inplace")) or "out" in one.kwargs


def _with_joint_sums(program: Program, mesh: DeviceMesh) -> Program:
    """Sum what is small and there from the start, as a block's own parameters are; others each alone."""
    small = {Local(number) for number in program.inputs if len(program.shapes[number]) < 2}
    sums = [one for one in program.instructions if one.function is COPY_IN and one.args[0] in small]
    joint = _joint_sum([one for one in sums if one.differentiated], mesh)
    others = [one for one in program.instructions if one.results[0] not in joint[0].results] if joint else ()
    instructions = [*joint, *(others or program.instructions)]
    return replace(program, instructions=tuple(_by_group(one, mesh) for one in instructions))


def _joint_sum(sums: list[Instruction], mesh: DeviceMesh) -> list[Instruction]:
    if not sums:
        return []
    results, tensors = zip(*((one.results[0], one.args[0]) for one in sums), strict=True)
    return [replace(sums[0], function=copy_all_in, args=(group_of(mesh), *tensors), results=results, single=False)]


def _by_group(one: Instruction, mesh: DeviceMesh) -> Instruction:
    """A collective by the name of its group."""
    if one.function is COPY_IN:
        return replace(one, function=copy_all_in, args=(group_of(mesh), one.args[0]), single=False)
    if one.function is ADD_UP:
        return replace(one, function=add_up_all, args=(one.args[0], group_of(mesh)))
    if one.function is TAKE:
        return replace(one, function=take_part, args=(*one.args[:2], *place_in(mesh)))
    if one.function is JOIN and one.args[2:4] == (1, False):
        return replace(one, function=gather_parts, args=(*one.args[:2], *place_in(mesh)))
    return one


def _with_joint_products(program: Program, mesh: DeviceMesh, held: Mapping[int, Tensor]) -> Program:
    groups: dict[Any, list[int]] = {}
    made = {number: place for place, one in enumerate(program.instructions) for number in one.results}
    for place, one in enumerate(program.instructions):
        if (key := _product_key(one)) is not None:
            first = groups.get(key, [place])[0]
            if all(made.get(local.number, -1) < first for local in locals_in(one.args[1:])):
                groups.setdefault(key, []).append(place)
    joint = {places[0]: places for places in groups.values() if _pays(program, places, held)}
    dropped = {place for places in joint.values() for place in places}
    numbers = program.next_number()
    found: list[Instruction] = []
    shapes = dict(program.shapes)
    joins: dict[int, list[Local]] = {}
    for place, one in enumerate(program.instructions):
        if place in joint:
            products = [program.instructions[each] for each in joint[place]]
            found += _joint_product(products, numbers, shapes, joins, held)
        elif place not in dropped:
            found.append(one)
    return replace(program, instructions=tuple(_with_joins(found, joins, shapes, mesh)), shapes=shapes)


def _with_joins(
    instructions: list[Instruction], joins: dict[int, list[Local]], shapes: Mapping[int, Any], mesh: DeviceMesh
) -> list[Instruction]:
    """Join parameters by the function that has the joint sum of gradients, which is the first one if there is one."""
    if not joins:
        return instructions
    sums = instructions[:1] if instructions[0].function is copy_all_in else []
    whole = sums[0].args[1:] if sums else ()
    rows = tuple(tuple(shapes[part.number][0] for part in parts) for parts in joins.values())
    parts = [part for parts in joins.values() for part in parts]
    args = (group_of(mesh), len(whole), rows, *whole, *parts)
    results = (*(sums[0].results if sums else ()), *joins)
    return [Instruction(block_parameters, args, {}, results, False, True), *instructions[len(sums) :]]


def _parameters(one: Instruction) -> tuple[int, ...]:
    """The places of a linear layer's weight and bias among its arguments."""
    return (1, 2) if len(one.args) > 2 and one.args[2] is not None else (1,)


def _product_key(one: Instruction) -> Any:
    """Equal for linear layers that may be one product; None for other functions."""
    if one.function is not F.linear or one.kwargs or not all(isinstance(arg, Local) for arg in one.args[:2]):
        return None
    return one.args[0], _parameters(one), one.differentiated


def _pays(program: Program, places: list[int], held: Mapping[int, Tensor]) -> bool:
    """Whether adding up gradients of the input, once per layer, takes longer than joining the weights."""
    if len(places) < 2:
        return False
    products = [program.instructions[place] for place in places]
    if all(_lie_joined([one.args[part] for one in products], held) for part in _parameters(products[0])):
        return True
    rows = prod(program.shapes[products[0].args[0].number][:-1])
    outputs = sum(program.shapes[one.results[0]][-1] for one in products)
    return 3 * (len(products) - 1) * rows >= 4 * outputs


def _joint_product(
    products: list[Instruction],
    numbers: Iterator[int],
    shapes: dict[int, Any],
    joins: dict[int, list[Local]],
    held: Mapping[int, Tensor],
) -> list[Instruction]:
    """The product and its cut. Parameters that lie one after another become one, which `joins` gets."""
    first, number = products[0], next(numbers)
    weights, *rest = [[one.args[part] for one in products] for part in _parameters(first)]
    biases = rest[0] if rest else []
    outputs = tuple(one.results[0] for one in products)
    widths = [shapes[output][-1] for output in outputs]
    shapes[number] = (*shapes[outputs[0]][:-1], sum(widths))
    function, args = product, (first.args[0], len(weights), *weights, *biases)
    if first.differentiated and all(_lie_joined(parts, held) for parts in (weights, biases) if parts):
        joint = {next(numbers): parts for parts in (weights, biases) if parts}
        shapes |= {each: (sum(widths), *shapes[parts[0].number][1:]) for each, parts in joint.items()}
        joins |= joint
        function, args = F.linear, (first.args[0], *map(Local, joint))
    return [
        replace(first, function=function, args=args, results=(number,)),
        replace(
            first, function=Tensor.split_with_sizes, args=(Local(number), widths, -1), results=outputs, single=False
        ),
    ]


def _lie_joined(parts: list[Local], held: Mapping[int, Tensor]) -> bool:
    """Whether parameters are trained and lie one after another, so that joining them is a view."""
    tensors = [held[part.number] for part in parts if part.number in held]
    return len(tensors) == len(parts) and all(x.requires_grad for x in tensors) and are_adjacent(tensors)


class _InSentOrder:
    """One pass over a program. `_sent` has the tensors that exist in the order of ranks, [ranks, ..., part, ...]."""

    def __init__(self, program: Program, mesh: DeviceMesh) -> None:
        self._program, self._ranks, self._group = program, mesh.size(), group_of(mesh)
        self._shapes = dict(program.shapes)
        self._numbers = program.next_number()
        self._found: list[Instruction] = []
        self._sent: dict[int, tuple[int, int]] = {}
        """A tensor's number -> the number of its form in the order of ranks, and the dim along which they divide it."""
        self._ordered: set[int] = set()
        """Tensors of `_sent` that exist in their own order too."""
        self._uses: dict[int, list[Instruction]] = {}
        for one in program.instructions:
            for local in locals_in((one.args, one.kwargs)):
                self._uses.setdefault(local.number, []).append(one)

    def rewritten(self) -> Program:
        for one in self._program.instructions:
            self._add(one)
        for number in self._program.outputs:
            self._order(number, like=None)
        return replace(self._program, instructions=tuple(self._found), shapes=self._shapes)

    def _add(self, one: Instruction) -> None:
        if one.function is JOIN and self._is_sequence(one.args[0], one.args[1], one.args[2:4] == (1, True)):
            self._emit_sent(one, gather_rows, (one.args[0], self._ranks, self._group), one.args[1])
        elif one.function is ADD_UP_PART and one.args[1] < len(self._shapes[one.args[0].number]) - 1:
            form = (
                self._form(one.args[0]) if self._dim(one.args[0]) == one.args[1] else self._sent_form(one, one.args[1])
            )
            self._found.append(replace(one, function=add_up_rows, args=(form, self._ranks, self._group)))
        elif (dim := self._dim_of_all(one)) is not None and self._is_by_row(one) and self._stays(one):
            self._emit_sent(one, one.function, self._in_form(one.args), dim)
        elif (dim := self._scattered_along(one)) is not None:
            self._emit_sent(one, one.function, (self._sent_form(one, dim), *one.args[1:]), dim)
        else:
            for local in locals_in((one.args, one.kwargs)):
                self._order(local.number, like=one)
            self._found.append(one)

    def _is_sequence(self, x: Any, dim: int, shares: bool) -> bool:
        """Whether gathered rows may stay in the order of ranks: a dim of rows, and shares of gradients."""
        return shares and 0 <= dim < len(self._shapes[x.number]) - 1

    def _emit_sent(self, one: Instruction, function: Any, args: Any, dim: int) -> None:
        numbers = tuple(next(self._numbers) for _ in one.results)
        for number, own in zip(numbers, one.results, strict=True):
            self._sent[own] = number, dim
        self._found.append(replace(one, function=function, args=args, results=numbers))

    def _dim(self, value: Any) -> int | None:
        return self._sent[value.number][1] if isinstance(value, Local) and value.number in self._sent else None

    def _form(self, value: Any) -> Any:
        return Local(self._sent[value.number][0])

    def _in_form(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(self._form(arg) if self._dim(arg) is not None else arg for arg in args)

    def _dim_of_all(self, one: Instruction) -> int | None:
        """The dim of the arguments that are in the order of ranks, if all others are as wide as a row or narrower."""
        if any(True for _ in locals_in(one.kwargs)):
            return None
        dims = {self._dim(arg) for arg in one.args if isinstance(arg, Local)} - {None}
        return dims.pop() if len(dims) == 1 else None

    def _is_by_row(self, one: Instruction) -> bool:
        if one.function in (*_LINEAR, product):
            return self._dim(one.args[0]) is not None
        if one.function in _CUTS:
            return self._dim(one.args[0]) is not None and (one.kwargs.get("dim") == -1 or one.args[2:] == (-1,))
        if one.function not in _ELEMENTWISE:
            return False
        (result,) = one.results
        return all(self._broadcasts(arg, self._shapes[result]) for arg in one.args)

    def _broadcasts(self, arg: Any, shape: tuple[int, ...]) -> bool:
        """Whether an argument of an elementwise function may have the order of ranks, or has none."""
        if not isinstance(arg, Local):
            return not any(True for _ in locals_in(arg))
        given = self._shapes[arg.number]
        return given == shape if self._dim(arg) is not None else len(given) <= 1

    def _stays(self, one: Instruction) -> bool:
        """Whether results stay in the order of ranks.

        A cut's do if they are used row by row; if not, they are put in order before they are cut. Those of a layer that
        is wider than its input do unless the program returns them, as a head's logits: ordering the input is less.
        """
        if one.function in (F.linear, product) and one.results[0] in self._program.outputs:
            return self._shapes[one.results[0]][-1] <= self._shapes[one.args[0].number][-1]
        return one.function not in _CUTS or any(
            use.function in _ELEMENTWISE or use.function in _LINEAR
            for number in one.results
            for use in self._uses.get(number, ())
        )

    def _scattered_along(self, one: Instruction) -> int | None:
        """The dim along which the sum of a row layer's output is scattered, if nobody else reads it."""
        if one.function not in _LINEAR or one.kwargs or not isinstance(one.args[0], Local):
            return None
        uses = self._uses.get(one.results[0], [])
        if len(uses) != 1 or uses[0].function is not ADD_UP_PART:
            return None
        given, made, dim = self._shapes[one.args[0].number], self._shapes[one.results[0]], uses[0].args[1]
        return dim if 0 <= dim < len(made) - 1 and given[-1] <= made[-1] else None

    def _sent_form(self, like: Instruction, dim: int) -> Local:
        """The tensor that a row layer or a sum reads, in the order of ranks."""
        x = like.args[0]
        self._order(x.number, like)
        shape = self._shapes[x.number]
        parts = self._emit(like, Tensor.reshape, (x, (*shape[:dim], self._ranks, -1, *shape[dim + 1 :])))
        moved = self._emit(like, Tensor.movedim, (parts, dim, 0))
        return self._emit(like, Tensor.contiguous, (moved,))

    def _emit(self, like: Instruction, function: Any, args: tuple[Any, ...]) -> Local:
        number = next(self._numbers)
        self._found.append(Instruction(function, args, {}, (number,), True, like.differentiated))
        return Local(number)

    def _order(self, number: int, like: Instruction | None) -> None:
        """Put a tensor in its own order, unless it is."""
        if number not in self._sent or number in self._ordered:
            return
        self._ordered.add(number)
        sent, dim = self._sent[number]
        like = like or self._program.instructions[-1]
        moved = self._emit(like, Tensor.movedim, (Local(sent), 0, dim))
        self._found.append(Instruction(Tensor.flatten, (moved, dim, dim + 1), {}, (number,), True, like.differentiated))
