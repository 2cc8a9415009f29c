"""Callbacks around each compilation (PyTorch 2.11 to 2.13). Import it late: it takes a second."""

from torch._dynamo import on_compile_end, on_compile_start

__all__ = ["on_compile_end", "on_compile_start"]
