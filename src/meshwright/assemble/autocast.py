"""`bf16:autocast` and `fp16:autocast`: `torch.autocast` around the model and its loss, with parameters in fp32.

PyTorch chooses each operator's dtype from a list per device type. Fake tensors are CPU tensors, so for them the table
in `operator_dtypes.py` imitates the CUDA list.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cache, partial
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from meshwright.assemble.operator_dtypes import CASTABLE, RULES, Rule, cast_arguments, functions, in_fp32, low, norm
from meshwright.describe.dtypes import DTYPES
from meshwright.facts.strategy import Strategy
from meshwright.recording.wrap_forward import Around, wrap_forward

Region = Callable[[], AbstractContextManager[Any]]


def autocast_region(strategy: Strategy, device: str, *, fake: bool = False) -> Region | None:
    """The context for calls of the model and the loss; None if the strategy does not use autocast.

    `fake` means that CPU tensors stand in for CUDA tensors.
    """
    return _region(DTYPES[strategy.precision], device, fake) if strategy.autocast else None


def run_within(model: nn.Module, blocks: list[nn.Module], region: Region) -> None:
    """Enter the region in every call of the model and of a block, because recomputing calls blocks directly."""
    for module in (*blocks, model):
        wrap_forward(module, _within(region))


class AsOnCuda(TorchFunctionMode):
    """Mode that gives results the dtypes of CUDA's autocast."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        rule = _ON_CUDA.get(func)
        return func(*args, **(kwargs or {})) if rule is None else rule(func, self.dtype, args, kwargs or {})


def _lowered(func: Any, dtype: torch.dtype, args: Any, kwargs: Any) -> Any:
    args, kwargs = cast_arguments((args, kwargs), CASTABLE, dtype)
    return func(*args, **kwargs)


_INSTEAD: dict[Rule, Rule] = {low: _lowered, norm: in_fp32}
_ON_CUDA: dict[Any, Rule] = {func: _INSTEAD.get(rule, rule) for func, rule in RULES.items()}
_ON_CUDA |= dict.fromkeys(functions("interpolate upsample"), in_fp32)


@cache
def _region(dtype: torch.dtype, device: str, fake: bool) -> Region:
    return partial(AsOnCuda, dtype) if fake else partial(torch.autocast, device, dtype=dtype)


@cache
def _within(region: Region) -> Around:
    def enter(module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        with region():
            return forward(*args, **kwargs)

    return enter
