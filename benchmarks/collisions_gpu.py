"""Gradients of small tables in compiled code, whose elements collide: many values are added to each place by atomics.

    PYTHONPATH=src python benchmarks/collisions_gpu.py --json docs/data/collisions_gpu.json     # on the GPU

Times are those of the backward's kernels, without the gradient that they are given.
"""

from __future__ import annotations

import argparse
import json
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

VALUES = 2**25
CASES = [
    *((rows, 1, "fp32") for rows in (16, 64, 256, 1024, 16384, 2**20)),
    *((rows, 8, "fp32") for rows in (64, 1024)),
    *((rows, 64, "fp32") for rows in (64, 1024)),
    *((rows, 1, "bf16") for rows in (64, 1024)),
    (64, 64, "bf16"),
]
"""Rows and columns of a table, and its dtype."""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def gather(table: Tensor, index: Tensor, factor: Tensor) -> Tensor:
    return (F.embedding(index, table).float() * factor).sum()


def time_case(rows: int, columns: int, dtype: str, compiled: bool) -> dict[str, Any]:
    torch._dynamo.reset()
    table = torch.zeros(rows, columns, device="cuda", dtype=DTYPES[dtype], requires_grad=True)
    index = torch.randint(rows, (VALUES // columns,), device="cuda")
    factor = torch.rand(VALUES // columns, columns, device="cuda")
    run = partial(torch.compile(gather, dynamic=False) if compiled else gather, table, index, factor)
    run().backward()
    found = []
    for _ in range(5):
        total = run()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        total.backward()
        end.record()
        end.synchronize()
        found.append(start.elapsed_time(end))
    return {"rows": rows, "columns": columns, "dtype": dtype, "compiled": compiled, "ms": round(median(found), 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    rows = []
    for compiled in (False, True):
        for case in CASES:
            rows.append(time_case(*case, compiled=compiled))
            print(rows[-1], flush=True)
            lines = ",\n".join(f"  {json.dumps(row)}" for row in rows)
            options.json.write_text(f'{{"torch": "{torch.__version__}", "values": {VALUES}, "rows": [\n{lines}\n]}}\n')


if __name__ == "__main__":
    main()
