import torch

from meshwright.torch_private.fake_tensors import FakeTensorMode
from meshwright.torch_private.foreach import clipping_by_lists, foreach_copy_, foreach_mul_, foreach_norm, unflatten
from meshwright.torch_private.modes import TorchDispatchMode


def test_tensors_are_scaled_together() -> None:
    tensors = [torch.ones(2), torch.ones(3)]
    foreach_mul_(tensors, 2.0)
    foreach_mul_(tensors, torch.tensor(3.0))
    assert [tensor.tolist() for tensor in tensors] == [[6, 6], [6, 6, 6]]


def test_norms_are_taken_together() -> None:
    assert [float(norm) for norm in foreach_norm([torch.ones(4), torch.ones(9)])] == [2, 3]


def test_parts_of_a_flat_tensor_share_its_memory() -> None:
    flat = torch.arange(8.0)
    parts = unflatten(flat, [torch.empty(2, 3), torch.empty(()), torch.empty(1)])
    assert [part.shape for part in parts] == [(2, 3), (), (1,)]
    flat.zero_()
    assert not any(part.any() for part in parts)


def test_copies_change_dtypes_and_keep_strides() -> None:
    source = [torch.randn(3, 4).t(), torch.randn(5)]
    target = [torch.empty_like(tensor, dtype=torch.bfloat16) for tensor in source]
    foreach_copy_(target, source)
    assert all(torch.equal(low, full.to(torch.bfloat16)) for low, full in zip(target, source, strict=True))
    assert target[0].stride() == (1, 4)


def test_fake_tensors_are_clipped_together() -> None:
    class Names(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            names.append(func.overloadpacket.__name__)
            return func(*args, **(kwargs or {}))

    names: list[str] = []
    with FakeTensorMode(), Names():
        tensors = [torch.ones(2), torch.ones(3)]
        torch.nn.utils.get_total_norm(tensors)
        assert "_foreach_norm" not in names
        with clipping_by_lists():
            torch.nn.utils.get_total_norm(tensors)
    assert "_foreach_norm" in names
