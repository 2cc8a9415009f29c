"""Memory that CUDA libraries take for themselves, which no operator on fake tensors shows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from meshwright.tracing.memory import Ledger

aten = torch.ops.aten
CUBLAS = 32 << 20
"""Bytes that PyTorch lends to each cuBLAS handle on Hopper (its default; 8.1 MiB on older GPUs)."""
_PRODUCTS = (aten.mm, aten.addmm, aten.bmm, aten.baddbmm, aten.addbmm)


class Workspaces:
    """cuBLAS has a handle a thread: forward and backward run on two, and each keeps its workspace."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._lent: set[bool] = set()

    def note(self, func: Any, args: Any, made: list[Tensor], phase: str) -> None:
        packet = func.overloadpacket
        thread = phase == "backward"
        if packet in _PRODUCTS and thread not in self._lent:
            self._lent.add(thread)
            self._ledger.allocate(CUBLAS, "temporary")
