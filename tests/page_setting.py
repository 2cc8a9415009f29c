"""What commands and snippets of pages find where they run: files by name, and names that a snippet does not define."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.optim import AdamW
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

import meshwright as mw
from meshwright import Evaluation, Job, Metric, Strategy
from meshwright.assemble.world import World
from page_blocks import ROOT, blocks, side
from page_programs import Page

(DIFF,) = blocks("README.md", "diff")
OF_AN_EXAMPLE = """import sys
from dataclasses import replace

sys.path.append("examples")
from {example} import job as plain

job = replace(plain{fields})
"""
MIXTURE = f"""import sys

sys.path.append({str(ROOT / "tests")!r})
from mixture_jobs import find_job

job = find_job("stacked by hand")
"""
JOBS = {
    "docs/adopt.md": None,
    "docs/checkpoints.md": OF_AN_EXAMPLE.format(example="hf_gpt2", fields=", ema=0.9"),
    "docs/explain.md": OF_AN_EXAMPLE.format(example="gpt", fields=""),
    "docs/rehearse.md": OF_AN_EXAMPLE.format(example="gpt", fields=""),
    "docs/strategies/expert.md": MIXTURE,
}
"""Pages whose `job.py` is not the README's; None where a command writes it."""
LLAMA = {
    **{"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 512, "num_hidden_layers": 4},
    **{"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "max_position_embeddings": 128},
}
DEEPSPEED = {"train_micro_batch_size_per_gpu": 8, "zero_optimization": {"stage": 2}, "bf16": {"enabled": True}}
COLUMNS = (
    "arch,n_layers,d_model,n_heads,n_kv_heads,d_ff,vocab,seq_len,gated_mlp,gpu,gpus_per_node,n_gpus,dp_replicate,"
    "dp_shard,zero_stage,tp,pp,micro_batch,grad_accum,activation_ckpt,status,tok_s_gpu,peak_mem_gib"
)
ROW = "llama-1b,16,2048,32,8,8192,128256,4096,true,H100-80GB,8,8,1,8,3,1,1,1,4,none,ok,21000,44"


def write_setting(page: str, folder: Path) -> None:
    """The files that commands of this page name."""
    job = JOBS.get(page, side(DIFF, "+"))
    if job is not None:
        (folder / "job.py").write_text(job)
    (folder / "train.py").write_text(of_moving("pytorch")["before.py"])
    (folder / "net.py").write_text(of_moving("README")["net.py"])
    (folder / "examples").symlink_to(ROOT / "examples")
    (folder / "my-model").mkdir()
    (folder / "my-model" / "config.json").write_text(json.dumps(LLAMA))
    (folder / "my-cluster.json").write_text(blocks("docs/clusters.md", "json")[0])
    (folder / "ds.json").write_text(json.dumps(DEEPSPEED))
    for name in ("my-runs.csv", "published_rows.csv"):
        (folder / name).write_text(f"{COLUMNS}\n{ROW}\n")
    if page == "docs/checkpoints.md":
        torch.save(_example("hf_gpt2").model().state_dict(), folder / "ckpt.pt")


def of_moving(page: str) -> dict[str, str]:
    """The files that a page of docs/moving shows."""
    return Page(ROOT / "docs" / "moving" / f"{page}.md").files


def _example(name: str) -> Job:
    from meshwright.jobs.load import load_job

    return load_job(str(ROOT / "examples" / f"{name}.py"))


def readme_job() -> Job:
    names: dict[str, Any] = {}
    exec(side(DIFF, "+"), names)
    job: Job = names["job"]
    return job


class LlamaDecoderLayer(nn.Module):
    """Named as one in transformers, with the layers that docs/strategies/tensor.md names."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.gate, self.down = nn.Linear(64, 128), nn.Linear(64, 64), nn.Linear(128, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.gate(x).sigmoid() * self.down(self.up(x).relu())


class Decoder(nn.Module):
    """Large enough for every hint of the strategies' pages; it is only built on the meta device."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(LlamaDecoderLayer() for _ in range(16))
        self.lm_head = nn.Linear(64, 800_000)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.lm_head(x)


DECODER = Job(
    model=Decoder,
    inputs=lambda batch: (batch["x"],),
    loss=lambda output, batch: (output.sum(), len(batch["x"])),
    optimizer=lambda params: AdamW(params, lr=1e-3),
    sample=lambda n: {"x": torch.zeros(n, 64)},
    global_batch=16,
)
Names = dict[str, Any]
Check = Callable[[Names], None]


def nothing_to_check(names: Names) -> None:
    """That the snippet ran is all that the page says."""


def hints(base: Job, strategy: str) -> tuple[Names, Check]:
    """`Job(..., field=value)` is the base with that field, and the strategy takes the hint."""
    made: list[Job] = []

    def job_with(*rest: Any, **fields: Any) -> Job:
        assert rest == (...,)
        made.append(replace(base, **fields))
        return made[-1]

    def check(names: Names) -> None:
        assert made
        for job in made:
            mw.layout(job, strategy)

    return {"Job": job_with}, check


def data_kinds(folder: Path) -> tuple[Names, Check]:
    job = readme_job()
    dataset = job.data
    names, take_hints = hints(job, "ddp=2")
    few = TensorDataset(*(tensor[:128] for tensor in dataset.tensors))
    run = mw.setup(replace(job, data=few), "single")

    def stream(urls: list[str]) -> Iterator[Any]:
        yield from (dataset[number] for number in range(len(urls)))

    def check(names: Names) -> None:
        if "result" in names:
            assert names["result"].step == 6  # three epochs of two steps
        else:
            take_hints(names)

    names |= {"dataset": dataset, "stream": stream, "urls": ["a"] * 64, "weights": torch.ones(len(dataset)), "run": run}
    return names | {"DataLoader": DataLoader, "WeightedRandomSampler": WeightedRandomSampler}, check


def metrics(folder: Path) -> tuple[Names, Check]:
    names, _ = hints(readme_job(), "ddp=2")
    parts = {name: torch.tensor(1.0) for name in ("hits", "misses", "alarms")}
    names |= {"Evaluation": Evaluation, "Metric": Metric, "AdamW": AdamW, "torch": torch, **parts}
    return names | {"held_out": readme_job().data}, nothing_to_check


def saved_gpt(folder: Path) -> tuple[Names, Check]:
    place = folder / "runs" / "a" / "checkpoints" / "step-00000120"
    place.parent.mkdir(parents=True)
    job = _example("gpt")
    with mw.setup(job, "single", seed=0) as run:
        run.save(str(place))
    torch.manual_seed(0)
    wanted = job.model().state_dict()["token.weight"]

    def check(names: Names) -> None:
        assert torch.equal(names["whole"], wanted)

    return {}, check


def foreign_config(folder: Path) -> tuple[Names, Check]:
    from page_runner import run_verb

    words = ["export", "fsdp=8,bf16,ac=full,mb=2", "--to", "accelerate", "--out", "accelerate.yaml"]
    run_verb(["meshwright", *words], folder)

    def check(names: Names) -> None:
        assert names["theirs"].origin == "accelerate" and names["file"].text

    return {}, check


def whole_job(folder: Path) -> tuple[Names, Check]:
    def check(names: Names) -> None:
        mw.layout(names["job"], "fsdp=2")

    return {"__name__": "job"}, check


def plain_build(folder: Path) -> tuple[Names, Check]:
    samples = {"tokens": torch.arange(5), "lengths": torch.tensor([2, 3])}

    def check(names: Names) -> None:
        if "split" in names:
            assert [len(one["tokens"]) for one in names["split"](samples)] == [2, 3]

    return {"torch": torch, "seed": 0, "build": readme_job().model}, check


def contrastive(folder: Path) -> tuple[Names, Check]:
    from torch.nn.functional import cross_entropy

    def check(names: Names) -> None:
        output = {"image": torch.eye(4), "text": torch.eye(4), "scale": torch.tensor(2.0)}
        total, weight = names["loss"](output, {})
        assert total.isfinite() and weight == 4

    return {"torch": torch, "cross_entropy": cross_entropy}, check


def traced(folder: Path) -> tuple[Names, Check]:
    from meshwright.describe.model import describe

    job = replace(readme_job(), global_batch=128)
    strategy = Strategy.parse("pp=2:1f1b")
    names = {"job": job, "facts": describe(job), "Strategy": Strategy, "strategy": strategy, "ranks": 2}

    def check(names: Names) -> None:
        assert names["trace"].peak == sum(names["trace"].memory.values())

    return names, check


NAMES: dict[str, Callable[[Path], tuple[Names, Check]]] = {
    "docs/checkpoints.md": saved_gpt,
    "docs/data.md": data_kinds,
    "docs/exchange.md": foreign_config,
    "docs/first-try.md": whole_job,
    "docs/jobs.md": metrics,
    "docs/policies.md": contrastive,
    "docs/same-training.md": plain_build,
    "docs/strategies/fsdp.md": lambda folder: hints(DECODER, "fsdp=2"),
    "docs/strategies/pipeline.md": lambda folder: hints(DECODER, "pp=4:1f1b"),
    "docs/strategies/tensor.md": lambda folder: hints(DECODER, "tp=2"),
    "docs/tracing.md": traced,
}
"""By page, what its snippets may use, and what must hold after each."""


def run_own_loop(world: World, code: str) -> None:
    """A snippet of docs/own-loops.md on the ranks of a pool, as torchrun would have started it."""
    job = readme_job()
    batch = {"x": torch.rand(64, 32), "y": torch.zeros(64, dtype=torch.long)}

    def loss(output: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
        return nn.functional.cross_entropy(output, batch["y"], reduction="sum"), len(batch["y"])

    def build_frozen() -> nn.Module:
        return job.model().requires_grad_(False)

    names = {
        **{"mw": mw, "torch": torch, "build": job.model, "make_optimizer": job.optimizer, "batch": batch, "loss": loss},
        **{"inputs": lambda b: (b["x"],), "batches": [batch, batch], "Generator": job.model, "Critic": job.model},
        "build_frozen": build_frozen,
    }
    ranks = {"RANK": world.rank, "LOCAL_RANK": world.rank, "WORLD_SIZE": world.ranks, "LOCAL_WORLD_SIZE": world.ranks}
    meeting = {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}  # they have met already
    with patch.dict(os.environ, {key: str(value) for key, value in ranks.items()} | meeting):
        exec(code, names)
