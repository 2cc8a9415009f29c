"""When torch.compile is at work (PyTorch 2.11 to 2.13). Takes a second to import, so do it where it is needed."""

from torch._dynamo import on_compile_end, on_compile_start

__all__ = ["on_compile_end", "on_compile_start"]
