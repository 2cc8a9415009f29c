"""Activation checkpointing: blocks forget their inner activations and compute them again in backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from meshwright.describe.flops import operator_kind
from meshwright.strategies.forward import Around, wrap_forward
from meshwright.torch_private.modules import BatchNorm


def recompute_blocks(blocks: list[nn.Module], kind: str) -> None:
    """`full` keeps a block's inputs only, `selective` also the results that are dear to compute."""
    around = _selective if kind == "selective" else _full
    for block in blocks:
        wrap_forward(block, _with_batch_norms(around) if _batch_norms(block) else around)


def _full(module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any, **options: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    return checkpoint(forward, *args, use_reentrant=False, **options, **kwargs)


def _selective(module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any, **options: Any) -> Any:
    return _full(module, forward, args, kwargs, **{"context_fn": _keep_the_dear, **options})


def _keep_the_dear() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    return create_selective_checkpoint_contexts(_keep)  # type: ignore[no-any-return]


@cache
def _with_batch_norms(around: Callable[..., Any]) -> Around:
    def recompute(module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        def contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
            first, second = _keep_the_dear() if around is _selective else (nullcontext(), nullcontext())
            return first, _with_still_statistics(_batch_norms(module), second)

        return around(module, forward, args, kwargs, context_fn=contexts)

    return recompute


def _batch_norms(block: nn.Module) -> list[Any]:
    return [m for m in block.modules() if isinstance(m, BatchNorm)]


@contextmanager
def _with_still_statistics(norms: list[Any], inner: AbstractContextManager[Any]) -> Iterator[None]:
    """The second run of a block must not count its batch into the running statistics again."""
    before = [(module.momentum, module.num_batches_tracked) for module in norms]
    for module in norms:
        # Not by switching tracking off: BatchNorm would then save other tensors than in the first run.
        module.momentum = 0.0
        if module.num_batches_tracked is not None:
            module.num_batches_tracked = module.num_batches_tracked.clone()
    try:
        with inner:
            yield
    finally:
        for module, (momentum, count) in zip(norms, before, strict=True):
            module.momentum, module.num_batches_tracked = momentum, count


def _keep(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if _is_dear(operator) else CheckpointPolicy.PREFER_RECOMPUTE


@cache
def _is_dear(operator: Any) -> bool:
    """Dear to compute and cheap to keep: matrix products, convolutions and attention."""
    return getattr(operator, "namespace", "") == "aten" and operator_kind(operator) != "other"
