"""Measure a grid of kernels on this device, from which plans interpolate shapes that nobody measured.

    python benchmarks/kernel_table.py                            # on a GPU: writes the table that ships for this device
    python benchmarks/kernel_table.py --tiny --out table.json    # on a CPU, in a minute

Products, attention forward and backward, convolutions of one to three dims and their backward, kernels that stream
through memory, the same with strided operands, and norms. The largest come first; after --seconds the rest is left out
and counted.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.api.probe_kernels import describe_device
from meshwright.describe.as_on_cuda import as_on_cuda
from meshwright.facts.kernel_table import SHIPPED, add_table, read_tables, write_tables
from meshwright.probe.measure_kernels import measure_kernels
from meshwright.torch_private.fake_tensors import FakeTensorMode
from meshwright.tracing.operator_calls import FunctionCalls, OperatorCall

Function = Callable[[], Tensor]
LOW = {"cuda": torch.bfloat16, "cpu": torch.float32}


def tensor(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, requires_grad=True)


def products(dtype: torch.dtype, tiny: bool) -> Iterator[Function]:
    """Linear layers with their two gradients, and batched products."""
    rows = (64, 256) if tiny else (256, 2048, 8192, 32768)
    widths = (64, 256) if tiny else (768, 2048, 4096, 14336)
    for m, n, k in product(rows, widths, widths):
        yield lambda m=m, n=n, k=k: F.linear(tensor(m, k, dtype=dtype), tensor(n, k, dtype=dtype))
    for m in rows[1:3]:  # a vocabulary, and one that is not a multiple of 8
        for n in (1000, 1001) if tiny else (32000, 50257, 128256):
            yield lambda m=m, n=n: F.linear(tensor(m, widths[0], dtype=dtype), tensor(n, widths[0], dtype=dtype))
    for batch, side in ((8, 32),) if tiny else ((64, 128), (64, 512), (256, 128), (16, 2048)):
        yield lambda b=batch, s=side: tensor(b, s, 64, dtype=dtype) @ tensor(b, 64, s, dtype=dtype)


def attentions(dtype: torch.dtype, tiny: bool) -> Iterator[Function]:
    sizes = ((1, 2, 64), (2, 4, 128)) if tiny else ((64, 12, 200), (16, 16, 1024), (4, 32, 2048), (1, 32, 8192))
    for (batch, heads, length), width, causal in product(sizes, (64,) if tiny else (64, 128), (False, True)):
        shape = batch, heads, length, width

        def attend(shape: tuple[int, ...] = shape, causal: bool = causal) -> Tensor:
            q, k, v = (tensor(*shape, dtype=dtype) for _ in range(3))
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

        yield attend


def convolutions(dtype: torch.dtype, tiny: bool) -> Iterator[Function]:
    functions = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
    sides = {1: (64,), 2: (16,), 3: (8,)} if tiny else {1: (512, 4096), 2: (7, 14, 28, 56, 112), 3: (8, 16, 32)}
    channels = (8, 16) if tiny else (64, 256, 512)
    for dims, function in functions.items():
        for side, width, kernel, groups in product(sides[dims], channels, (1, 3), (1, -1)):
            batch = 2 if tiny else max(1, min(64, 2**27 // (width * side**dims)))
            across = width if groups == -1 else 1
            if groups == -1 and (kernel == 1 or dims != 2):
                continue  # depthwise: only where models have it

            def convolve(
                function: Callable[..., Tensor] = function,
                shape: tuple[int, ...] = (batch, width, *([side] * dims)),
                weight: tuple[int, ...] = (width, width // across, *([kernel] * dims)),
                padding: int = kernel // 2,
                groups: int = across,
            ) -> Tensor:
                return function(
                    tensor(*shape, dtype=dtype), tensor(*weight, dtype=dtype), padding=padding, groups=groups
                )

            yield convolve


def streams(dtype: torch.dtype, tiny: bool) -> Iterator[Function]:
    """Elementwise kernels, reductions, norms and casts: what only moves numbers."""
    sizes = ((64, 64), (512, 256)) if tiny else ((256, 768), (4096, 1024), (16384, 2048), (32768, 4096), (65536, 8192))
    one: list[Callable[[Tensor], Tensor]] = [
        lambda x: x + torch.empty_like(x),
        lambda x: x * torch.empty_like(x),
        lambda x: F.gelu(x),
        lambda x: F.silu(x),
        lambda x: F.relu(x),
        lambda x: torch.softmax(x, -1),
        lambda x: F.layer_norm(x, x.shape[-1:], x.new_ones(x.shape[-1]), x.new_zeros(x.shape[-1])),
        lambda x: F.dropout(x, 0.1),
        lambda x: x.t().contiguous(),
        lambda x: x.sum(0),
        lambda x: x.float().to(torch.bfloat16).to(x.dtype),
        lambda x: F.log_softmax(x, -1),
    ]
    for rows, width in sizes:
        for function in one:
            yield lambda f=function, r=rows, w=width: f(tensor(r, w, dtype=dtype))


def layouts(dtype: torch.dtype, tiny: bool) -> Iterator[Function]:
    """Elementwise kernels and copies with broadcast, permuted and transposed operands."""
    sizes = ((2, 8, 64),) if tiny else ((64, 256, 1024), (16, 1024, 2048), (8, 2048, 4096))
    for b, n, w in sizes:
        heads = (b, n, 8, w // 8)
        one: list[Callable[[Tensor, Callable[..., Tensor]], Tensor]] = [
            lambda x, make, w=w: x + make(w),
            lambda x, make, b=b, w=w: x * make(b, 1, w),
            lambda x, make, b=b, n=n: x * make(b, n, 1),
            lambda x, make, b=b, n=n, w=w: x + make(b, w, n).transpose(1, 2),
            lambda x, make: x.transpose(1, 2).contiguous(),
            lambda x, make, heads=heads: x.view(heads).transpose(1, 2).contiguous(),
            lambda x, make, b=b, n=n: x.masked_fill(make(b, n, 1) > 0, 0.0),
            lambda x, make: x.float().mean(-1, keepdim=True),
            lambda x, make: torch.cat((x, x), -1),
        ]
        for function in one:
            yield lambda f=function, s=(b, n, w): f(tensor(*s, dtype=dtype), partial(tensor, dtype=dtype))


def norms(dtype: torch.dtype, tiny: bool) -> Iterator[Function]:
    """Norms with the gradients of their weights, on rows, on transposed rows and on channels; embeddings."""
    for rows, width in ((64, 64),) if tiny else ((4096, 768), (16384, 1024), (16384, 4096), (65536, 2048)):
        weights = partial(tensor, width, dtype=dtype)
        yield lambda r=rows, w=width, p=weights: F.layer_norm(tensor(r, w, dtype=dtype), (w,), p(), p())
        yield lambda r=rows, w=width, p=weights: F.layer_norm(tensor(w, r, dtype=dtype).t(), (w,), p(), p())
        yield lambda r=rows, w=width: F.embedding(torch.zeros(r, dtype=torch.long), tensor(32000, w, dtype=dtype))
    for channels, side in ((8, 8),) if tiny else ((32, 112), (64, 56), (256, 56), (512, 28), (1024, 14)):
        shape, wide = (4 if tiny else 64, channels, side, side), partial(tensor, channels, dtype=torch.float32)
        running = partial(torch.zeros, channels)
        yield lambda s=shape, p=wide, r=running: F.batch_norm(
            tensor(*s, dtype=dtype), r(), r(), p(), p(), training=True
        )
        own = partial(tensor, channels, dtype=dtype)
        yield lambda s=shape, p=own: F.group_norm(tensor(*s, dtype=dtype), 8, p(), p())


FAMILIES = {
    "products": products,
    "attentions": attentions,
    "convolutions": convolutions,
    "streams": streams,
    "layouts": layouts,
    "norms": norms,
}


def grid(device: torch.device, *, tiny: bool, families: Iterable[str] = FAMILIES) -> list[OperatorCall]:
    """The distinct operators of all functions, forward and backward, as the device runs them."""
    calls = FunctionCalls()
    stand_in = as_on_cuda if device.type == "cuda" else nullcontext
    for dtype in dict.fromkeys((LOW[device.type], torch.float32)):
        with FakeTensorMode(allow_non_fake_inputs=True), stand_in():
            for family in families:
                for function in FAMILIES[family](dtype, tiny):
                    with calls:
                        found = function()
                        found.backward(torch.empty_like(found))
    return list(calls.collector.calls.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="default: the file that ships; merged with what it has")
    parser.add_argument("--seconds", type=float, default=200.0)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=list(FAMILIES), help="measure only these")
    parser.add_argument("--tiny", action="store_true")
    given = parser.parse_args()
    device, started = torch.device(given.device), time.perf_counter()
    if given.device == "cpu":
        torch.set_num_threads(1)
    calls = grid(device, tiny=given.tiny, families=given.families)
    print(f"{len(calls)} operators after {time.perf_counter() - started:.0f} s", file=sys.stderr)
    found = measure_kernels(calls, device, seconds=given.seconds)
    table = replace(describe_device(device), kernels=tuple(found.kernels))
    out = given.out or SHIPPED / f"{table.device}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    write_tables(out, add_table(read_tables(out) if out.exists() else (), table))
    for signature, reason in found.failed.items():
        print(f"not measured: {signature[:120]}: {reason}", file=sys.stderr)
    print(f"{len(found.kernels)} of {len(calls)} operators in {time.perf_counter() - started:.0f} s -> {out}")


if __name__ == "__main__":
    main()
