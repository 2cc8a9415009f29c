"""Memory that an operator's library takes while it runs, which no tensor of the model shows."""

from __future__ import annotations

from typing import Any

import torch

from meshwright.describe.as_on_cuda import stands_in
from meshwright.describe.recurrent import recurrent_workspaces
from meshwright.tracing.convolutions import Held, backward_workspaces, forward_workspaces
from meshwright.tracing.reductions import sum_staging

aten = torch.ops.aten


def operator_workspaces(func: Any, args: Any, found: Any, *, sums: bool = True) -> list[Held]:
    """What an operator allocates and frees besides its results on a GPU: sizes held together, one after another.

    Without `sums`, only what grows in proportion to the samples: a sum over rows takes no more from some number on.
    """
    if not stands_in():
        return []
    if func is aten.convolution.default:
        x, weight, _, stride, _, _, transposed, _, groups = args
        return [forward_workspaces(x, weight, found, stride, transposed, groups)]
    if func is aten.convolution_backward.default:
        gradient, x, weight, _, stride, _, _, transposed, _, groups, mask = args
        return backward_workspaces(gradient, x, weight, stride, transposed, groups, [*mask[:2], mask[2] and sums])
    if func is aten.sum.dim_IntList:
        return [(sum_staging(args[0], args[1]),)] if sums and args[1] else []
    return recurrent_workspaces(func, args)
