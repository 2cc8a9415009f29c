"""What bf16's dtypes per operator cost on one GPU: step time and peak memory, beside autocast by hand.

    python benchmarks/precision_gpu.py            # a table; OUT=FOLDER also writes precision_gpu.json there
    python benchmarks/precision_gpu.py --device cpu --quick    # the script itself, in seconds

Variants are `bf16` with all operators in bf16 (as it was before there was a table), `bf16`, `bf16:autocast`, and a
hand-written loop under `torch.autocast`. Each trains the same model on the same batch; the better of two turns counts.
`breaks` counts graph breaks of torch.compile.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
import torch._dynamo.utils
import torch.nn.functional as F
from gpt_model import GPT, Shape, make_up_batch, next_token_loss
from torch import Tensor, nn
from torch.optim import AdamW

from meshwright import Job, Strategy
from meshwright.assemble import operator_dtypes
from meshwright.assemble.step import Trainer
from meshwright.assemble.world import World
from meshwright.describe.model import describe

GPT2 = Shape(layers=12, width=768, heads=12, length=1024, vocabulary=50304)
TINY = Shape(layers=2, width=32, heads=2, length=16, vocabulary=64)
GIB = 2**30
BEFORE, NOW, AUTOCAST, BY_HAND = "bf16, no table", "bf16", "bf16:autocast", "autocast by hand"
Batch = dict[str, Tensor]


class WithLoss(nn.Module):
    """A GPT that computes its loss itself, as nanoGPT and Hugging Face's models do."""

    def __init__(self, shape: Shape, attention: Callable[..., Tensor] | None = None) -> None:
        super().__init__()
        self.gpt, self.attention = GPT(shape), attention

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if self.attention is None:
            return next_token_loss(self.gpt(x), {"y": y})
        with patch.object(F, "scaled_dot_product_attention", self.attention):
            return next_token_loss(self.gpt(x), {"y": y})


def attention_by_hand(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
    scores = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5
    later = torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool, device=q.device).triu(1)
    return scores.masked_fill(later, float("-inf")).softmax(-1) @ v


@dataclass(frozen=True, kw_only=True)
class Workload:
    name: str
    job: Job
    steps: int = 20
    compile: bool = False


def gpt_job(shape: Shape, samples: int, *, own_loss: bool, attention: Callable[..., Tensor] | None = None) -> Job:
    def loss_of_logits(logits: Tensor, batch: Batch) -> tuple[Tensor, int]:
        return next_token_loss(logits, batch, reduction="sum"), batch["y"].numel()

    return Job(
        model=(lambda: WithLoss(shape, attention)) if own_loss else (lambda: GPT(shape)),
        inputs=(lambda batch: (batch["x"], batch["y"])) if own_loss else (lambda batch: (batch["x"],)),
        loss=mean_of_samples if own_loss else loss_of_logits,
        optimizer=lambda params: AdamW(params, lr=1e-4, fused=torch.cuda.is_available()),
        sample=lambda count: make_up_batch(shape, count, torch.Generator().manual_seed(0)),
        global_batch=samples,
    )


def mean_of_samples(output: Any, batch: Batch) -> tuple[Tensor, int]:
    loss = output if isinstance(output, Tensor) else output.loss
    return loss * len(batch["x"]), len(batch["x"])


def bert_job(samples: int, *, quick: bool) -> Job:
    """Hugging Face's BERT-base as a classifier, with its loss inside."""
    from transformers import BertConfig, BertForSequenceClassification

    length = 16 if quick else 512
    sizes = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 2} if quick else {}
    config = BertConfig(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **sizes)

    def sample(count: int) -> Batch:
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(1000, 30000, (count, length), generator=generator)
        return {"x": tokens, "y": tokens[:, 0] % 2}

    return Job(
        model=lambda: BertForSequenceClassification(config),
        inputs=lambda batch: {"input_ids": batch["x"], "labels": batch["y"]},
        loss=mean_of_samples,
        optimizer=lambda params: AdamW(params, lr=1e-5, fused=torch.cuda.is_available()),
        sample=sample,
        global_batch=samples,
    )


def workloads(*, quick: bool) -> Iterator[Workload]:
    shape, samples, steps = (TINY, 2, 2) if quick else (GPT2, 16, 20)
    yield Workload(name="gpt2, loss in the job", job=gpt_job(shape, samples, own_loss=False), steps=steps)
    yield Workload(name="gpt2, loss in the model", job=gpt_job(shape, samples, own_loss=True), steps=steps)
    by_hand = gpt_job(shape, samples // 2, own_loss=True, attention=attention_by_hand)
    yield Workload(name="gpt2, softmax by hand", job=by_hand, steps=steps)
    short = Shape(layers=shape.layers, width=shape.width, heads=shape.heads, length=16, vocabulary=shape.vocabulary)
    yield Workload(name="gpt2, 16 tokens (host)", job=gpt_job(short, 1, own_loss=True), steps=2 * steps)
    if find_spec("transformers"):
        yield Workload(name="BERT of transformers", job=bert_job(2 * samples, quick=quick), steps=steps)
    compiled = gpt_job(shape, samples, own_loss=True)
    yield Workload(name="gpt2, loss in the model, compile", job=compiled, steps=steps, compile=True)


@contextmanager
def without_table() -> Iterator[None]:
    """As bf16 was before operators had dtypes of their own."""
    with patch.object(operator_dtypes, "_MODES", {}), patch.object(operator_dtypes, "RULES", {}):
        yield


def our_step(workload: Workload, precision: str, device: torch.device) -> Callable[[Batch], Tensor]:
    text = f"single,{precision}{',compile' if workload.compile else ''}"
    trainer = Trainer(
        workload.job, describe(workload.job), Strategy.parse(text).resolve(1), World(device=device), seed=0
    )
    return lambda batch: trainer.step(batch).loss_tensor


def hand_written_step(workload: Workload, device: torch.device) -> Callable[[Batch], Tensor]:
    torch.manual_seed(0)
    job, model = workload.job, workload.job.model().to(device)
    optimizer = job.optimizer(model.parameters())
    call = torch.compile(model) if workload.compile else model

    def step(batch: Batch) -> Tensor:
        with torch.autocast(device.type, dtype=torch.bfloat16):
            inputs = job.inputs(batch)
            total, weight = job.loss(call(**inputs) if isinstance(inputs, dict) else call(*inputs), batch)
            loss = total / weight
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def measure(workload: Workload, variant: str, device: torch.device) -> dict[str, Any]:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    batch = {name: tensor.to(device) for name, tensor in workload.job.sample(workload.job.global_batch).items()}
    if variant == BY_HAND:
        step = hand_written_step(workload, device)
    else:
        step = our_step(workload, AUTOCAST if variant == AUTOCAST else NOW, device)
    first = float(step(batch))
    for _ in range(3):
        step(batch)
    seconds = [time_turn(step, batch, workload.steps, device) for _ in range(2)]
    peak = torch.cuda.max_memory_allocated() / GIB if device.type == "cuda" else 0.0
    return {
        "workload": workload.name,
        "variant": variant,
        "ms": round(min(seconds) * 1e3, 2),
        "peak_gib": round(peak, 3),
        "first_loss": round(first, 5),
        "last_loss": round(float(step(batch)), 5),
        "breaks": sum(torch._dynamo.utils.counters["graph_break"].values()),
    }


def time_turn(step: Callable[[Batch], Tensor], batch: Batch, steps: int, device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    started = time.perf_counter()
    for _ in range(steps):
        step(batch)
    if device.type == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - started) / steps


def time_functions(device: torch.device, calls: int = 20000) -> list[dict[str, Any]]:
    """Microseconds that the mode adds to one call of a torch function, on the host."""
    x, weight = (torch.ones(4, 4, device=device, dtype=torch.bfloat16) for _ in range(2))
    known = {"add (not in the table)": lambda: x + x, "linear (in it)": lambda: F.linear(x, weight)}
    rows = []
    for name, call in known.items():
        plain = time_calls(call, calls)
        with operator_dtypes.computing_in(torch.bfloat16):
            inside = time_calls(call, calls)
        rows.append({"function": name, "plain_us": round(plain, 2), "in_mode_us": round(inside, 2)})
    return rows


def time_calls(call: Callable[[], Any], calls: int) -> float:
    found = []
    for _ in range(3):
        started = time.perf_counter()
        for _ in range(calls):
            call()
        found.append((time.perf_counter() - started) / calls * 1e6)
    return median(found)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--quick", action="store_true", help="tiny models, to try the script")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        sys.exit("PyTorch finds no GPU here; use --device cpu --quick to try the script.")
    device = torch.device(options.device, 0) if options.device == "cuda" else torch.device("cpu")
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    print(f"{name}, torch {torch.__version__}")
    functions = time_functions(device, 500 if options.quick else 20000)
    for row in functions:
        print(f"{row['function']:24} {row['plain_us']:8.2f} us  in the mode {row['in_mode_us']:8.2f} us")
    print(f"{'workload':34} {'variant':18} {'ms':>9} {'peak GiB':>9} {'loss 1':>9} {'loss n':>9} {'breaks':>6}")
    rows = [show(row) for row in measure_all(device, quick=options.quick)]
    if "OUT" in os.environ:
        document = {"device": name, "torch": torch.__version__, "functions": functions, "rows": rows}
        Path(os.environ["OUT"], "precision_gpu.json").write_text(json.dumps(document, indent=1) + "\n")
    return 0


def measure_all(device: torch.device, *, quick: bool) -> Iterator[dict[str, Any]]:
    for workload in workloads(quick=quick):
        for variant in (BEFORE, NOW, BY_HAND) if workload.compile else (BEFORE, NOW, AUTOCAST, BY_HAND):
            if variant == BEFORE:
                with without_table():
                    yield measure(workload, variant, device)
            else:
                yield measure(workload, variant, device)
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()


def show(row: dict[str, Any]) -> dict[str, Any]:
    numbers = f"{row['ms']:9.2f} {row['peak_gib']:9.3f} {row['first_loss']:9.4f} {row['last_loss']:9.4f}"
    print(f"{row['workload']:34} {row['variant']:18} {numbers} {row['breaks']:6}", flush=True)
    return row


if __name__ == "__main__":
    sys.exit(main())
