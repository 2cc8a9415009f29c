"""Temporary tensors of operators that PyTorch composes of several kernels behind one name.

Agrees with what an H200 allocated (docs/data/operator_workspaces_gpu.json).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from meshwright.torch_private import operators
from meshwright.tracing.convolutions import Held
from meshwright.tracing.reductions import sum_staging

aten = torch.ops.aten


def temporaries(func: Any, args: Any, *, sums: bool) -> list[Held]:
    """Sizes that are held together, one after another; without `sums`, none that sums over rows take."""
    if func is aten.logsumexp.default:
        return _logsumexp(args[0], args[1], sums=sums)
    if func in _ELEMENTS:
        return [_ELEMENTS[func](args)]
    return []


def _logsumexp(x: Tensor, dims: list[int], *, sums: bool) -> list[Held]:
    """The largest is found, and then the exponentials are written and added up."""
    largest, added = (sum_staging(x, dims, x.itemsize), sum_staging(x, dims)) if sums else (0, 0)
    return [(largest,), (x.nbytes, added)]


def _loss(args: Any) -> Held:
    """Losses of all elements, if they are summed or averaged."""
    reduction = args[2] if len(args) > 2 else 1
    return (args[0].nbytes,) if reduction else ()


def _loss_of_logits(args: Any) -> Held:
    """The logarithms of the sigmoids, and the losses of all elements if they are summed or averaged."""
    reduction = args[4] if len(args) > 4 else 1
    return (args[0].nbytes,) * (2 if reduction else 1)


def _mean_of_indexed(args: Any) -> Held:
    """How many values each row has: ones in place of the values, and their sums."""
    onto, values, how = args[0], args[3], args[4]
    return (values.nbytes, onto.nbytes) if how == "mean" else ()


def _mean_of_scattered(args: Any) -> Held:
    """The same, beside a mask of the elements that have none."""
    counts = _mean_of_indexed(args)
    return (*counts, args[0].numel()) if counts else ()


def _distances(args: Any) -> Held:
    """Euclidean distances are a product, of points to which their norms are appended."""
    left, right, power = args[:3]
    by_product = power == 2 and max(left.shape[-2], right.shape[-2]) > 25
    return (left.nbytes, right.nbytes) if by_product else ()


_ELEMENTS: dict[Any, Callable[[Any], Held]] = {
    aten.mse_loss.default: _loss,
    aten.smooth_l1_loss.default: _loss,
    aten.huber_loss.default: _loss,
    aten.binary_cross_entropy_with_logits.default: _loss_of_logits,
    aten.scatter_reduce.two: _mean_of_scattered,
    aten.scatter_reduce_.two: _mean_of_scattered,
    aten.index_reduce.default: _mean_of_indexed,
    aten.index_reduce_.default: _mean_of_indexed,
    operators.SAFE_SOFTMAX.default: lambda args: (args[0].numel(),),
    aten.im2col.default: lambda args: (args[0].nbytes,),
    operators.DISTANCES.default: _distances,
}
