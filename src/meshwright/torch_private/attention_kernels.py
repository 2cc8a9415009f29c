"""Attention kernels that also return the log-sum-exp of each row of scores (PyTorch 2.11 to 2.13).

With it, attention to several groups of keys can be merged. `backward` takes the output and the log-sum-exp of attention
to all groups, and then gives the gradients of one group's keys and values exactly, and its share of the queries'.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

_aten = torch.ops.aten
_NO_DROPOUT = 0.0


class AttentionKernel(ABC):
    """One library's attention of (batch, heads, tokens, width). If causal, queries and keys are of the same tokens."""

    @abstractmethod
    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *, causal: bool, scale: float | None
    ) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        """The output, its log-sum-exps as (batch, heads, tokens) or (batch, heads, tokens, 1), and the seeds."""

    @abstractmethod
    def backward(
        self, gradient: Tensor, given: tuple[Tensor, ...], seeds: tuple[Tensor, ...], *, causal: bool, **scale: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of the query, key and value. `given` are those, the output and its log-sum-exps."""


class _OnCpu(AttentionKernel):
    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *, causal: bool, scale: float | None
    ) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        run = _aten._scaled_dot_product_flash_attention_for_cpu
        output, lse = run(query, key, value, _NO_DROPOUT, causal, attn_mask=None, scale=scale)
        return output, lse, ()

    def backward(
        self, gradient: Tensor, given: tuple[Tensor, ...], seeds: tuple[Tensor, ...], *, causal: bool, **scale: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        run = _aten._scaled_dot_product_flash_attention_for_cpu_backward
        return run(gradient, *given, _NO_DROPOUT, causal, attn_mask=None, **scale)  # type: ignore[no-any-return]


class _Flash(AttentionKernel):
    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *, causal: bool, scale: float | None
    ) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        run = _aten._scaled_dot_product_flash_attention
        output, lse, *others = run(query, key, value, _NO_DROPOUT, causal, False, scale=scale)
        return output, lse, tuple(others[4:6])

    def backward(
        self, gradient: Tensor, given: tuple[Tensor, ...], seeds: tuple[Tensor, ...], *, causal: bool, **scale: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        run = _aten._scaled_dot_product_flash_attention_backward
        lengths = given[0].shape[-2], given[1].shape[-2]
        return run(gradient, *given, None, None, *lengths, _NO_DROPOUT, causal, *seeds, **scale)  # type: ignore[no-any-return]


class _Cudnn(AttentionKernel):
    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *, causal: bool, scale: float | None
    ) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        run = _aten._scaled_dot_product_cudnn_attention
        output, lse, *others = run(query, key, value, None, True, _NO_DROPOUT, causal, False, scale=scale)
        return output, lse, tuple(others[4:6])

    def backward(
        self, gradient: Tensor, given: tuple[Tensor, ...], seeds: tuple[Tensor, ...], *, causal: bool, **scale: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        run = _aten._scaled_dot_product_cudnn_attention_backward
        lengths = given[0].shape[-2], given[1].shape[-2]
        return run(gradient, *given, *seeds, None, None, None, *lengths, _NO_DROPOUT, causal, **scale)  # type: ignore[no-any-return]


KERNELS: dict[str, AttentionKernel] = {"cpu": _OnCpu(), "flash": _Flash(), "cudnn": _Cudnn()}


def chosen_kernel(query: Tensor, key: Tensor, value: Tensor, *, scale: float | None, enable_gqa: bool) -> str | None:
    """The key in `KERNELS` of what `scaled_dot_product_attention` would take for a causal mask; None if another."""
    found = torch._fused_sdp_choice(query, key, value, None, _NO_DROPOUT, True, scale=scale, enable_gqa=enable_gqa)
    if found == SDPBackend.CUDNN_ATTENTION.value:
        return "cudnn"
    if found == SDPBackend.FLASH_ATTENTION.value:
        return "flash" if query.is_cuda else "cpu"
    return None
