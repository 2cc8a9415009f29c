"""What operators keep for backward on a GPU, seen without one."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from meshwright.describe.as_on_cuda import as_on_cuda
from meshwright.tracing.operator_calls import FunctionCalls

BATCH, HEADS, LENGTH, WIDTH = 2, 4, 100, 64


def kept_by(function, *inputs: Tensor) -> dict[tuple[tuple[int, ...], torch.dtype], int]:
    """Shapes and dtypes of what is kept for backward beside the inputs, with their number."""
    known = {tensor.untyped_storage()._cdata for tensor in inputs}
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage()._cdata not in known and tensor.numel() > 2:  # two small ones are random state
            kept[tensor.untyped_storage()._cdata] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        function(*inputs).sum().backward()
    found: dict[tuple[tuple[int, ...], torch.dtype], int] = {}
    for tensor in kept.values():
        key = tuple(tensor.shape), tensor.dtype
        found[key] = found.get(key, 0) + 1
    return found


def heads(dtype: torch.dtype, length: int = LENGTH) -> list[Tensor]:
    return [torch.empty(BATCH, HEADS, length, WIDTH, dtype=dtype, requires_grad=True) for _ in range(3)]


def test_flash_attention_keeps_its_output_and_a_number_a_row_and_head() -> None:
    with FakeTensorMode(), as_on_cuda():
        kept = kept_by(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), *heads(torch.bfloat16))
    assert kept == {
        ((BATCH, HEADS, LENGTH, WIDTH), torch.bfloat16): 1,
        ((BATCH, HEADS, LENGTH), torch.float32): 1,
    }


@pytest.mark.parametrize("trained", [False, True])
def test_attention_in_fp32_or_with_a_trained_bias_is_memory_efficient(trained: bool) -> None:
    dtype = torch.bfloat16 if trained else torch.float32
    with FakeTensorMode(), as_on_cuda():
        bias = torch.empty(LENGTH, LENGTH, dtype=dtype, requires_grad=True) if trained else None
        kept = kept_by(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=bias), *heads(dtype))
    assert kept[(BATCH, HEADS, 128), torch.float32] == 1  # rows are padded to a multiple of 32
    assert kept[(BATCH, HEADS, LENGTH, WIDTH), dtype] == 1


@pytest.mark.parametrize("by_tokens", [False, True])
def test_attention_with_a_mask_is_cudnns_and_its_result_is_laid_out_like_the_queries(by_tokens: bool) -> None:
    """As on an H200: after queries that were joined of two halves, a copy by tokens is kept beside the result."""
    with FakeTensorMode(), as_on_cuda():
        q, k, v = heads(torch.bfloat16)
        if by_tokens:
            q = torch.empty(BATCH, LENGTH, HEADS, WIDTH, dtype=torch.bfloat16, requires_grad=True).transpose(1, 2)
        mask = torch.empty(LENGTH, LENGTH, dtype=torch.bool)
        kept = kept_by(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=mask), q, k, v)
        found = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    assert kept == {
        ((BATCH, HEADS, LENGTH, WIDTH), torch.bfloat16): 1,
        ((BATCH, HEADS, LENGTH, 1), torch.float32): 1,
        ((BATCH, HEADS, LENGTH, LENGTH), torch.bfloat16): 1,  # the mask as numbers, expanded
    }
    assert found.stride() == q.stride()


def test_grouped_queries_in_fp32_are_composed() -> None:
    with FakeTensorMode(), as_on_cuda():
        q, k, v = heads(torch.float32)
        k, v = (x[:, :2].detach().requires_grad_() for x in (k, v))
        found = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    assert "Efficient" not in str(found.grad_fn) and "Flash" not in str(found.grad_fn)


def test_rms_norm_keeps_one_number_a_row() -> None:
    with FakeTensorMode(), as_on_cuda():
        x = torch.empty(BATCH, LENGTH, WIDTH, dtype=torch.bfloat16, requires_grad=True)
        weight = torch.empty(WIDTH, dtype=torch.bfloat16, requires_grad=True)
        kept = kept_by(lambda x, weight: F.rms_norm(x, (WIDTH,), weight), x, weight)
        assert x.grad is not None and weight.grad is not None
    assert kept == {((BATCH, LENGTH, 1), torch.float32): 1}


def test_dropout_keeps_bools() -> None:
    with FakeTensorMode(), as_on_cuda():
        x = torch.empty(BATCH, LENGTH, WIDTH, requires_grad=True)
        kept = kept_by(lambda x: F.dropout(x, 0.1), x)
    assert kept == {((BATCH, LENGTH, WIDTH), torch.bool): 1}


@pytest.mark.parametrize(("p", "train"), [(0.0, True), (0.1, False)])
def test_dropout_of_nothing_returns_its_input(p: float, train: bool) -> None:
    """Its decomposition copies it, and softmax and the product after it would each keep their own."""
    with FakeTensorMode(), as_on_cuda():
        x = torch.empty(BATCH, LENGTH, WIDTH, requires_grad=True)
        kept = F.dropout(x, p, train).untyped_storage()
        assert kept._cdata == x.untyped_storage()._cdata


def test_layer_norm_keeps_statistics_in_fp32() -> None:
    with FakeTensorMode(), as_on_cuda():
        x = torch.empty(BATCH, LENGTH, WIDTH, dtype=torch.bfloat16, requires_grad=True)
        kept = kept_by(lambda x: F.layer_norm(x, (WIDTH,)), x)
    assert kept == {((BATCH, LENGTH, 1), torch.float32): 2}


def test_outside_all_is_as_before() -> None:
    def nodes() -> list[str]:
        q, k, v = heads(torch.bfloat16)
        attention = F.scaled_dot_product_attention(q, k, v)
        return [type(found.grad_fn).__name__ for found in (attention, F.rms_norm(q, (WIDTH,)), F.dropout(q, 0.1))]

    with FakeTensorMode():
        before = nodes()
        with as_on_cuda(), as_on_cuda():
            inside = nodes()
        after = nodes()
    assert before == after
    assert not set(inside) & set(before)


def test_a_bias_that_was_permuted_is_added_to_scores_in_fp32() -> None:
    with FakeTensorMode(), as_on_cuda():
        bias = torch.empty(1, LENGTH, LENGTH, HEADS, dtype=torch.bfloat16).permute(0, 3, 1, 2)
        kept = kept_by(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, bias), *heads(torch.bfloat16))
        dense = bias.contiguous()
        fused = kept_by(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, dense), *heads(torch.bfloat16))
    for found, composed in ((kept, True), (fused, False)):
        sizes = {torch.Size(shape).numel() for shape, dtype in found if dtype == torch.float32}
        assert (BATCH * HEADS * LENGTH * LENGTH in sizes) == composed


@pytest.mark.parametrize(("dtype", "width", "composed"), [(torch.float32, 30, True), (torch.float32, 28, False)])
def test_efficient_attention_wants_rows_of_16_bytes(dtype: torch.dtype, width: int, composed: bool) -> None:
    """As on an H200: 30 numbers in fp32 take the composed kernel, which keeps the scores."""
    with FakeTensorMode(), as_on_cuda():
        inputs = [torch.empty(BATCH, HEADS, LENGTH, width, dtype=dtype, requires_grad=True) for _ in range(3)]
        kept = kept_by(F.scaled_dot_product_attention, *inputs)
    sizes = {torch.Size(shape).numel() for shape, _ in kept}
    assert (BATCH * HEADS * LENGTH * LENGTH in sizes) == composed


def test_rows_that_are_not_dense_are_composed_in_fp32() -> None:
    """As on an H200: 16-bit heads of a feature map, whose last dim is not contiguous, keep their scores in fp32."""
    with FakeTensorMode(), as_on_cuda():
        shape = (BATCH, HEADS, WIDTH, LENGTH)
        inputs = [torch.empty(shape, dtype=torch.bfloat16).transpose(2, 3).requires_grad_() for _ in range(3)]
        kept = kept_by(F.scaled_dot_product_attention, *inputs)
    scores = BATCH * HEADS * LENGTH * LENGTH
    assert any(torch.Size(shape).numel() == scores and dtype == torch.float32 for shape, dtype in kept)


def test_one_head_of_keys_is_broadcast_by_a_composed_attention_only() -> None:
    with FakeTensorMode(), as_on_cuda():
        q, k, v = heads(torch.bfloat16)
        k, v = (x[:, :1].detach().requires_grad_() for x in (k, v))
        kept = kept_by(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), q, k, v)
        assert ((BATCH * HEADS, LENGTH, LENGTH), torch.float32) in kept  # the scores
        grouped = kept_by(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True), q, k, v)
    assert ((BATCH, HEADS, LENGTH), torch.float32) in grouped


def test_statistics_of_batch_norm_are_kept_in_fp32() -> None:
    with FakeTensorMode(), as_on_cuda():
        x = torch.empty(4, 6, 5, 5, dtype=torch.bfloat16, requires_grad=True)
        weight = torch.empty(6, dtype=torch.bfloat16, requires_grad=True)
        kept = kept_by(lambda x, w: F.batch_norm(x, None, None, w, w, training=True), x, weight)
    assert kept == {((6,), torch.float32): 2}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_statistics_of_group_norm_have_the_dtype_of_its_weights(dtype: torch.dtype) -> None:
    """CUDA's backward kernel refuses others."""
    with FakeTensorMode(), as_on_cuda():
        x, weight = torch.empty(4, 6, 5, 5, dtype=torch.bfloat16), torch.empty(6, dtype=dtype)
        _, *statistics = torch.ops.aten.native_group_norm.default(x, weight, weight, 4, 6, 25, 2, 1e-5)
    assert [found.dtype for found in statistics] == [dtype, dtype]


@pytest.mark.parametrize("cells", [torch.nn.LSTM, torch.nn.GRU, torch.nn.RNN])
@pytest.mark.parametrize("bidirectional", [False, True])
def test_recurrent_layers_are_one_operator_of_cudnn(cells: type[torch.nn.RNNBase], bidirectional: bool) -> None:
    plain = cells(8, 6, num_layers=2, batch_first=True, bidirectional=bidirectional)
    expected, states = plain(torch.randn(3, 5, 8))
    with FakeTensorMode() as mode, as_on_cuda(), FunctionCalls() as calls:
        layer = cells(8, 6, num_layers=2, batch_first=True, bidirectional=bidirectional)
        x = torch.empty(3, 5, 8, requires_grad=True)
        output, found = layer(x)
        output.sum().backward()
    assert mode and output.shape == expected.shape
    pairs = zip(found, states, strict=True) if cells is torch.nn.LSTM else [(found, states)]
    assert all(one.shape == other.shape for one, other in pairs)
    assert x.grad is not None and all(p.grad is not None and p.grad.shape == p.shape for p in layer.parameters())
    named = {call.run.name: call for call in calls.collector.calls.values()}
    forward, backward = named["_cudnn_rnn"], named["_cudnn_rnn_backward"]
    matrices = sum(p.numel() for p in layer.parameters() if p.dim() == 2)
    assert (forward.run.flops, backward.run.flops) == (2 * 15 * matrices, 4 * 15 * matrices)
    assert forward.run.shape == (5 * 2, 3, *layer.weight_hh_l0.shape)
    reserve = next(leaf for leaf in backward.args if getattr(leaf, "dtype", None) == torch.uint8)
    assert reserve.origin == (forward.signature, 3)  # only cuDNN can fill it


@pytest.mark.parametrize(("dtype", "copies"), [(torch.float32, 1), (torch.bfloat16, 0)])
def test_batch_norm_of_a_transposed_input_keeps_a_dense_copy_where_cudnn_runs_it(
    dtype: torch.dtype, copies: int
) -> None:
    """As on an H200: a forecaster of time series with twelve of them keeps twelve copies in fp32."""
    with FakeTensorMode(), as_on_cuda():
        weight, bias = (torch.empty(WIDTH, dtype=dtype, requires_grad=True) for _ in range(2))
        x = torch.empty(BATCH, LENGTH, WIDTH, dtype=dtype, requires_grad=True)

        def turned(x: Tensor, *others: Tensor) -> Tensor:
            return F.batch_norm(x.transpose(1, 2), None, None, *others, training=True)

        def straight(x: Tensor, *others: Tensor) -> Tensor:
            return F.batch_norm(x.view(BATCH, WIDTH, LENGTH), None, None, *others, training=True)

        kept = kept_by(turned, x, weight, bias)
        assert kept.get(((BATCH, WIDTH, LENGTH), dtype), 0) == copies
        assert ((BATCH, WIDTH, LENGTH), dtype) not in kept_by(straight, x, weight, bias)
