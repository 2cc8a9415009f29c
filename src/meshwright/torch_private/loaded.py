"""What of PyTorch is loaded in this process."""

import sys


def compiler_is_loaded() -> bool:
    """Whether anybody has compiled something: PyTorch loads its compiler only then."""
    return "torch._dynamo" in sys.modules
