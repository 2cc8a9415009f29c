"""What the host takes to launch each kind of operator: the steps of blind cases, their smallest operators run in a row.

    PYTHONPATH=src python benchmarks/unseen_gpu.py describe --round 7 --facts FOLDER                # without a GPU
    PYTHONPATH=src python benchmarks/launch_gpu.py --facts FOLDER --json docs/data/launch_gpu.json  # on the GPU

Nothing waits for the device: a batch of launches is timed on the host, and is too short to fill the device's queue.
"""

from __future__ import annotations

import argparse
import json
import pickle
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import median
from typing import Any

import torch

from meshwright.probe.device import measure_launch
from meshwright.probe.operator_inputs import input_bytes, make_runnable
from meshwright.tracing.host_passes import time_reference
from meshwright.tracing.operator_calls import OperatorCall

BATCH, ROUNDS = 24, 9
"""Launches in a row, and how often they are timed."""
LARGEST = 2**28
"""Bytes of an operator's inputs."""
TRIED = 2
"""Signatures of an operator, the smallest ones."""


def smallest_calls(folder: Path) -> dict[str, list[OperatorCall]]:
    """The smallest calls of each operator in all steps, by name and dtype."""
    found: dict[str, dict[str, OperatorCall]] = defaultdict(dict)
    for path in sorted(folder.glob("*.pickle")):
        for call in pickle.loads(path.read_bytes()).step.calls:
            found[f"{call.operator} {call.run.dtype}"][call.signature] = call
    return {name: sorted(calls.values(), key=input_bytes)[:TRIED] for name, calls in sorted(found.items())}


def all_calls(folder: Path) -> dict[str, OperatorCall]:
    steps = (pickle.loads(path.read_bytes()).step for path in sorted(folder.glob("*.pickle")))
    return {call.signature: call for step in steps for call in step.calls}


def launch_us(run: Callable[[], Any]) -> tuple[float, float]:
    """Microseconds of one launch on the host, and of one run on the device and the host together."""
    for _ in range(3):
        run()
    hosts, wholes = [], []
    for _ in range(ROUNDS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(BATCH):
            run()
        hosts.append(time.perf_counter() - start)
        torch.cuda.synchronize()
        wholes.append(time.perf_counter() - start)
    return median(hosts) / BATCH * 1e6, median(wholes) / BATCH * 1e6


def measure(names: dict[str, list[OperatorCall]], calls: dict[str, OperatorCall]) -> Iterable[dict[str, Any]]:
    device = torch.device("cuda", 0)
    for name, smallest in names.items():
        for call in smallest:
            if input_bytes(call) > LARGEST:
                continue
            try:
                with torch.enable_grad():
                    host, whole = launch_us(make_runnable(call, device, calls))
            except Exception as error:
                yield {"operator": name, "error": f"{type(error).__name__}: {error}"[:120]}
                continue
            yield {
                "operator": name,
                "kind": call.run.kind,
                "signature": call.signature[:160],
                "host_us": round(host, 2),
                "whole_us": round(whole, 2),
            }


def _write(path: Path, document: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    lines = ",\n".join(f"  {json.dumps(row)}" for row in rows)
    path.write_text(json.dumps(document)[:-1] + f',\n "rows": [\n{lines}\n ]\n}}\n')


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--facts", type=Path, required=True)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=40.0, help="after which no further operator is timed")
    options = parser.parse_args()
    started, rows = time.perf_counter(), []
    document = {
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(),
        "launch_us": round(measure_launch(torch.device("cuda", 0)) * 1e6, 2),
        "reference_ms": round(time_reference() * 1e3, 2),
    }
    x, y = (torch.zeros(4, 4, device="cuda") for _ in range(2))
    document["add_us"] = [round(launch_us(lambda: x + y)[0], 2)]
    document["add_overload_us"] = [round(launch_us(lambda: torch.ops.aten.add.Tensor(x, y))[0], 2)]
    for row in measure(smallest_calls(options.facts), all_calls(options.facts)):
        rows.append(row)
        _write(options.json, document, rows)
        if time.perf_counter() - started > options.seconds:
            print("the time is over")
            break
    document["add_us"].append(round(launch_us(lambda: x + y)[0], 2))
    document["add_overload_us"].append(round(launch_us(lambda: torch.ops.aten.add.Tensor(x, y))[0], 2))
    _write(options.json, document, rows)
    print({name: value for name, value in document.items() if name != "rows"}, len(rows))


if __name__ == "__main__":
    main()
