"""Rewrites a program so that a tensor which several divided operators read has one sum of gradients over ranks.

Each operator that `op` divides copies its input in, so the gradients of query, key and value are three messages. Their
sum is the same as one message.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from meshwright.strategies.collectives import COPY_IN
from meshwright.strategies.tensor.program import Instruction, Local, Program


def with_shared_copies(program: Program) -> Program:
    """Copy each tensor in once. Results of the program keep their own copies."""
    first: dict[Any, int] = {}
    same: dict[int, int] = {}
    found: list[Instruction] = []
    for one in program.instructions:
        one = replace(one, args=_renamed(one.args, same), kwargs=_renamed(one.kwargs, same)) if same else one
        if one.function is COPY_IN and one.results[0] not in program.outputs:
            known = first.setdefault((one.args[0], one.differentiated), one.results[0])
            if known != one.results[0]:
                same[one.results[0]] = known
                continue
        found.append(one)
    return replace(program, instructions=tuple(found))


def _renamed(tree: Any, same: dict[int, int]) -> Any:
    if isinstance(tree, Local):
        return Local(same.get(tree.number, tree.number))
    if isinstance(tree, tuple | list):
        return type(tree)(_renamed(item, same) for item in tree)
    if isinstance(tree, dict):
        return {key: _renamed(item, same) for key, item in tree.items()}
    if isinstance(tree, slice):
        return slice(*(_renamed(item, same) for item in (tree.start, tree.stop, tree.step)))
    return tree
