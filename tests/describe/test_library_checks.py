"""Libraries do not recognise fake tensors, except where a compiler would run them. No library is imported."""

import sys
from types import ModuleType

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from meshwright.describe.as_on_cuda import as_compiled
from meshwright.describe.library_checks import CHECKS, fakes_pass_as_real


def test_a_loaded_library_is_told_no_but_not_while_compiling(monkeypatch: pytest.MonkeyPatch) -> None:
    ((module_name, name),) = CHECKS
    library = ModuleType(module_name)
    setattr(library, name, lambda tensor: True)
    monkeypatch.setitem(sys.modules, module_name, library)
    with fakes_pass_as_real():
        assert not library.is_fake_tensor(0)
        with as_compiled():
            assert library.is_fake_tensor(0)
    assert library.is_fake_tensor(0)


def test_a_library_that_is_not_loaded_stays_so(monkeypatch: pytest.MonkeyPatch) -> None:
    ((module_name, _),) = CHECKS
    monkeypatch.delitem(sys.modules, module_name, raising=False)
    with fakes_pass_as_real():
        assert module_name not in sys.modules


def test_a_module_that_is_moved_to_where_it_is_keeps_its_parameters_within_a_step() -> None:
    """As routers of experts are, to compute in fp32 whatever the rest does."""
    with FakeTensorMode(), fakes_pass_as_real():
        layer = nn.Linear(4, 4)
        before, result = layer.weight, layer(torch.ones(2, 4))
        assert layer.to(torch.float32).weight is before
        result.sum().backward()
        with pytest.raises(RuntimeError, match="swap"):  # what changes them is PyTorch's to refuse
            layer.to(torch.bfloat16)
