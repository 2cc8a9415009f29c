"""Memory that CUDA libraries allocate for themselves, which operators on fake tensors do not show."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from meshwright.describe.flops import operator_kind
from meshwright.tracing.memory import Ledger

CUBLAS = 32 << 20
"""Bytes of PyTorch's workspace for each cuBLAS handle on Hopper (the default; 8.1 MiB on older GPUs)."""


class Workspaces:
    """The cuBLAS workspaces: one handle per thread, and forward and backward run on two threads."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._allocated: set[bool] = set()

    def note(self, func: Any, args: Any, made: list[Tensor], phase: str) -> None:
        thread = phase == "backward"
        if operator_kind(func) == "matmul" and thread not in self._allocated:
            self._allocated.add(thread)
            self._ledger.allocate(CUBLAS, "temporary")
