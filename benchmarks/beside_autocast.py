"""A step of `single,bf16` beside a hand-written loop under `torch.autocast`, for models of transformers on one GPU.

    python benchmarks/beside_autocast.py            # a table; OUT=FOLDER also writes beside_autocast.json there
    python benchmarks/beside_autocast.py --device cpu --quick    # the script itself, in seconds
    python benchmarks/beside_autocast.py --only clip --profile   # where each spends its time

All train the same model on the same batch with AdamW (fused) and clipping. They take turns of `STEPS` steps; a ratio is
the median over the turns. `launches` counts the kernels of one step, `host` the time until the host has queued a step's
work. `casts as read` is our step without its copies of the parameters: each is cast where it is read.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.optim import AdamW
from torch.profiler import ProfilerActivity, profile

from meshwright import Job, Strategy
from meshwright.assemble.low_copies import LowCopies
from meshwright.assemble.step import Trainer
from meshwright.assemble.world import World
from meshwright.describe.model import describe
from meshwright.facts.model import ModelFacts

MAX_NORM = 1.0
STEPS, TURNS = 10, 7
GIB = 2**30
Batch = dict[str, Tensor]
Step = Callable[[], Tensor]


@dataclass(frozen=True, kw_only=True)
class Workload:
    name: str
    model: Callable[[], nn.Module]
    sample: Callable[[int], Batch]
    samples: int
    loss_over: str = "samples"

    @property
    def job(self) -> Job:
        return Job(
            model=self.model,
            inputs=lambda batch: batch,
            loss=lambda output, batch: (output.loss * first_length(batch), first_length(batch)),
            loss_over=self.loss_over,
            optimizer=lambda params: AdamW(params, lr=1e-4, fused=torch.cuda.is_available()),
            sample=self.sample,
            global_batch=self.samples,
            max_norm=MAX_NORM,
        )


def first_length(batch: Batch) -> int:
    return len(next(iter(batch.values())))


def tokens(count: int, length: int, vocabulary: int) -> Tensor:
    return torch.randint(3, vocabulary, (count, length), generator=torch.Generator().manual_seed(0))


def images(count: int, size: int) -> Tensor:
    return torch.randn(count, 3, size, size, generator=torch.Generator().manual_seed(0))


def clip(*, quick: bool) -> Workload:
    from transformers import CLIPConfig, CLIPModel

    small = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2}
    config = CLIPConfig(text_config=small, vision_config=small) if quick else CLIPConfig()

    def sample(count: int) -> Batch:
        text = tokens(count, 77, config.text_config.vocab_size - 1)
        return {"input_ids": text, "pixel_values": images(count, config.vision_config.image_size)}

    class WithLoss(CLIPModel):
        def forward(self, **inputs: Any) -> Any:
            return super().forward(**inputs, return_loss=True)

    samples = 4 if quick else 128
    return Workload(name="CLIP-B/32", model=lambda: WithLoss(config), sample=sample, samples=samples, loss_over="batch")


def swin(*, quick: bool) -> Workload:
    from transformers import SwinConfig, SwinForImageClassification

    config = SwinConfig(num_labels=1000, **({"depths": [1, 1, 1, 1], "embed_dim": 24} if quick else {}))
    return Workload(
        name="Swin-T", model=lambda: SwinForImageClassification(config), sample=labelled, samples=2 if quick else 64
    )


def vit(*, quick: bool) -> Workload:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(num_labels=1000, num_hidden_layers=2 if quick else 12)
    return Workload(
        name="ViT-B/16", model=lambda: ViTForImageClassification(config), sample=labelled, samples=2 if quick else 64
    )


def labelled(count: int) -> Batch:
    return {"pixel_values": images(count, 224), "labels": tokens(count, 1, 1000)[:, 0]}


def whisper(*, quick: bool) -> Workload:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    layers, width = (1, 64) if quick else (12, 768)
    config = WhisperConfig(
        encoder_layers=layers,
        decoder_layers=layers,
        d_model=width,
        encoder_attention_heads=width // 64,
        decoder_attention_heads=width // 64,
        encoder_ffn_dim=4 * width,
        decoder_ffn_dim=4 * width,
    )

    def sample(count: int) -> Batch:
        sound = torch.randn(count, 80, 3000, generator=torch.Generator().manual_seed(0))
        return {"input_features": sound, "labels": tokens(count, 200, config.vocab_size)}

    return Workload(
        name="Whisper-small",
        model=lambda: WhisperForConditionalGeneration(config),
        sample=sample,
        samples=1 if quick else 16,
    )


def gpt2(*, quick: bool) -> Workload:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_layer=2 if quick else 12)
    return text_workload("GPT-2", lambda: GPT2LMHeadModel(config), 16 if quick else 1024, config.vocab_size, quick, 8)


def llama(*, quick: bool) -> Workload:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32000,
        hidden_size=64 if quick else 2048,
        intermediate_size=128 if quick else 5632,
        num_hidden_layers=2 if quick else 22,
        num_attention_heads=2 if quick else 32,
        num_key_value_heads=2 if quick else 4,
    )
    model = lambda: LlamaForCausalLM(config)  # noqa: E731
    return text_workload("Llama-1B", model, 16 if quick else 2048, config.vocab_size, quick, 4)


def text_workload(
    name: str, model: Callable[[], nn.Module], length: int, vocabulary: int, quick: bool, samples: int
) -> Workload:
    def sample(count: int) -> Batch:
        text = tokens(count, length, vocabulary)
        return {"input_ids": text, "labels": text}

    return Workload(name=name, model=model, sample=sample, samples=2 if quick else samples)


WORKLOADS = {"clip": clip, "swin": swin, "vit": vit, "whisper": whisper, "gpt2": gpt2, "llama": llama}


def our_step(job: Job, facts: ModelFacts, batch: Batch, device: torch.device, strategy: str, *, copies: bool) -> Step:
    trainer = Trainer(job, facts, Strategy.parse(strategy).resolve(1), World(device=device), seed=0)
    if copies:
        return lambda: trainer.step(batch).loss_tensor

    def step() -> Tensor:
        with patch.object(LowCopies, "shared", lambda *_: nullcontext()):
            return trainer.step(batch).loss_tensor

    return step


def hand_written_step(job: Job, batch: Batch, device: torch.device) -> Step:
    torch.manual_seed(0)
    model = job.model().to(device).train()
    optimizer = job.optimizer(model.parameters())

    def step() -> Tensor:
        with torch.autocast(device.type, dtype=torch.bfloat16):
            loss = model(**batch).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def measure(workload: Workload, device: torch.device, strategy: str, *, quick: bool, profiled: bool) -> dict[str, Any]:
    job = workload.job
    batch = {name: tensor.to(device) for name, tensor in job.sample(job.global_batch).items()}
    facts = describe(job)
    steps = {
        "ours": our_step(job, facts, batch, device, strategy, copies=True),
        "casts as read": our_step(job, facts, batch, device, strategy, copies=False),
        "by hand": hand_written_step(job, batch, device),
    }
    losses = {name: float(step()) for name, step in steps.items()}
    for step in steps.values():
        for _ in range(1 if quick else 4):
            step()
    row: dict[str, Any] = {"workload": workload.name, "first_losses": losses}
    for name, step in steps.items():
        if profiled:
            print(f"\n{workload.name}, {name}")
        row[name] = {"launches": count_launches(step, device, table=profiled), "peak_gib": peak_of(step, device)}
    turns: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}
    for _ in range(2 if quick else TURNS):
        for name, step in steps.items():
            turns[name].append(time_turn(step, 1 if quick else STEPS, device))
    for name, found in turns.items():
        row[name] |= {"ms": round(median(t for t, _ in found), 2), "host_ms": round(median(h for _, h in found), 2)}
    for name in ("ours", "casts as read"):
        ratios = [ours / other for (ours, _), (other, _) in zip(turns[name], turns["by hand"], strict=True)]
        row[name] |= {"ratio": round(median(ratios), 3), "ratios": [round(ratio, 3) for ratio in sorted(ratios)]}
    return row


def time_turn(step: Step, steps: int, device: torch.device) -> tuple[float, float]:
    """Milliseconds of a step, and until the host has queued it."""
    synchronise(device)
    started = time.perf_counter()
    for _ in range(steps):
        step()
    queued = time.perf_counter()
    synchronise(device)
    return (time.perf_counter() - started) / steps * 1e3, (queued - started) / steps * 1e3


def peak_of(step: Step, device: torch.device) -> float:
    if device.type == "cpu":
        return 0.0
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    synchronise(device)
    return round((torch.cuda.max_memory_allocated() - before) / GIB, 3)


def count_launches(step: Step, device: torch.device, *, table: bool) -> int:
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        step()
        synchronise(device)
    events = profiler.key_averages()
    if table:
        print(events.table(sort_by="self_cpu_time_total", row_limit=28, max_name_column_width=44))
    return sum(event.count for event in events if event.key.startswith("cudaLaunchKernel"))


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def show(row: dict[str, Any]) -> dict[str, Any]:
    for name in ("ours", "casts as read", "by hand"):
        found = row[name]
        numbers = " ".join(f"{found[key]:10}" for key in ("ms", "host_ms", "launches", "peak_gib"))
        loss = row["first_losses"][name]
        print(f"{row['workload']:14} {name:14} {found.get('ratio', 1.0):6.3f} {numbers} {loss:9.4f}", flush=True)
    return row


def rows(options: argparse.Namespace, device: torch.device) -> Iterator[dict[str, Any]]:
    for name in options.only or WORKLOADS:
        workload = WORKLOADS[name](quick=options.quick)
        yield show(measure(workload, device, options.strategy, quick=options.quick, profiled=options.profile))
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--only", nargs="+", choices=list(WORKLOADS))
    parser.add_argument("--strategy", default="single,bf16")
    parser.add_argument("--quick", action="store_true", help="tiny models, to try the script")
    parser.add_argument("--profile", action="store_true", help="print where the host spends its time")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        sys.exit("PyTorch finds no GPU here; use --device cpu --quick to try the script.")
    device = torch.device(options.device, 0) if options.device == "cuda" else torch.device("cpu")
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    print(f"{name}, torch {torch.__version__}, {options.strategy}")
    head = " ".join(f"{title:>10}" for title in ("ms", "host ms", "launches", "+peak GiB"))
    print(f"{'workload':14} {'step':14} {'ratio':>6} {head} {'loss':>9}")
    found = list(rows(options, device))
    if "OUT" in os.environ:
        document = {"device": name, "torch": torch.__version__, "strategy": options.strategy, "rows": found}
        Path(os.environ["OUT"], "beside_autocast.json").write_text(json.dumps(document, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
