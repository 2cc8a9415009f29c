"""Context parallelism on one GPU: one rank's step of a long sample, and its attention kernels.

    PYTHONPATH=src python benchmarks/context_gpu.py --json docs/data/context_gpu.json

The step is that of rank 0 in a fake world of 8: a Llama of 8 billion parameters, 131,072 tokens in a sample. It is
compared with the trace on fake tensors and with the planner's closed form. The kernels are those of all tokens' causal
attention, forward and backward, and those of one rank's queries: an eighth of that would be ideal. A rank's attention
is timed as it runs, in two parts by the kernel of the whole, and at once by the flash kernel.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from gpu_cases import Case
from gpu_steps import measure
from own_process import Child
from plan_gpu import account_for, errors_of, trace
from torch import Tensor
from turns import Turns

from meshwright.strategies.context.causal import attend_at_once, attend_to_earlier

TOKENS, RANKS, REPEATS = 131072, 8, 3
HEADS, KV_HEADS, WIDTH = 32, 8, 128
CASE = Case(f"preset:llama3-8b:seq={TOKENS},batch=1", f"fsdp,cp={RANKS},bf16,ac=full", RANKS, 0, REPEATS)


def milliseconds(run: Callable[[], Any]) -> float:
    """The shortest of several runs, after one to warm up."""
    run()
    found = []
    for _ in range(REPEATS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        found.append(start.elapsed_time(end))
    return min(found)


def made(heads: int, tokens: int) -> Tensor:
    return torch.randn(1, heads, tokens, WIDTH, device="cuda", dtype=torch.bfloat16, requires_grad=True)


def attention_ms(rows: int, columns: int, attend: Callable[..., Tensor] = attend_to_earlier) -> float:
    """Forward and backward of the last `rows` tokens' attention to `columns` tokens."""
    given = made(HEADS, rows), made(KV_HEADS, columns), made(KV_HEADS, columns)
    gradient = made(HEADS, rows).detach()

    def run() -> None:
        mixed = attend(*given, dropout_p=0.0, scale=None, enable_gqa=True)
        torch.autograd.grad(mixed, given, gradient)

    return milliseconds(run)


def time_attention() -> dict[str, Any]:
    """All tokens' attention, and that of the chunks of the first and of the last rank, in two parts and at once."""
    size, last = TOKENS // (2 * RANKS), 2 * RANKS - 1
    whole = attention_ms(TOKENS, TOKENS)
    found: dict[str, Any] = {"whole_ms": whole, "eighth_ms": whole / RANKS}
    for name, attend in (("in_two", attend_to_earlier), ("at_once", attend_at_once)):
        ranks = {
            f"rank_{rank}_ms": sum(attention_ms(size, (place + 1) * size, attend) for place in (rank, last - rank))
            for rank in (0, RANKS - 1)
        }
        found[name] = ranks | {"slowest_to_eighth": max(ranks.values()) / found["eighth_ms"]}
    return found | {"difference": difference(size, 2 * size)}


def difference(rows: int, columns: int) -> float:
    """The largest difference between the two ways, of outputs and gradients, relative to the largest value."""
    given = [made(heads, tokens) for heads, tokens in ((HEADS, rows), (KV_HEADS, columns), (KV_HEADS, columns))]
    gradient, found = made(HEADS, rows).detach(), []
    for attend in (attend_to_earlier, attend_at_once):
        mixed = attend(*given, dropout_p=0.0, scale=None, enable_gqa=True)
        found.append([mixed, *torch.autograd.grad(mixed, given, gradient)])
    return max(((a - b).abs().max() / b.abs().max()).item() for a, b in zip(*found, strict=True))


def tell(row: dict[str, Any]) -> dict[str, float]:
    """Forecasts of a measured step; in a process of their own, because they make a world."""
    return account_for(row) | trace(row)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    attention = time_attention()
    print(attention, flush=True)
    torch.cuda.empty_cache()
    row = measure(CASE, Turns(get_context(), 1), detail=False)
    print(row, flush=True)
    told = Child(tell, row).result()
    found = {"torch": torch.__version__, "attention": attention, "step": row, "told": told}
    found["errors"] = errors_of(row, told)
    print(json.dumps(found, indent=1, default=str))
    if asked.json:
        asked.json.write_text(json.dumps(found, indent=1, default=str) + "\n")


if __name__ == "__main__":
    main()
