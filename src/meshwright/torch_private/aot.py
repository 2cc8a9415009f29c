"""Graph capture of torch.compile (PyTorch 2.11 to 2.13). Import it late: it takes seconds."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch
import torch._inductor.lowering  # the decomposition of max pooling reads it, and does not import it
from torch._functorch.aot_autograd import aot_function
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table

__all__ = ["aot_function", "called_compiling", "min_cut_rematerialization_partition", "select_decomp_table"]


@contextmanager
def called_compiling() -> Iterator[None]:
    """While active, `torch.compiler.is_compiling()` is true, as for the code that torch.compile captures."""
    with patch.object(torch.compiler, "_is_compiling_flag", True):
        yield
