import functools
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from meshwright.torch_private.modules import (
    HOOKS,
    OTHER_ATTRIBUTES,
    REGISTERED,
    RNN_READS_ATTRIBUTES,
    SETTINGS,
    AnyBatchNorm,
    AttentionOutput,
    BatchNorm,
    Dropout,
    FixedModule,
    SyncBatchNormFunction,
    convert_tensors,
    extra_padding,
    given_to_batch_norm,
    has_global_hooks,
    incompatible_keys,
    is_compiled,
    is_plain_batch_norm,
    lend_tensors,
    overrides_convolution,
    padding_of_both_sides,
    projects_together,
    wrap_compiled_call,
)


@pytest.mark.parametrize("kind", [nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm])
def test_batch_norms_are_of_one_class(kind: Any) -> None:
    assert isinstance(kind(2), BatchNorm)


def test_a_batch_norm_takes_any_number_of_dims() -> None:
    module: Any = nn.SyncBatchNorm(2)
    module.__class__ = AnyBatchNorm
    for dims in range(2, 7):
        assert module(torch.ones(3, 2, *[1] * (dims - 2))).dim() == dims
    with pytest.raises(ValueError, match="at least 2D"):
        module(torch.ones(2))


@pytest.mark.parametrize(
    "options",
    [{}, {"momentum": None}, {"track_running_stats": False}, {"affine": False}, {"momentum": 0.3, "eps": 0.1}],
)
def test_a_batch_norm_gives_the_same_to_the_function(options: dict[str, Any]) -> None:
    own, ours = nn.BatchNorm2d(2, **options), nn.BatchNorm2d(2, **options)
    for _ in range(3):  # the share of a batch may depend on how many there were
        x = torch.randn(4, 2, 3, 3)
        expected = own(x)
        assert torch.equal(F.batch_norm(**given_to_batch_norm(ours, x), training=True), expected)
    assert all(torch.equal(*pair) for pair in zip(own.buffers(), ours.buffers(), strict=True))
    with pytest.raises(ValueError, match="expected 4D"):
        given_to_batch_norm(ours, torch.randn(4, 2))


def test_a_forward_of_its_own_is_not_pytorch_s() -> None:
    class Activated(nn.BatchNorm1d):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return super().forward(input).relu()

    for kind, plain in ((nn.BatchNorm1d, True), (nn.SyncBatchNorm, False), (Activated, False)):
        assert is_plain_batch_norm(functools.partial(kind.forward, kind(2))) == plain


@pytest.mark.parametrize("kind", [nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout])
def test_dropouts_are_of_one_class(kind: Any) -> None:
    assert isinstance(kind(0.3), Dropout) and kind(0.3).p == 0.3


def test_the_synchronised_kernels_are_called_as_they_want() -> None:
    assert list(inspect.signature(SyncBatchNormFunction.forward).parameters)[1:] == [
        *("input", "weight", "bias", "running_mean", "running_var", "eps", "momentum", "process_group", "world_size")
    ]


def test_a_module_keeps_its_tensors_and_children_there() -> None:
    module = nn.Sequential(nn.BatchNorm1d(2))
    assert set(REGISTERED) <= set(vars(module))
    assert [list(vars(module[0])[name]) for name in REGISTERED] == [
        ["weight", "bias"],
        ["running_mean", "running_var", "num_batches_tracked"],
        [],
    ]


def test_tensors_are_lent() -> None:
    module = nn.Linear(2, 2, bias=False)
    module.tied = module.weight
    own = module.weight
    with lend_tensors(module, {"weight": torch.zeros(2, 2)}, tie_weights=True):
        assert module(torch.ones(2)).tolist() == [0, 0] and module.tied is module.weight
    assert module.weight is module.tied is own


def test_tensors_are_converted_as_a_module_wants() -> None:
    class Own(nn.Linear):
        converted = False

        def _apply(self, *args: Any, **kwargs: Any) -> Any:
            self.converted = True
            return super()._apply(*args, **kwargs)

    module = Own(2, 2)
    convert_tensors(module, lambda tensor: tensor.double())
    assert module.converted and module.weight.dtype == torch.float64


def test_a_compiled_call_is_wrapped() -> None:
    calls = []

    def wrap(compiled: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args: (calls.append(1), compiled(*args))[1]

    module = nn.Linear(2, 2)
    wrap_compiled_call(module, wrap)
    module(torch.ones(2))
    assert calls == [] and not is_compiled(module)
    module.compile(backend="eager")
    assert is_compiled(module)
    wrap_compiled_call(module, wrap)
    module(torch.ones(2))
    assert calls == [1]


def test_a_convolution_of_one_s_own_is_told_apart() -> None:
    class Own(nn.Conv1d):
        def _conv_forward(self, *args: Any) -> Any:
            return super()._conv_forward(*args)

    class Plain(nn.Conv1d):
        pass

    assert overrides_convolution(Own(2, 2, 1), nn.Conv1d)
    assert not overrides_convolution(Plain(2, 2, 1), nn.Conv1d)


@pytest.mark.parametrize("padding", [(1, 2), "same"])
def test_padding_is_as_the_convolution_pads(padding: Any) -> None:
    module = nn.Conv2d(2, 2, 3, padding=padding, padding_mode="circular")
    x = torch.randn(1, 2, 5, 6)
    padded = F.pad(x, padding_of_both_sides(module), mode="circular")
    torch.testing.assert_close(F.conv2d(padded, module.weight, module.bias), module(x))


@pytest.mark.parametrize("size", [None, [9, 12]])
def test_extra_padding_is_that_of_the_convolution(size: list[int] | None) -> None:
    module = nn.ConvTranspose2d(2, 2, 3, stride=2, padding=1, output_padding=0)
    x = torch.randn(1, 2, 5, 6)
    extra = extra_padding(module, x, size)
    found = F.conv_transpose2d(x, module.weight, module.bias, module.stride, module.padding, extra)
    torch.testing.assert_close(found, module(x, size))


def test_attention_says_how_it_keeps_its_weights() -> None:
    assert projects_together(nn.MultiheadAttention(4, 2))
    assert not projects_together(nn.MultiheadAttention(4, 2, kdim=3, vdim=5))


@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, nn.LSTM])
def test_a_recurrent_module_reads_its_attributes(kind: Any) -> None:
    reads = []

    def weight(self: Any) -> torch.Tensor:
        reads.append(1)
        return self._parameters["weight_ih_l0"] * 0

    module, x = kind(2, 2), torch.randn(3, 1, 2)
    cls = type(kind.__name__, (kind,), {"weight_ih_l0": property(weight), **RNN_READS_ATTRIBUTES})
    module.__class__ = cls
    assert torch.equal(module(x)[0], module(x + 1)[0]) and reads


class Fixed(FixedModule):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)

    def refuse_change(self, what: str) -> None:
        raise ValueError(what)

    def refuse_ddp(self) -> None:
        raise ValueError("not in DDP")


def test_a_fixed_module_is_neither_moved_nor_cast() -> None:
    module = Fixed()
    assert module.to("cpu") is module and module.float() is module
    for change, what in ((module.half, "float16"), (lambda: module.to("meta"), "meta")):
        with pytest.raises(ValueError, match=what):
            change()
    assert module.inner.weight.dtype == torch.float32


def test_a_fixed_module_is_not_wrapped_in_ddp(monkeypatch: pytest.MonkeyPatch) -> None:
    """DDP asks for what it shall ignore before it sends anything."""
    monkeypatch.setattr("torch.nn.parallel.distributed._get_default_group", lambda: None)
    with pytest.raises(ValueError, match="not in DDP"):
        nn.parallel.DistributedDataParallel(Fixed())


def test_what_load_state_dict_returns() -> None:
    plain = nn.Linear(2, 2).load_state_dict({"x": torch.ones(1)}, strict=False)
    assert plain == incompatible_keys(["weight", "bias"], ["x"])


def test_the_attributes_of_every_module_are_known() -> None:
    own = {"training", "_parameters", "_buffers", "_modules"}
    assert set(vars(nn.Module())) == {*own, *HOOKS, *OTHER_ATTRIBUTES}


def test_hooks_of_all_modules_are_seen() -> None:
    assert not has_global_hooks()
    handle = nn.modules.module.register_module_forward_hook(lambda *given: None)
    assert has_global_hooks()
    handle.remove()
    assert not has_global_hooks()


def test_settings_are_read_from_one_module() -> None:
    assert torch.is_grad_enabled.__self__ is SETTINGS is torch._C._get_deterministic_algorithms.__self__


def test_the_output_layer_of_attention_has_a_class_of_its_own() -> None:
    """`nn.MultiheadAttention` reads its weight without calling it."""
    assert type(nn.MultiheadAttention(4, 2).out_proj) is AttentionOutput and issubclass(AttentionOutput, nn.Linear)
