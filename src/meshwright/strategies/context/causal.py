"""Causal attention of the last tokens of a sequence to the whole of it.

`scaled_dot_product_attention` takes queries under a causal mask for those of the first tokens. So the keys are cut in
two: all queries attend to the tokens before theirs, which needs no mask, and to their own tokens, under the causal mask
of a square. Every kernel knows both. The results are merged by the log-sum-exps of their scores.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

from meshwright.describe.as_on_cuda import flash, stands_in, takes_flash
from meshwright.strategies.recorder import noted
from meshwright.strategies.tensor.layout import dim_of, divided, is_divided, local
from meshwright.torch_private.attention_kernels import KERNELS, chosen_kernel
from meshwright.torch_private.autograd import direct_apply
from meshwright.torch_private.modes import without_torch_function

FLASH_WIDTH = 8
"""The width of a head must be a multiple of this for kernels on GPUs, or be padded."""


def attend_to_earlier(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    """The queries are those of the last tokens; each attends to the tokens up to its own.

    `options` are `dropout_p`, `scale` and `enable_gqa` of `scaled_dot_product_attention`.
    """
    if query.shape[-2] == key.shape[-2]:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, **options)
    if isinstance(query, DTensor):
        mesh, dim = query.device_mesh, dim_of(query)
        if all(is_divided(x, mesh) and dim_of(x) == dim for x in (key, value)):  # each rank has its own heads
            parts = (local(x) for x in (query, key, value))  # type: ignore[arg-type]
            return divided(attend_to_earlier(*parts, **options), dim, mesh)
        return _masked(query, key, value, options)
    if kernel := _kernel_for(query, key, value, options):
        return noted(ATTEND_IN_TWO, query, key, value, options["scale"], kernel)  # type: ignore[no-any-return]
    return attend_at_once(query, key, value, **options)


def attend_at_once(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    """The same in one kernel: the flash kernel for GPUs takes queries for those of the last tokens; others a mask."""
    if (query.is_cuda or stands_in()) and takes_flash(query, key, value, None, is_causal=False):
        return flash(query, key, value, options["dropout_p"], is_causal=True, scale=options["scale"])
    return _masked(query, key, value, options)


def _masked(query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]) -> Tensor:
    rows, columns = query.shape[-2], key.shape[-2]
    mask = torch.ones(rows, columns, dtype=torch.bool, device=query.device).tril(columns - rows)
    return F.scaled_dot_product_attention(query, key, value, mask, **options)


def _kernel_for(query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]) -> str | None:
    """The kernel that attends to both groups of keys; None if it would not give the log-sum-exps, or would drop."""
    if options["dropout_p"] or query.dim() != 4:
        return None
    own = query, key[..., -query.shape[-2] :, :], value[..., -query.shape[-2] :, :]
    if stands_in():
        dense = query.shape[-1] % FLASH_WIDTH == 0 and takes_flash(*own, None, is_causal=True)
        return "flash" if dense else None
    with without_torch_function():
        found = chosen_kernel(*own, scale=options["scale"], enable_gqa=options["enable_gqa"])
    return None if query.is_cuda and query.shape[-1] % FLASH_WIDTH else found


class AttendInTwo(torch.autograd.Function):
    """Attention to earlier tokens and to the queries' own tokens, merged. It saves what one attention would."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, scale: float | None, kernel: str) -> Tensor:
        run = KERNELS[kernel].forward
        with without_torch_function():
            earlier, own = _two_groups(query, key, value)
            first, first_lse, _ = run(query, *earlier, causal=False, scale=scale)
            last, last_lse, seeds = run(query, *own, causal=True, scale=scale)
            output, lse = _merged(first, first_lse, last, last_lse)
        ctx.save_for_backward(query, key, value, output, lse, *seeds)
        ctx.scale, ctx.kernel = scale, kernel
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, output, lse, *seeds = ctx.saved_tensors
        run = KERNELS[ctx.kernel].backward
        with without_torch_function():
            earlier, own = _two_groups(query, key, value)
            found = [
                run(gradient, (query, *keys, output, lse), tuple(seeds), causal=causal, scale=ctx.scale)
                for keys, causal in ((earlier, False), (own, True))
            ]
            of_query = found[0][0] + found[1][0]
            of_key, of_value = (torch.cat([found[0][place], found[1][place]], -2) for place in (1, 2))
        return of_query, of_key, of_value, None, None


def _two_groups(query: Tensor, key: Tensor, value: Tensor) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Keys and values before the queries' tokens, and those of the queries' tokens."""
    before = key.shape[-2] - query.shape[-2]
    return (key[..., :before, :], value[..., :before, :]), (key[..., before:, :], value[..., before:, :])


def _merged(first: Tensor, first_lse: Tensor, last: Tensor, last_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Attention to two groups of keys, from that to each: weighted by the sums of their exponentials."""
    share = torch.sigmoid(last_lse - first_lse)
    share = share if share.dim() == first.dim() else share.unsqueeze(-1)
    merged = torch.lerp(first.to(share.dtype), last.to(share.dtype), share).to(first.dtype)
    return merged, torch.logaddexp(first_lse, last_lse)


ATTEND_IN_TWO = direct_apply(AttendInTwo)
"""What programs have in place of `attend_to_earlier`."""
