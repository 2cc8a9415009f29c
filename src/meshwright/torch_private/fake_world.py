"""Store for the backend "fake", which importing this registers: other ranks do not exist (PyTorch 2.11 to 2.13)."""

from torch.testing._internal.distributed.fake_pg import FakeStore

__all__ = ["FakeStore"]
