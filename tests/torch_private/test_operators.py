from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import SDPBackend

from meshwright.torch_private.fake_tensors import FakeTensorMode
from meshwright.torch_private.modes import TorchDispatchMode
from meshwright.torch_private.operators import (
    CUDNN_ATTENTION,
    CUDNN_ATTENTION_BACKWARD,
    CUDNN_RNN,
    CUDNN_RNN_BACKWARD,
    DEVICE_OF,
    DISTANCES,
    EFFICIENT_ATTENTION,
    EFFICIENT_ATTENTION_BACKWARD,
    FLASH_ATTENTION,
    FLASH_ATTENTION_BACKWARD,
    FLASH_ATTENTION_ON_CPU,
    FUNCTIONS,
    FUSED_GRU_CELL,
    FUSED_LSTM_CELL,
    FUSED_RMS_NORM,
    FUSED_RMS_NORM_BACKWARD,
    LOG_SOFTMAX,
    LOG_SOFTMAX_BACKWARD,
    MATH_ATTENTION,
    PACK_PADDED_SEQUENCE,
    PAD_PACKED_SEQUENCE,
    PUT_AT_INDICES,
    READ_NUMBER,
    RESHAPE_ALIAS,
    SAFE_SOFTMAX,
    SOFTMAX,
    SOFTMAX_BACKWARD,
    TO_REAL_FOURIER,
    UNSAFE_VIEW,
    OpOverload,
    choose_attention,
    flop_registry,
    reads_values,
    replaced_kernels,
    schema_of,
    take_apart,
)
from meshwright.torch_private.tensors import TensorBase

aten = torch.ops.aten


class Operators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


def test_a_schema_says_what_is_written() -> None:
    schema = schema_of(aten.add_.Tensor)
    assert schema.name == "aten::add_" and schema.is_mutable
    assert [argument.name for argument in schema.arguments] == ["self", "other", "alpha"]
    assert schema.arguments[0].alias_info.is_write and schema.arguments[1].alias_info is None
    assert str(schema.returns[0].type) == "Tensor"


def test_an_operator_belongs_to_a_packet() -> None:
    assert isinstance(aten.mm.default, OpOverload) and aten.mm.default.overloadpacket is aten.mm


def test_products_and_attention_have_a_formula() -> None:
    assert {aten.mm, aten.addmm, aten.bmm, aten.convolution, FLASH_ATTENTION, EFFICIENT_ATTENTION} <= set(flop_registry)
    assert flop_registry[aten.mm](torch.ones(2, 3), torch.ones(3, 5), out_val=torch.ones(2, 5)) == 60


@pytest.mark.parametrize("name", ["linear", "gelu", "nll_loss_nd", "scaled_dot_product_attention"])
def test_functions_are_kept_there(name: str) -> None:
    assert callable(getattr(FUNCTIONS, name))


def test_kernels_are_replaced_for_a_while() -> None:
    x = torch.ones(2)
    with replaced_kernels({("dropout", "AutogradCPU"): lambda input, p, train: input * 0}):
        assert torch.dropout(x, 0.5, False).tolist() == [0, 0]
    assert torch.dropout(x, 0.5, False).tolist() == [1, 1]


def test_compilers_forget_kernels_that_were_replaced() -> None:
    def gradient(x: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad(torch.dropout(x.sin(), 0.0, True).sum(), x)[0]

    def traced() -> list[float]:
        x = torch.zeros(2, requires_grad=True)
        return make_fx(gradient, tracing_mode="symbolic")(x)(x).tolist()

    assert traced() == [1, 1]
    with replaced_kernels({("dropout", "AutogradCPU"): lambda input, p, train: input * 3}):
        assert traced() == [3, 3]
    assert traced() == [1, 1]


def test_a_composite_operator_is_taken_apart() -> None:
    x = torch.ones(2, 4)
    with Operators() as mode:
        found = take_apart(aten.rms_norm.default, x, [4], None, 1e-6)
    assert aten.rms_norm.default not in mode.seen and len(mode.seen) > 1
    torch.testing.assert_close(found, F.rms_norm(x, [4]))
    assert torch.equal(take_apart(aten.dropout.default, x, 0.5, False), x)


def test_fake_tensors_are_asked_for_their_device_by_an_operator() -> None:
    with FakeTensorMode():
        x = torch.ones(2)
    with Operators() as mode:
        assert vars(TensorBase)["device"].__get__(x).type == "cpu"
    assert mode.seen == [DEVICE_OF]


def test_attention_says_which_kernel_it_takes() -> None:
    q = torch.randn(1, 2, 8, 16)
    arguments: dict[str, Any] = {"scale": None, "enable_gqa": False}
    assert choose_attention(q, q, q, None, 0.0, True, **arguments) == SDPBackend.FLASH_ATTENTION.value
    assert choose_attention(q, q, q, None, 0.5, True, **arguments) == SDPBackend.MATH.value


def test_attention_gives_the_same_by_each_kernel_of_a_cpu() -> None:
    q = torch.randn(1, 2, 8, 16)
    expected = F.scaled_dot_product_attention(q, q, q, is_causal=True)
    flash = FLASH_ATTENTION_ON_CPU(q, q, q, 0.0, True, attn_mask=None, scale=None)[0]
    plain = MATH_ATTENTION(q, q, q, None, 0.0, True, scale=None, enable_gqa=False)[0]
    torch.testing.assert_close(flash, expected)
    torch.testing.assert_close(plain, expected)


def test_attention_of_a_gpu_keeps_one_number_a_row() -> None:
    q = torch.empty(1, 2, 64, 16, device="meta")
    output, lse, *_ = FLASH_ATTENTION(q, q, q, 0.0, True, False, scale=None)
    assert output.shape == q.shape and lse.shape == (1, 2, 64)
    output, lse, *_ = EFFICIENT_ATTENTION(q, q, q, None, True, 0.0, True, scale=None)
    assert output.shape == q.shape and lse.shape == (1, 2, 64)
    names = [argument.name for argument in schema_of(CUDNN_ATTENTION.default).arguments]
    assert names[:4] == ["query", "key", "value", "attn_bias"]
    output, lse, *_ = CUDNN_ATTENTION(q, q, q, q.new_empty(1, 2, 64, 64), True, 0.0, False, False, scale=None)
    assert output.shape == q.shape and lse.shape == (1, 2, 64, 1)
    assert schema_of(CUDNN_ATTENTION_BACKWARD.default).arguments[0].name == "grad_out"


def test_a_fused_norm_keeps_one_number_a_row() -> None:
    output, rstd = FUSED_RMS_NORM(torch.ones(2, 4, device="meta"), [4], None, 1e-6)
    assert output.shape == (2, 4) and rstd.shape == (2, 1)


def test_sequences_are_packed_by_these() -> None:
    x, lengths = torch.randn(3, 2, 4), torch.tensor([3, 2])
    data, sizes = PACK_PADDED_SEQUENCE(x, lengths, False)
    assert sizes.tolist() == [2, 2, 1]
    padded, found = PAD_PACKED_SEQUENCE(data, sizes, False, 0.0, 3)
    assert padded.shape == x.shape and torch.equal(found, lengths)


def test_these_only_look_otherwise_at_a_tensor() -> None:
    x = torch.arange(6)
    assert torch.equal(UNSAFE_VIEW.default(x, [2, 3]), x.view(2, 3))
    assert torch.equal(RESHAPE_ALIAS.default(x, [2, 3], [3, 1]), x.view(2, 3))


@pytest.mark.parametrize(
    "name", ["_to_copy", "_unsafe_index", "_unsafe_index_put", "_unsafe_masked_index_put_accumulate", "_lu_with_info"]
)
def test_operators_that_are_compared_as_text_are_there(name: str) -> None:
    assert hasattr(aten, name)


@pytest.mark.parametrize("name", ["_low_memory_max_pool_with_offsets", "_low_memory_max_pool_offsets_to_indices"])
def test_operators_of_the_compiler_are_there(name: str) -> None:
    import torch._inductor.inductor_prims  # registers them

    assert hasattr(torch.ops.prims, name)


def test_operators_that_depend_on_values_are_known() -> None:
    aten, x = torch.ops.aten, torch.ones(3)
    assert reads_values(aten._local_scalar_dense.default, (x,)) and reads_values(aten.nonzero.default, (x,))
    assert reads_values(aten.index.Tensor, (x, [x > 0])) and not reads_values(aten.index.Tensor, (x, [None, x.long()]))
    assert not reads_values(aten.mul.Tensor, (x, x))


def test_reading_a_number_is_one_operator() -> None:
    with Operators() as operators:
        assert torch.full((1,), 3.0).item() == 3.0
    assert READ_NUMBER in operators.seen


@pytest.mark.parametrize("backward", [FLASH_ATTENTION_BACKWARD, EFFICIENT_ATTENTION_BACKWARD])
def test_attention_backward_names_its_arguments(backward: Any) -> None:
    names = [argument.name for argument in schema_of(backward.default).arguments]
    assert {"query", "key", "value", "is_causal", "dropout_p", "scale"} <= set(names)
    assert {"grad_out", "grad_out_"} & set(names)


def test_recurrent_operators_name_their_arguments() -> None:
    names = [
        [argument.name for argument in schema_of(one.default).arguments] for one in (CUDNN_RNN, CUDNN_RNN_BACKWARD)
    ]
    common = ["input", "weight", "weight_stride0", "weight_buf", "hx", "cx"]
    assert [one[:6] for one in names] == [common, common]
    assert all({"batch_first", "proj_size"} <= set(one) for one in names)


def test_operators_behind_functions() -> None:
    """The names under which a trace meets softmax, norms, look-ups, distances and Fourier transforms."""
    x = torch.rand(2, 4, requires_grad=True)
    calls = {
        (SOFTMAX, SOFTMAX_BACKWARD): lambda: x.softmax(-1),
        (LOG_SOFTMAX, LOG_SOFTMAX_BACKWARD): lambda: x.log_softmax(-1),
        (DISTANCES,): lambda: torch.cdist(x, x),
        (TO_REAL_FOURIER,): lambda: torch.fft.irfft(torch.fft.rfft(x)),
    }
    for operators, function in calls.items():
        with Operators() as mode:
            function().square().sum().backward()
        assert {operator.default for operator in operators} <= set(mode.seen)
    assert torch.equal(SAFE_SOFTMAX.default(x.detach(), -1), x.detach().softmax(-1))
    twice = PUT_AT_INDICES.default(torch.zeros(2), [torch.tensor([1, 1])], torch.ones(2), True, True)
    assert twice.tolist() == [0.0, 2.0]


def test_gradients_of_rms_norm_by_one_kernel() -> None:
    x, weight = torch.ones(2, 4, device="meta"), torch.ones(4, device="meta")
    gradients = FUSED_RMS_NORM_BACKWARD.default(x, x, [4], torch.ones(2, 1, device="meta"), weight, [True, True])
    assert [gradient.shape for gradient in gradients] == [x.shape, weight.shape]


def test_fused_cells_take_gates_states_and_biases() -> None:
    lstm, gru = (
        [argument.name for argument in schema_of(one.default).arguments] for one in (FUSED_LSTM_CELL, FUSED_GRU_CELL)
    )
    assert lstm == ["input_gates", "hidden_gates", "cx", "input_bias", "hidden_bias"]
    assert gru == ["input_gates", "hidden_gates", "hx", "input_bias", "hidden_bias"]
    assert [len(schema_of(one.default).returns) for one in (FUSED_LSTM_CELL, FUSED_GRU_CELL)] == [3, 2]
