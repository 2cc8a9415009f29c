"""What `graphs` gains on one GPU for models of many small kernels, beside eager and `compile`.

    python benchmarks/host_gaps.py                   # a row per model and strategy; --only NAME runs one model
    python benchmarks/host_gaps.py --tiny            # the script itself on a CPU, in seconds

Each strategy trains the same model on the same batches. `apart` is the largest difference of the first losses and of a
parameter (relative to its size) from eager's after five steps. OUT=FOLDER also writes host_gaps.json there.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from gpt_model import GPT, Shape, make_up_batch, next_token_loss
from torch import Tensor
from torch.optim import AdamW

from meshwright import Job, Strategy
from meshwright.assemble.graphs import GraphedPasses
from meshwright.assemble.step import Trainer
from meshwright.assemble.world import World
from meshwright.describe.model import describe

STRATEGIES = ("single,bf16", "single,bf16,graphs", "single,bf16,compile", "single,bf16,compile,graphs")
COMPARED = 5
GIB = 2**30
Batch = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Workload:
    name: str
    job: Job


def clip_job(samples: int, *, tiny: bool) -> Job:
    """CLIP-B/32 with its contrastive loss over the whole batch."""
    from transformers import CLIPConfig, CLIPModel

    small = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = CLIPConfig(text_config=dict(small), vision_config=dict(small)) if tiny else CLIPConfig()

    def sample(count: int) -> Batch:
        generator = torch.Generator().manual_seed(0)
        return {
            "pixel_values": torch.randn(count, 3, 224, 224, generator=generator),
            "input_ids": torch.randint(1000, 40000, (count, 77), generator=generator),
        }

    def loss(output: Any, batch: Batch) -> tuple[Tensor, int]:
        own = torch.arange(len(batch["input_ids"]), device=batch["input_ids"].device)
        pairs = F.cross_entropy(output.logits_per_text, own) + F.cross_entropy(output.logits_per_image, own)
        return pairs / 2 * len(own), len(own)

    return Job(
        model=lambda: CLIPModel(config),
        inputs=lambda batch: batch,
        loss=loss,
        optimizer=lambda params: AdamW(params, lr=1e-5),
        sample=sample,
        global_batch=samples,
        max_norm=1.0,
    )


def swin_job(samples: int, *, tiny: bool) -> Job:
    """Swin-B as a classifier."""
    from transformers import SwinConfig, SwinForImageClassification

    sizes: dict[str, Any] = {"embed_dim": 128, "depths": [2, 2, 18, 2], "num_heads": [4, 8, 16, 32], "num_labels": 1000}
    if tiny:
        sizes = {"embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "num_labels": 10}
    config = SwinConfig(drop_path_rate=0.0, **sizes)

    def sample(count: int) -> Batch:
        generator = torch.Generator().manual_seed(0)
        labels = torch.randint(0, sizes["num_labels"], (count,), generator=generator)
        return {"x": torch.randn(count, 3, 224, 224, generator=generator), "y": labels}

    return Job(
        model=lambda: SwinForImageClassification(config),
        inputs=lambda batch: (batch["x"],),
        loss=lambda output, batch: (F.cross_entropy(output.logits, batch["y"], reduction="sum"), len(batch["y"])),
        optimizer=lambda params: AdamW(params, lr=1e-5),
        sample=sample,
        global_batch=samples,
        max_norm=1.0,
    )


def gpt_job(samples: int, *, tiny: bool) -> Job:
    """A GPT of 10 million parameters, as nanoGPT's for Shakespeare."""
    shape = Shape(layers=6, width=384, heads=6, length=256, vocabulary=128)
    if tiny:
        shape = Shape(layers=2, width=32, heads=2, length=16, vocabulary=64)
    return Job(
        model=lambda: GPT(shape),
        inputs=lambda batch: (batch["x"],),
        loss=lambda logits, batch: (next_token_loss(logits, batch, reduction="sum"), batch["y"].numel()),
        optimizer=lambda params: AdamW(params, lr=1e-4),
        sample=lambda count: make_up_batch(shape, count, torch.Generator().manual_seed(0)),
        global_batch=samples,
        max_norm=1.0,
    )


def workloads(*, tiny: bool) -> Iterator[Workload]:
    yield Workload(name="GPT 10M", job=gpt_job(4 if tiny else 64, tiny=tiny))
    yield Workload(name="CLIP-B/32", job=clip_job(2 if tiny else 128, tiny=tiny))
    yield Workload(name="Swin-B", job=swin_job(2 if tiny else 64, tiny=tiny))


def measure(job: Job, facts: Any, text: str, device: torch.device, steps: int) -> dict[str, Any]:
    """Milliseconds per step, the first losses and the parameters after them."""
    batch = job.sample(job.global_batch)
    batch = {name: tensor.to(device) for name, tensor in batch.items()}
    trainer = Trainer(job, facts, Strategy.parse(text).resolve(1), World(device=device), seed=0)
    losses = [trainer.step(batch).loss for _ in range(COMPARED)]
    parameters = [p.detach().float().cpu() for p in trainer.engine.model.parameters()]
    for _ in range(3):
        trainer.step(batch)
    synchronise(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    turns = []
    for _ in range(3):
        start = time.perf_counter()
        for _ in range(steps):
            trainer.step(batch)
        synchronise(device)
        turns.append((time.perf_counter() - start) / steps * 1e3)
    passes = trainer.passes
    recorded = len(passes._graphs) if isinstance(passes, GraphedPasses) else 0
    peak = torch.cuda.max_memory_reserved() / GIB if device.type == "cuda" else 0.0
    return {"ms": min(turns), "losses": losses, "parameters": parameters, "graphs": recorded, "peak": peak}


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def apart(one: dict[str, Any], other: dict[str, Any]) -> tuple[float, float]:
    losses = max(abs(a - b) for a, b in zip(one["losses"], other["losses"], strict=True))
    pairs = zip(one["parameters"], other["parameters"], strict=True)
    return losses, max(float((a - b).norm() / (b.norm() + 1e-12)) for a, b in pairs)


def attempt(run: Callable[[], dict[str, Any]]) -> dict[str, Any] | str:
    try:
        return run()
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:300]}"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--only", default="")
    parser.add_argument("--strategies", nargs="*", default=STRATEGIES)
    asked = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() and not asked.tiny else "cpu")
    torch.set_float32_matmul_precision("high")
    rows = []
    for workload in workloads(tiny=asked.tiny):
        if asked.only not in workload.name:
            continue
        facts = describe(workload.job)
        print(f"{workload.name}: by_value={facts.by_value} moved={facts.moved} drops={facts.drops}", flush=True)
        eager: dict[str, Any] | None = None
        for text in asked.strategies:
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                steps = 2 if asked.tiny else 20
                found = attempt(lambda: measure(workload.job, facts, text, device, steps))  # noqa: B023
            said = sorted({str(one.message)[:200] for one in told if "graphs" in str(one.message)})
            gc.collect()
            if isinstance(found, str):
                print(f"  {text:30} FAILED {found}", flush=True)
                continue
            eager = eager or found
            losses, parameters = apart(found, eager)
            row = {
                "model": workload.name,
                "strategy": text,
                "ms": round(found["ms"], 2),
                "of_eager": round(eager["ms"] / found["ms"], 2),
                "losses_apart": losses,
                "parameters_apart": parameters,
                "graphs": found["graphs"],
                "reserved_gib": round(found["peak"], 2),
            }
            rows.append(row)
            print(f"  {json.dumps(row)} {' '.join(said)}", flush=True)
            del found
            if device.type == "cuda":
                torch.cuda.empty_cache()
    if folder := os.environ.get("OUT"):
        Path(folder, "host_gaps.json").write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    sys.exit(main())
