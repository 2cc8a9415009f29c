"""Modes that intercept operators or torch functions, and contexts that switch them off (PyTorch 2.11 to 2.13)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch._C._functorch import peek_interpreter_stack
from torch.overrides import (
    TorchFunctionMode,
    _get_current_function_mode_stack,
    _pop_mode,
    _pop_mode_temporarily,
    _push_mode,
)
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

__all__ = ["TorchDispatchMode"]

outside_of_modes: Callable[[], AbstractContextManager[Any]] = _disable_current_modes
"""Context without any dispatch mode, fake tensor modes included."""

function_modes: Callable[[], list[TorchFunctionMode]] = _get_current_function_mode_stack
"""The active function modes, innermost last."""

without_innermost_mode: Callable[[], AbstractContextManager[Any]] = _pop_mode_temporarily
"""Context in which the innermost function mode is off."""


def in_transform() -> bool:
    """Whether a transform of `torch.func`, such as `vmap` or `grad`, is running: its tensors have no storage."""
    return peek_interpreter_stack() is not None


without_torch_function = torch._C.DisableTorchFunction
"""Context in which neither function modes nor tensor subclasses see torch functions."""

without_tensor_classes = torch._C.DisableTorchFunctionSubclass
"""Context in which tensor subclasses do not see torch functions; function modes still do."""


@contextmanager
def below_all_modes(
    mode: TorchFunctionMode, but: Callable[[TorchFunctionMode], bool] = lambda _: False
) -> Iterator[None]:
    """Context in which a function mode is the outermost one: it sees functions after the modes that are active now.

    Modes that `but` is true of stay below it.
    """
    modes = function_modes()
    below = [one for one in modes if but(one)]
    with _modes([*below, mode, *(one for one in modes if one not in below)]):
        yield


@contextmanager
def only_mode(mode: TorchFunctionMode) -> Iterator[None]:
    """Context in which no other function mode is active."""
    with _modes([mode]):
        yield


@contextmanager
def _modes(wanted: list[TorchFunctionMode]) -> Iterator[None]:
    before = function_modes()
    _replace(len(before), wanted)
    try:
        yield
    finally:
        _replace(len(wanted), before)


def _replace(count: int, modes: list[TorchFunctionMode]) -> None:
    for _ in range(count):
        _pop_mode()
    for mode in modes:
        _push_mode(mode)
