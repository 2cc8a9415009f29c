"""The gradient of logits that never existed: it carries gradients of the output layer's operands instead."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from meshwright.errors import JobError
from meshwright.pieced_loss.losses import PieceLoss
from meshwright.pieced_loss.rows import Gradients, Needs, Operands, differentiate, of_whole
from meshwright.torch_private.tensors import make_wrapper

ToRows = Callable[[Tensor], Tensor]
"""From hidden states in the shape of the logits' leading dims to the rows that a loss reads."""


class Share(Protocol):
    """One summand of the gradient."""

    def gradients(self, operands: Operands, needs: Needs) -> Gradients:
        """The gradients of the layer's operands. `operands.rows` are the hidden states in their own shape."""


@dataclass(frozen=True)
class Computed:
    """Gradients that forward computed, without the factor that backward brings."""

    found: Gradients
    scale: Tensor

    def gradients(self, operands: Operands, needs: Needs) -> Gradients:
        return self.found.times(self.scale, operands)


@dataclass(frozen=True)
class Later:
    """A loss whose rows have different factors: its pieces are computed again."""

    to_rows: ToRows
    target: Tensor
    loss: PieceLoss
    scale: Tensor

    def gradients(self, operands: Operands, needs: Needs) -> Gradients:
        rows, back = rows_and_back(operands.rows, self.to_rows)
        own = replace(operands, rows=rows)
        found = differentiate(own, self.target, self.loss, needs, self.scale)[1].times(None, own)
        return Gradients(None if found.rows is None else back(found.rows), found.weight, found.bias)


@dataclass(frozen=True)
class Whole:
    """The gradient of real logits."""

    change: Tensor

    def gradients(self, operands: Operands, needs: Needs) -> Gradients:
        shape = operands.rows.shape
        own = replace(operands, rows=operands.rows.reshape(-1, shape[-1]))
        found = of_whole(own, self.change.reshape(-1, self.change.shape[-1]), needs)
        return Gradients(None if found.rows is None else found.rows.reshape(shape), found.weight, found.bias)


def rows_and_back(hidden: Tensor, to_rows: ToRows) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """The rows that a loss reads, and the function that turns their gradient into that of the hidden states."""
    with torch.enable_grad():
        leaf = hidden.detach().requires_grad_()
        rows = to_rows(leaf)
        rows = rows.reshape(-1, rows.shape[-1])

    def back(gradient: Tensor) -> Tensor:
        return torch.autograd.grad(rows, leaf, gradient)[0] if rows is not leaf else gradient

    return rows.detach(), back


class PiecedGradient(Tensor):
    """A gradient with the shape of the logits and no memory."""

    shares: tuple[Share, ...]

    @staticmethod
    def like(
        shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, shares: tuple[Share, ...]
    ) -> PiecedGradient:
        found: PiecedGradient = make_wrapper(PiecedGradient, shape, dtype=dtype, device=device)
        found.shares = shares
        return found

    def __repr__(self, **options: Any) -> str:  # type: ignore[override]
        return f"PiecedGradient(shape={tuple(self.shape)}, dtype={self.dtype})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func is torch.ops.aten.add.Tensor and not kwargs and _is_sum(*args):
            return _sum(*args)  # autograd sums the gradients of several uses
        if func is torch.ops.aten.detach.default:
            return PiecedGradient.like(args[0].shape, args[0].dtype, args[0].device, args[0].shares)
        raise JobError(
            f"A hook or an autograd function runs {func} on the gradient of the logits, but under loss=pieced this "
            "gradient never exists whole; drop loss=pieced, or the hook."
        )


def _is_sum(a: Any, b: Any) -> bool:
    return all(isinstance(one, Tensor) or one == 0 for one in (a, b))


def _sum(a: Any, b: Any) -> Any:
    given = a if isinstance(a, Tensor) else b
    shares = tuple(share for one in (a, b) if isinstance(one, Tensor) for share in shares_of(one))
    return PiecedGradient.like(given.shape, given.dtype, given.device, shares)


def shares_of(gradient: Tensor) -> tuple[Share, ...]:
    return gradient.shares if isinstance(gradient, PiecedGradient) else (Whole(gradient),)
