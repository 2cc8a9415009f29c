"""Graph capture of torch.compile (PyTorch 2.11 to 2.13). Import it late: it takes seconds."""

from torch._functorch.aot_autograd import aot_function
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table

__all__ = ["aot_function", "min_cut_rematerialization_partition", "select_decomp_table"]
