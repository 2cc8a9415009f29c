"""Modes that see every operator or torch function, and what keeps them away (PyTorch 2.11 to 2.13)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack, _pop_mode_temporarily
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

__all__ = ["TorchDispatchMode"]

outside_of_modes: Callable[[], AbstractContextManager[Any]] = _disable_current_modes
"""No dispatch mode is active in here; a fake tensor mode is one."""

function_modes: Callable[[], list[TorchFunctionMode]] = _get_current_function_mode_stack
"""The function modes that are active, the innermost last."""

without_innermost_mode: Callable[[], AbstractContextManager[Any]] = _pop_mode_temporarily
"""The innermost function mode rests in here."""

without_torch_function = torch._C.DisableTorchFunction
"""Neither function modes nor classes of tensors see torch functions in here."""

without_tensor_classes = torch._C.DisableTorchFunctionSubclass
"""Classes of tensors do not see torch functions in here; function modes do."""
