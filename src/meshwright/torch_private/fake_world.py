"""The store of the backend "fake", whose other ranks do not exist (PyTorch 2.11 to 2.13). Importing it registers it."""

from torch.testing._internal.distributed.fake_pg import FakeStore

__all__ = ["FakeStore"]
