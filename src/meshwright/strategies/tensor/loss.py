"""Rule for cross entropy of logits that are divided over the classes, without gathering them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from meshwright.describe.dtypes import LOW
from meshwright.pieced_loss.arguments import LossArguments
from meshwright.strategies.parts import own_part
from meshwright.strategies.recorder import noted
from meshwright.strategies.tensor.layout import dim_of, divided, is_divided, local, pieces_of, whole
from meshwright.strategies.tensor.rules import Rule
from meshwright.torch_private.autograd import direct_apply


def cross_entropy(func: Rule, mesh: DeviceMesh, *args: Any, **kwargs: Any) -> Any:
    """Handles whole targets that are class indices. Weights and smoothing would need all classes at once."""
    given = LossArguments(*args, **kwargs)
    input, target = given.input, given.target
    classes = 1 if input.dim() > 1 else 0
    if not given.is_plain or not given.has_indices or is_divided(target, mesh) or not is_divided(input, mesh):
        return NotImplemented
    if dim_of(input) == classes and pieces_of(input) > 1:
        return NotImplemented
    if dim_of(input) != classes:
        return _in_parts(mesh, input, target, given.ignore_index, given.reduction)
    losses = noted(_cross_entropy, local(input).movedim(classes, -1), target, given.ignore_index, mesh)
    return _reduced(losses, target, given.ignore_index, given.reduction)


def _in_parts(mesh: DeviceMesh, input: Any, target: Tensor, ignore_index: int, reduction: str) -> Any:
    """Cross entropy of logits that are divided over samples or positions."""
    rows, pieces = dim_of(input) - (dim_of(input) > 1), pieces_of(input)
    own_target = own_part(target, rows, pieces, mesh)
    losses = F.cross_entropy(local(input), own_target, ignore_index=ignore_index, reduction="none")
    return _reduced(whole(divided(losses, rows, mesh, pieces), mesh), target, ignore_index, reduction)


def _reduced(losses: Tensor, target: Tensor, ignore_index: int, reduction: str) -> Tensor:
    if reduction == "none":
        return losses
    total = losses.sum()
    return total / (target != ignore_index).sum() if reduction == "mean" else total


class _CrossEntropy(torch.autograd.Function):
    """-log softmax(logits)[target], with the classes in the last dim divided over ranks."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, ignore_index: int, mesh: DeviceMesh) -> Tensor:
        group = mesh.get_group()
        values = logits.float() if logits.dtype in LOW else logits
        largest = values.amax(-1, keepdim=True)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
        shifted = values - largest
        del values
        here = target - mesh.get_local_rank() * logits.shape[-1]
        elsewhere = (here < 0) | (here >= logits.shape[-1]) | (target == ignore_index)
        here = here.masked_fill(elsewhere, 0)
        chosen = shifted.gather(-1, here[..., None]).squeeze(-1).masked_fill(elsewhere, 0)
        exponents = shifted.exp_()  # in place, because logits are often what takes most memory
        sums = torch.stack([exponents.sum(-1), chosen])
        dist.all_reduce(sums, group=group)
        ctx.save_for_backward(exponents.div_(sums[0][..., None]), here, elsewhere, target == ignore_index)
        ctx.dtype = logits.dtype
        return (sums[0].log() - sums[1]).masked_fill_(target == ignore_index, 0).to(logits.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        softmax, here, elsewhere, ignored = ctx.saved_tensors
        # softmax, minus 1 at targets whose class this rank holds
        change = softmax.scatter_add(-1, here[..., None], (~elsewhere)[..., None].to(softmax.dtype).neg())
        return change.mul_(gradient.masked_fill(ignored, 0)[..., None]).to(ctx.dtype), None, None, None


_cross_entropy = direct_apply(_CrossEntropy)
