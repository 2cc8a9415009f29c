"""The kernels of a step by kind, and for each kind the least time that its work can take on this device.

A floor is FLOPs at the measured rate of the workload's own products, and bytes at the measured rate of a copy. Bytes
are those of kernels fused as far as the model allows: each tensor is read and written once between two products.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from same_start import Sizes

KINDS = {
    "products": ("gemm", "nvjet", "cutlass", "xmma", "splitK", "cublas", "triton_tem"),
    "attention": ("flash", "fmha", "attention", "cudnn"),
    "optimizer": ("multi_tensor", "adam", "foreach", "lpnorm"),
    "copies": ("Memcpy", "Memset", "copy", "CatArray", "chunk_cat", "split_with_sizes"),
    "streaming": ("elementwise", "reduce", "norm", "Norm", "softmax", "SoftMax", "nll", "embedding", "index", "sort"),
}
"""Words in kernels' names, by kind; the first kind that has one in the name counts."""
STREAMING = ("triton_poi", "triton_red", "triton_per", "GammaBeta", "sum_and_scatter", "compute_grad_weight")
"""Beginnings and words that decide first: a compiled kernel is named after all operators fused in it, and around it."""
BF16, FP32 = 2, 4


def kind_of(kernel: str) -> str:
    if any(word in kernel for word in STREAMING):
        return "streaming"
    return next((kind for kind, words in KINDS.items() if any(word in kernel for word in words)), "other")


def profile(step: Callable[[], Any]) -> dict[str, Any]:
    """Milliseconds of one step by kind of kernel, and what takes longest of those not recognised."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
        step()
        torch.cuda.synchronize()
    by_kind = dict.fromkeys((*KINDS, "other"), 0.0)
    launches, unknown = 0, {}
    for event in found.key_averages():
        taken = event.self_device_time_total / 1e3
        kind = kind_of(event.key)
        by_kind[kind] += taken
        launches += event.count if taken else 0
        if kind == "other":
            unknown[event.key[:60]] = round(taken, 2)
    largest = dict(sorted(unknown.items(), key=lambda item: -item[1])[:3])
    rounded = {kind: round(taken, 2) for kind, taken in by_kind.items()}
    return {**rounded, "all": round(sum(by_kind.values()), 2), "launches": launches, "largest_other": largest}


def rates(sizes: Sizes, tensor_ranks: int, device: torch.device) -> dict[str, float]:
    """FLOPs a second of the workload's largest products, and bytes a second of a copy."""
    best = 0.0
    for outer in (sizes.feed_forward // tensor_ranks, sizes.vocabulary // tensor_ranks):
        x = torch.randn(sizes.tokens, sizes.width, device=device, dtype=torch.bfloat16)
        weight = torch.randn(sizes.width, outer, device=device, dtype=torch.bfloat16)
        flops = 2.0 * sizes.tokens * sizes.width * outer
        best = max(best, flops / seconds(lambda x=x, weight=weight: x @ weight, device))
    source = torch.empty(1 << 30 if device.type == "cuda" else 1 << 22, device=device, dtype=torch.uint8)
    target = torch.empty_like(source)
    return {"flops": best, "bytes": 2.0 * source.numel() / seconds(lambda: target.copy_(source), device)}


def seconds(run: Callable[[], Any], device: torch.device, times: int = 20) -> float:
    for _ in range(3):
        run()
    wait(device)
    start = time.perf_counter()
    for _ in range(times):
        run()
    wait(device)
    return (time.perf_counter() - start) / times


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def floors(
    sizes: Sizes, *, tensor_ranks: int, data_ranks: int, gated: bool, rate: dict[str, float]
) -> dict[str, float]:
    """Milliseconds of the least work of each kind on one rank."""
    width, inner, kv = sizes.width, sizes.feed_forward, sizes.kv_heads * sizes.head_width
    matrices = 3 if gated else 2
    block = 2 * width**2 + 2 * width * kv + matrices * width * inner
    whole = sizes.layers * block + sizes.width * sizes.vocabulary
    flops = {
        "products": 6.0 * sizes.tokens * whole / tensor_ranks,
        # Causal: half of the products of queries and keys, and of weights and values; backward has five for two.
        "attention": 7.0 * sizes.tokens * sizes.length * width * sizes.layers / tensor_ranks,
    }
    held = (whole + (sizes.width * sizes.vocabulary if gated else 0)) / tensor_ranks  # the GPT's embedding is tied
    moved = {
        "streaming": BF16 * sizes.tokens / tensor_ranks * streamed(sizes, kv, matrices),
        # Parameter, gradient and two moments are read, three of them written.
        "optimizer": 7.0 * FP32 * held / data_ranks,
        # Masters to bf16 and gradients to fp32. Sharded, weights are written for forward and again for backward.
        "copies": held * ((FP32 + BF16) * 2 if data_ranks == 1 else 2 * BF16 + BF16 + FP32),
    }
    least = {kind: 1e3 * count / rate["flops"] for kind, count in flops.items()}
    return {kind: round(ms, 2) for kind, ms in (least | {k: 1e3 * b / rate["bytes"] for k, b in moved.items()}).items()}


def streamed(sizes: Sizes, kv: int, matrices: int) -> float:
    """Elements that kernels between products read and write for a token, forward and backward.

    A block forward: two sums with their norms (four tensors each), rotary positions of query and key, the activation
    (reads `matrices - 1`, writes one). Backward: two norms with the sums of gradients, rotary positions, the
    activation's gradient (reads one more and writes `matrices - 1`, and the activation again). The loss reads logits
    twice and writes their gradient.
    """
    turned = 2 * (sizes.width + kv) if matrices == 3 else 0  # a GPT has learned positions
    activation = sizes.feed_forward * (matrices + 2 * matrices)
    return sizes.layers * (16 * sizes.width + 2 * turned + activation) + 3 * sizes.vocabulary + 4 * sizes.width
