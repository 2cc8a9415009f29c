"""Errors of data-dependent shapes (PyTorch 2.11 to 2.13). Import it late: it imports sympy."""

from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

__all__ = ["GuardOnDataDependentSymNode"]
