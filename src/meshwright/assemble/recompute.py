"""Activation checkpointing: blocks drop their inner activations and recompute them in backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from meshwright.assemble.given_arguments import on_given_arguments
from meshwright.assemble.selective import run_selectively
from meshwright.describe.flops import operator_kind
from meshwright.recording.wrap_forward import Around, wrap_forward
from meshwright.strategies.recorder import Choices
from meshwright.torch_private.modules import BatchNorm


def recompute_blocks(blocks: list[nn.Module], kind: str, *, by_operator: bool = False) -> None:
    """Checkpoint each block: `full` keeps only its inputs, `selective` also results that are expensive to compute.

    `selective` runs single functions again (`selective.py`). `by_operator` selects PyTorch's selective checkpointing,
    which runs blocks again and looks at every operator: torch.compile traces it, and it sees autocast's casts.
    """
    if kind == "selective" and not by_operator:
        for block in blocks:
            wrap_forward(block, _by_function)
        return
    around = _selective if kind == "selective" else _full
    for block in blocks:
        wrap_forward(block, _with_batch_norms(around) if _batch_norms(block) else around)


def _by_function(module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    if torch.compiler.is_compiling():  # a user compiles the model
        return _selective(module, forward, args, kwargs)
    return run_selectively(forward, args, kwargs)


def _full(module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any, **options: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    if not torch.compiler.is_compiling():
        forward = on_given_arguments(forward, args, kwargs)
    if torch.compiler.is_compiling() or _batch_norms(module):  # a program would count a batch twice
        return checkpoint(forward, *args, use_reentrant=False, **options, **kwargs)
    made = Choices()

    def run(*args: Any, **kwargs: Any) -> Any:
        with made.deciding():
            return forward(*args, **kwargs)

    return checkpoint(run, *args, use_reentrant=False, **options, **kwargs)


def _selective(module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any, **options: Any) -> Any:
    return _full(module, forward, args, kwargs, **{"context_fn": _selective_contexts, **options})


def _selective_contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    return create_selective_checkpoint_contexts(_keep)  # type: ignore[no-any-return]


@cache
def _with_batch_norms(around: Callable[..., Any]) -> Around:
    def recompute(module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        def contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
            first, second = _selective_contexts() if around is _selective else (nullcontext(), nullcontext())
            return first, _frozen_statistics(_batch_norms(module), second)

        return around(module, forward, args, kwargs, context_fn=contexts)

    return recompute


def _batch_norms(block: nn.Module) -> list[Any]:
    return [m for m in block.modules() if isinstance(m, BatchNorm)]


@contextmanager
def _frozen_statistics(norms: list[Any], inner: AbstractContextManager[Any]) -> Iterator[None]:
    """Keep running statistics fixed, because recomputing a block must not count its batch twice."""
    before = [(module.momentum, module.num_batches_tracked) for module in norms]
    for module in norms:
        # With tracking off, BatchNorm would save other tensors than in the first run.
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
    return CheckpointPolicy.MUST_SAVE if _is_expensive(operator) else CheckpointPolicy.PREFER_RECOMPUTE


@cache
def _is_expensive(operator: Any) -> bool:
    """Whether it is expensive to compute and cheap to keep: matrix products, convolutions and attention."""
    return getattr(operator, "namespace", "") == "aten" and operator_kind(operator) != "other"
