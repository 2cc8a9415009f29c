from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from meshwright.torch_private.fake_tensors import FakeTensorMode
from meshwright.torch_private.tensors import (
    READ_VERSION,
    TensorBase,
    gradient_hooks,
    is_meta,
    is_traceable_wrapper_subclass,
    make_subclass,
    make_wrapper,
    set_gradient_hooks,
    storage_id,
    version_of,
)


class Named(torch.Tensor):
    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError


class Lying(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func)
        return False if getattr(func, "__name__", "") == "__get__" else func(*args, **(kwargs or {}))


def test_changes_in_place_are_counted() -> None:
    x = torch.ones(2)
    before = version_of(x)
    x.add_(1)
    x[:1].zero_()
    assert version_of(x) == before + 2


def test_a_storage_is_known_by_a_number() -> None:
    x, other = torch.ones(4), torch.ones(4)
    assert storage_id(x.untyped_storage()) == storage_id(x[2:].untyped_storage())
    assert storage_id(x.untyped_storage()) != storage_id(other.untyped_storage())
    meta = torch.ones(4, device="meta"), torch.ones(4, device="meta")
    assert storage_id(meta[0].untyped_storage()) != storage_id(meta[1].untyped_storage())


def test_a_tensor_gets_another_class() -> None:
    x = torch.ones(2)
    made = make_subclass(Named, x)
    assert type(made) is Named and storage_id(made.untyped_storage()) == storage_id(x.untyped_storage())


def test_a_wrapper_has_no_memory() -> None:
    made = make_wrapper(Named, (1 << 40,), dtype=torch.float32, device=torch.device("cpu"))
    assert type(made) is Named and made.shape == (1 << 40,) and made.device.type == "cpu"


def test_a_mode_is_called_with_a_property_of_the_base_class() -> None:
    with Lying() as mode:
        assert not torch.ones(2, device="meta").is_meta
        assert not torch.ones(2).device
    assert vars(TensorBase)["is_meta"].__get__ in mode.seen and vars(TensorBase)["device"].__get__ in mode.seen


def test_no_mode_hides_that_a_tensor_is_meta() -> None:
    meta, real = torch.ones(2, device="meta"), torch.ones(2)
    with Lying():
        assert is_meta(meta) and not is_meta(real)


def test_a_fake_tensor_wraps_no_other() -> None:
    with FakeTensorMode():
        assert not is_traceable_wrapper_subclass(torch.ones(2))
    assert not is_traceable_wrapper_subclass(nn.Parameter(torch.ones(2)))


def test_hooks_go_to_another_tensor() -> None:
    calls = []
    hooked, bare = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    assert gradient_hooks(bare) == (None, None)
    hooked.register_hook(lambda gradient: calls.append("gradient"))
    hooked.register_post_accumulate_grad_hook(lambda parameter: calls.append("accumulated"))
    set_gradient_hooks(bare, *gradient_hooks(hooked))
    bare.sum().backward()
    assert calls == ["gradient", "accumulated"]


def test_a_mode_sees_that_a_version_is_read() -> None:
    seen = []

    class Seen(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    x = torch.ones(2)
    with Seen():
        version_of(x)
    assert READ_VERSION in seen
