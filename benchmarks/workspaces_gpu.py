"""What convolutions and recurrent layers take of a GPU's memory besides their results, one operator at a time.

    python benchmarks/workspaces_gpu.py measure --json workspaces.json   # on the GPU; two minutes
    PYTHONPATH=src python benchmarks/workspaces_gpu.py score             # the rules of the trace beside it, anywhere

Rows of a `case` are the convolutions of steps that were forecast blind (unseen_cases.py); `measure` takes them from the
present results. Each operator runs twice, and the allocator's history of the second call is kept: requests other than
results, in order.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils._python_dispatch import TorchDispatchMode
from workspaces_rows import convolutions, recurrent_layers

aten = torch.ops.aten
RESULTS = Path(__file__).parents[1] / "docs" / "data" / "workspaces_gpu.json"
LARGE = 4 << 20
"""Rows whose workspace is smaller by the rule and in truth are counted, but have no relative error."""
MARK = 12345
PARTS = ("copied", "dx", "dw", "db")


class History:
    """The allocator's requests during a call."""

    def __init__(self) -> None:
        torch.cuda.memory._record_memory_history(enabled="all", context=None, max_entries=400)

    def of(self, call: Callable[[], Any]) -> tuple[Any, list[tuple[int, int | None]]]:
        """What a call returns, and its requests: bytes, and which result they are for."""
        mark = torch.empty(MARK, dtype=torch.uint8, device="cuda")
        found = call()
        trace = torch.cuda.memory._snapshot()["device_traces"][0]
        begin = max(i for i, e in enumerate(trace) if e["action"] == "alloc" and e["addr"] == mark.data_ptr())
        requests: list[list[Any]] = []
        live: dict[int, int] = {}
        for event in trace[begin + 1 :]:
            if event["action"] == "alloc":
                live[event["addr"]] = len(requests)
                requests.append([event["size"], None])
            elif event["action"] == "free_completed":
                live.pop(event["addr"], None)
        made = {tensor.data_ptr(): place for place, tensor in enumerate(_tensors(found)) if tensor is not None}
        for address, place in live.items():
            requests[place][1] = made.get(address)
        return found, [(size, result) for size, result in requests]


def _tensors(found: Any) -> list[Tensor | None]:
    if isinstance(found, tuple | list):
        return [tensor for one in found for tensor in _tensors(one)]
    return [found if isinstance(found, Tensor) and found.numel() else None]


def make(row: dict[str, Any], name: str, device: str) -> Tensor:
    shape, dtype = row[name], getattr(torch, row["dt"])
    strides = row.get(f"{name}s") or torch.empty(shape, device="meta").stride()
    return torch.empty_strided(shape, strides, dtype=dtype, device=device)


def forward_arguments(row: dict[str, Any], device: str) -> tuple[Any, ...]:
    rest = row["stride"], row["pad"], row["dil"], row["tr"], row["opad"], row["groups"]
    return make(row, "x", device), make(row, "w", device), None, *rest


def backward_arguments(row: dict[str, Any], device: str) -> tuple[Any, ...]:
    x, w, _, *rest = forward_arguments(row, device)
    return make(row, "y", device), x, w, [row["y"][1]], *rest, row.get("mask", [True, True, False])


def measure_convolution(history: History, row: dict[str, Any]) -> dict[str, Any]:
    """Requests of forward (`f`) and, by gradient, of backward; a row of a case has only one of them."""
    if "y" not in row or "case" not in row:
        arguments = forward_arguments(row, "cuda")
        aten.convolution(*arguments)
        y, requests = history.of(lambda: aten.convolution(*arguments))
        row["f"] = [size for size, result in requests if result is None]
        row |= {} if "case" in row else {"y": list(y.shape), "ys": list(y.stride())}
    if "y" in row:
        given = backward_arguments(row, "cuda")
        aten.convolution_backward(*given)
        requests = history.of(lambda: aten.convolution_backward(*given))[1]
        at = "copied"
        for size, result in requests:
            if result is None:
                row.setdefault(at, []).append(size)
            else:
                at = PARTS[1 + result]
    return row


class RecurrentCalls(TorchDispatchMode):
    """Notes what cuDNN keeps and takes for a recurrent layer."""

    def __init__(self, history: History) -> None:
        super().__init__()
        self.history, self.found = history, {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if "_cudnn_rnn" not in name:
            return func(*args, **(kwargs or {}))
        results, requests = self.history.of(lambda: func(*args, **(kwargs or {})))
        taken = [size for size, result in requests if result is None]
        if name == "_cudnn_rnn":
            self.found |= {"kept": results[3].nbytes, "weights": results[4].nbytes, "forward": taken}
        else:
            self.found["backward"] = taken
        return results


def measure_recurrent(history: History, row: dict[str, Any]) -> dict[str, Any]:
    dtype = getattr(torch, row["dt"])
    kind = {"lstm": nn.LSTM, "gru": nn.GRU}.get(row["mode"], nn.RNN)
    more: dict[str, Any] = {"proj_size": row["proj"]} if row["proj"] else {}
    more |= {"nonlinearity": row["mode"]} if kind is nn.RNN else {}
    more |= {"batch_first": bool(row["bf"]), "bidirectional": bool(row["bi"]), "bias": bool(row["bias"])}
    layer = kind(row["i"], row["h"], row["layers"], dropout=row["drop"], **more).to("cuda", dtype)
    layer.train(bool(row["train"]))
    if not row["flat"]:
        layer._flat_weights = [w.detach().clone().requires_grad_() for w in layer._flat_weights]
    shape = (row["n"], row["t"], row["i"]) if row["bf"] else (row["t"], row["n"], row["i"])
    x = torch.zeros(shape, dtype=dtype, device="cuda").requires_grad_()
    lengths = torch.tensor([max(1, row["t"] * (row["n"] - place) // row["n"]) for place in range(row["n"])])
    calls = RecurrentCalls(history)
    for turn in range(2):
        with calls if turn else torch.enable_grad():
            given = pack_padded_sequence(x, lengths, batch_first=bool(row["bf"])) if row["packed"] else x
            output = layer(given)[0]
            output = output.data if row["packed"] else output
            if row["train"]:
                torch.autograd.backward(output, torch.zeros_like(output))
    return row | calls.found


@contextmanager
def tf32(row: dict[str, Any]) -> Iterator[None]:
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = row.get("tf32", before)
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32 = before


def measure(path: Path, seconds: float) -> None:
    """What there is no time for is left out, so rows are in the order of their worth."""
    started, history = time.monotonic(), History()
    cases = [
        {k: v for k, v in row.items() if k not in ("f", *PARTS)} for row in _read()["convolutions"] if "case" in row
    ]
    found: dict[str, Any] = {"torch": torch.__version__, "cudnn": torch.backends.cudnn.version()}
    found["recurrent"] = [measure_recurrent(history, row) for row in recurrent_layers()]
    found["convolutions"] = []
    for row in [*cases, *convolutions()]:
        if time.monotonic() - started > seconds:
            break
        with tf32(row):
            found["convolutions"].append(measure_convolution(history, row))
    path.write_text(_text(found))


def _usual(row: dict[str, Any]) -> dict[str, Any]:
    """What most rows have, which files leave out."""
    dims = len(row["x"]) - 2
    return {"stride": [1] * dims, "dil": [1] * dims, "opad": [0] * dims, "tr": False, "groups": 1}


def _read() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(RESULTS.read_text())
    return found | {"convolutions": [_usual(row) | row for row in found["convolutions"]]}


def _text(found: dict[str, Any]) -> str:
    """A row on a line."""
    short = [{k: v for k, v in row.items() if _usual(row).get(k) != v} for row in found["convolutions"]]
    found = found | {"convolutions": short}
    rows = {
        name: "[\n" + ",\n".join(json.dumps(row, separators=(",", ":")) for row in found[name]) + "\n]"
        for name in ("recurrent", "convolutions")
    }
    head = {name: value for name, value in found.items() if name not in rows}
    return json.dumps(head)[:-1] + "".join(f',\n"{name}": {text}' for name, text in rows.items()) + "}\n"


def rule(row: dict[str, Any]) -> dict[str, int]:
    """Bytes that the trace adds for a row: forward, and gradients of the input and the weight."""
    from meshwright.describe.as_on_cuda import as_on_cuda
    from meshwright.tracing.workspaces import operator_workspaces

    found = {}
    with as_on_cuda(), tf32(row):
        if "f" in row:
            arguments = forward_arguments(row, "meta")
            y = aten.convolution.default(*arguments)
            found["f"] = sum(sum(held) for held in operator_workspaces(aten.convolution.default, arguments, y))
        if "y" in row:
            arguments = backward_arguments(row, "meta")
            mask = arguments[-1]
            held = operator_workspaces(aten.convolution_backward.default, (*arguments[:-1], [*mask[:2], False]), None)
            asked = [part for part, wanted in zip(("dx", "dw"), mask, strict=False) if wanted]
            found |= {part: sum(sizes) for part, sizes in zip(asked, held, strict=True)}
    return found


def taken(row: dict[str, Any], part: str) -> int:
    """Bytes held at a time for a part in truth, with copies that are made before and kept."""
    return sum(row.get(part, [])) + (sum(row.get("copied", [])) if part in ("dx", "dw") else 0)


def score() -> None:
    for title, chosen in {"grid": False, "cases": True}.items():
        for dtypes in (("bfloat16", "float16"), ("float32",)):
            errors: dict[str, list[float]] = {}
            rows = [r for r in _read()["convolutions"] if ("case" in r) == chosen and r["dt"] in dtypes]
            for row in rows:
                for part, told in rule(row).items():
                    true = taken(row, part)
                    if max(told, true) >= LARGE:
                        errors.setdefault(part, []).append((told - true) / max(told, true))
            for part, own in errors.items():
                near = sum(abs(error) < 0.1 for error in own)
                less = sum(error < -0.1 for error in own)
                print(
                    f"{title} {dtypes[0]} {part}: {len(own)} of at least 4 MiB, {near} within 10 %, {less} too little, "
                    f"median {median(map(abs, own)):.1%}"
                )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["measure", "score"])
    parser.add_argument("--json", type=Path, default=RESULTS, help=f"where to write (default: {RESULTS.name})")
    parser.add_argument("--seconds", type=float, default=120.0, help="the longest to measure (default: 120)")
    options = parser.parse_args()
    if options.what == "measure":
        measure(options.json, options.seconds)
    else:
        score()


if __name__ == "__main__":
    main()
