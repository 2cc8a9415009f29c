"""Shapes that depend on values (PyTorch 2.11 to 2.13). Imports a computer algebra, so do it where it is needed."""

from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

__all__ = ["GuardOnDataDependentSymNode"]
