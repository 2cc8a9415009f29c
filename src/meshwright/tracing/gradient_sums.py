"""Sums of a tensor's gradients, which autograd's engine makes in place where tensors are not fake."""

from __future__ import annotations

from typing import Any

import torch

from meshwright.torch_private.autograd import backward_id, called_by_engine, is_held_once, running_node, uses_of_one
from meshwright.torch_private.tensors import storage_id
from meshwright.tracing.layouts import buffer_of


class GradientSums:
    """Tells a sum that the engine makes from others. A tensor that is used twice has its gradients added up.

    The engine adds to the first of them in place if it is dense, and if nobody else holds it. Fake tensors are never
    changed in place, and so would take memory for one more.
    """

    def __init__(self) -> None:
        self._made_by: dict[int, int | None] = {}
        """For each storage made in backward, the number of the function whose backward made it."""
        uses_of_one()

    def note(self, storage: int) -> None:
        """A storage was made now."""
        if backward_id() != -1:
            self._made_by[storage] = running_node()

    def forget(self, storage: int) -> None:
        self._made_by.pop(storage, None)

    def in_place(self, func: Any, args: Any) -> bool:
        """Whether an operator that a dispatch mode sees is such a sum, which writes over its first argument."""
        if func is not torch.ops.aten.add.Tensor or backward_id() == -1 or torch.is_grad_enabled():
            return False
        storage = storage_id(args[0].untyped_storage())
        return (
            self._made_by.get(storage, running_node()) != running_node()  # else it may be a formula's own sum
            and buffer_of(args[0], aligned=False).elements == args[0].numel()
            and is_held_once(args[0])
            and called_by_engine()
        )
