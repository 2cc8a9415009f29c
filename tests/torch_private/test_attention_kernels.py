import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.torch_private.attention_kernels import KERNELS, AttentionKernel, chosen_kernel
from meshwright.torch_private.fake_tensors import FakeTensorMode
from meshwright.torch_private.operators import schema_of

aten = torch.ops.aten


def tensors(dtype: torch.dtype) -> list[Tensor]:
    return [torch.randn(2, 4, 8, 16, dtype=dtype, requires_grad=True) for _ in range(3)]


def test_the_kernel_of_a_cpu_gives_log_sum_exps() -> None:
    query, key, value = tensors(torch.float64)
    output, lse, seeds = KERNELS["cpu"].forward(query, key, value, causal=False, scale=0.5)
    scores = 0.5 * query @ key.transpose(-1, -2)
    torch.testing.assert_close(lse, scores.logsumexp(-1))
    torch.testing.assert_close(output, scores.softmax(-1) @ value)
    assert seeds == ()


def test_its_gradients() -> None:
    given = tensors(torch.float64)
    expected = F.scaled_dot_product_attention(*given, is_causal=True)
    output, lse, seeds = KERNELS["cpu"].forward(*given, causal=True, scale=None)
    gradient = torch.randn_like(output)
    found = KERNELS["cpu"].backward(gradient, (*given, output, lse), seeds, causal=True, scale=None)
    for ours, theirs in zip(found, torch.autograd.grad(expected, given, gradient), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_the_choice_is_pytorch_s() -> None:
    assert chosen_kernel(*tensors(torch.float32), scale=None, enable_gqa=False) == "cpu"
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        assert chosen_kernel(*tensors(torch.float32), scale=None, enable_gqa=False) is None


def test_flash_kernels_for_gpus_have_shapes() -> None:
    with FakeTensorMode():
        query = torch.empty(1, 4, 8, 16, dtype=torch.bfloat16)
        key = torch.empty(1, 2, 24, 16, dtype=torch.bfloat16)
        output, lse, seeds = KERNELS["flash"].forward(query, key, key, causal=False, scale=None)
        assert output.shape == query.shape and lse.shape == (1, 4, 8) and len(seeds) == 2
        found = KERNELS["flash"].backward(output, (query, key, key, output, lse), seeds, causal=False, scale=None)
        assert [x.shape for x in found] == [query.shape, key.shape, key.shape]


@pytest.mark.parametrize("library", ["flash", "cudnn"])
def test_what_kernels_for_gpus_take(library: str) -> None:
    """This build may have no such kernel to run, so the order of the arguments is all that can be checked."""
    forward, backward = (
        [argument.name for argument in schema_of(operator.default).arguments]
        for operator in (
            getattr(aten, f"_scaled_dot_product_{library}_attention"),
            getattr(aten, f"_scaled_dot_product_{library}_attention_backward"),
        )
    )
    lengths = ["cum_seq_q", "cum_seq_k", "max_q", "max_k"]
    last = ["dropout_p", "is_causal", "return_debug_mask", "scale"]
    given, seeds = ["grad_out", "query", "key", "value", "out", "logsumexp"], ["philox_seed", "philox_offset"]
    if library == "flash":
        assert forward == ["query", "key", "value", *last]
        assert backward == [*given, *lengths, "dropout_p", "is_causal", *seeds, "scale"]
    else:
        assert forward == ["query", "key", "value", "attn_bias", "compute_log_sumexp", *last]
        assert backward == [*given, *seeds, "attn_bias", *lengths, "dropout_p", "is_causal", "scale"]


def test_each_is_a_kernel() -> None:
    assert all(isinstance(kernel, AttentionKernel) for kernel in KERNELS.values())
