"""Precision with one meaning under every strategy.

Under `bf16` and `fp16` a model computes with parameters cast to that dtype; the model's and each block's floating
inputs are cast to it; buffers stay as they are; outputs come back in fp32. Gradients are cast to fp32 before they are
summed over micro-batches or ranks, and the optimizer updates fp32 masters. FSDP2 and our ZeRO cast parameters
themselves, because then they can send and keep the small ones; for the rest each block casts its own as it runs.
(`torch.autocast` would mean something else: it picks a dtype per operator, so that the residual stream of a transformer
is fp32 under DDP and bf16 under FSDP2.)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from operator import attrgetter
from typing import Any

import torch
from torch import nn
from torch.func import functional_call
from torch.utils._pytree import tree_map

from meshwright.build.forward import Around, wrap_forward


def cast_borders(model: nn.Module, blocks: list[nn.Module], dtype: torch.dtype) -> None:
    """Cast what enters the model and each block to `dtype`, and what leaves the model to fp32."""
    for block in blocks:
        wrap_forward(block, _entering(dtype))
    wrap_forward(model, _entering(dtype))
    wrap_forward(model, _leave)


def cast_parameters(module: nn.Module, dtype: torch.dtype, *, without: list[nn.Module]) -> None:
    """While `module` runs, its parameters are copies in `dtype`; gradients flow on to the originals.

    `without` are modules inside that see to their own. The cast is inside of what activation checkpointing repeats,
    so the copies need not outlive the forward pass.
    """
    inside = {id(p) for part in without for p in part.parameters()} - _outside(module, without)
    names = tuple(n for n, p in module.named_parameters() if p.is_floating_point() and id(p) not in inside)
    if names:
        wrap_forward(module, _lowering(names, dtype))


def batch_norm_in_fp32(model: nn.Module) -> None:
    """BatchNorm's kernels want weights in the dtype of the running statistics, which stay fp32."""
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            cast_parameters(module, torch.float32, without=[])


def cast(tree: Any, dtype: torch.dtype) -> Any:
    """Floating tensors of a tree in another dtype."""
    return tree_map(lambda leaf: leaf.to(dtype) if torch.is_tensor(leaf) and leaf.is_floating_point() else leaf, tree)


@cache
def _entering(dtype: torch.dtype) -> Around:
    def enter(module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        args, kwargs = cast((args, kwargs), dtype)
        return forward(*args, **kwargs)

    return enter


def _leave(module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    return cast(forward(*args, **kwargs), torch.float32)


@cache
def _lowering(names: tuple[str, ...], dtype: torch.dtype) -> Around:
    def lowered(module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        copies = {f"module.{name}": attrgetter(name)(module).to(dtype) for name in names}
        return functional_call(_Call(module, forward), copies, args, kwargs, tie_weights=True)

    return lowered


class _Call(nn.Module):
    """Lets `functional_call` swap a module's parameters around a `forward` that is not the module's own any more."""

    def __init__(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        super().__init__()
        self.module = module
        self._inner = forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._inner(*args, **kwargs)


def _outside(module: nn.Module, parts: list[nn.Module]) -> set[int]:
    """Parameters that modules outside of `parts` hold, too."""
    inner = {id(m) for part in parts for m in part.modules()}
    return {id(p) for m in module.modules() if id(m) not in inner for p in m.parameters(recurse=False)}


@dataclass
class LossScale:
    """fp16 gradients underflow unless the loss is scaled up; a step whose gradients overflow is skipped.

    The global gradient norm is the same number on every rank, so all ranks skip the same steps. Numbers are those of
    `torch.amp.GradScaler`.
    """

    value: float = 65536.0
    growth: float = 2.0
    interval: int = 2000
    steps_since: int = 0

    def after(self, finite: bool) -> None:
        """Adapt to whether the last step's gradients were finite."""
        self.steps_since = self.steps_since + 1 if finite else 0
        if not finite:
            self.value /= self.growth
        elif self.steps_since == self.interval:
            self.value, self.steps_since = self.value * self.growth, 0
