"""What ranks do with DeepSpeed in tests: runs of its own, without Meshwright, and engines of ours looked into."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import StepLR

import tiny_jobs
from checkpoint_jobs import EPS, job_of
from meshwright.assemble.world import World
from meshwright.runtime.run import setup
from meshwright.strategies.deepspeed import package
from meshwright.strategies.deepspeed.pieces import joined, pieces_of
from meshwright.verify.plain_training import seeded_batch
from rank_programs import trainer

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
Truth = dict[str, tuple[torch.Tensor, ...]]
"""By parameter: master, first and second moment."""


LEAVES_TORCH_ALONE = {"memory_efficient_linear": False}
"""Else stage 3 puts a function of its own in the place of `torch.nn.functional.linear`, for the rest of the process."""


def plain_run(world: World, job: str, stage: int, precision: str, folder: str) -> Truth:
    """Three steps as DeepSpeed's documentation shows them, and its own checkpoint."""
    deepspeed = package.joined_to_ranks(world.device)
    chosen = job_of(job)
    torch.manual_seed(0)
    model = chosen.model()
    for module in model.modules():  # DeepSpeed casts parameters only
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = buffer.to(DTYPES[precision])
        if isinstance(getattr(module, "shift", None), torch.Tensor):
            module.shift = module.shift.to(DTYPES[precision])  # type: ignore[operator]
    groups: list[list[nn.Parameter]] = [[], []]
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            groups[name.endswith("bias")].append(parameter)
    optimizer = torch.optim.AdamW([{"params": groups[0]}, {"params": groups[1], "weight_decay": 0.0}], lr=1e-3, eps=EPS)
    engine = deepspeed.initialize(
        model=model,
        optimizer=optimizer,
        lr_scheduler=StepLR(optimizer, 1, gamma=0.5),
        config={
            "train_micro_batch_size_per_gpu": chosen.global_batch // world.ranks,
            "gradient_clipping": chosen.max_norm,
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 20, **LEAVES_TORCH_ALONE},
            "bf16": {"enabled": precision == "bf16"},
            "fp16": {"enabled": precision == "fp16", "initial_scale_power": 8},
            "zero_allow_untested_optimizer": True,
        },
    )[0]
    for step in range(3):
        batch = _own_part(seeded_batch(chosen, step), world)
        loss, weight = tiny_jobs.token_loss(engine(batch["x"]).float(), batch)
        engine.backward(loss / weight)
        engine.step()
    engine.save_checkpoint(folder)
    return _truth(model, engine, optimizer, stage)


def _own_part(batch: dict[str, torch.Tensor], world: World) -> dict[str, torch.Tensor]:
    return {key: value.chunk(world.ranks)[world.rank] for key, value in batch.items()}


def _truth(model: nn.Module, engine: Any, optimizer: torch.optim.Optimizer, stage: int) -> Truth:
    named = dict(model.named_parameters())
    if not stage:
        states = {name: optimizer.state[p] for name, p in named.items() if p in optimizer.state}
        return {n: (named[n].detach().clone(), s["exp_avg"], s["exp_avg_sq"]) for n, s in states.items()}
    shapes = {name: getattr(parameter, "ds_shape", parameter.shape) for name, parameter in named.items()}
    names = {id(parameter): name for name, parameter in named.items()}
    found = {}
    for piece in pieces_of(engine.optimizer, names, shapes):
        state = optimizer.state[piece.flat]
        parts = (piece.flat.detach(), state["exp_avg"], state["exp_avg_sq"])
        whole = [joined(piece.of(part), piece.stretch, dist.group.WORLD, torch.device("cpu")) for part in parts]
        found[piece.name] = tuple(tensor.clone() for tensor in whole)
    return found


def go_on_from(world: World, job: str, strategy: str, folder: str, steps: int) -> list[float]:
    """Losses of a run that begins with a checkpoint, on made-up batches from its step on."""
    run = setup(job_of(job), strategy, world=world)
    run_state = run.load(Path(folder))
    return [run.step(seeded_batch(job_of(job), run_state.step + step)).loss for step in range(steps)]


def losses(world: World, job: str, strategy: str, steps: int) -> list[float]:
    made = trainer(world, replace(job_of(job), data=None), strategy)
    return [made.step(seeded_batch(job_of(job), step)).loss for step in range(steps)]


def configured(world: World, strategy: str, config: dict[str, Any]) -> tuple[dict[str, Any], float]:
    """What DeepSpeed's engine made of a configuration, and a step's loss under it."""
    run = setup(tiny_jobs.transformer, strategy, world=world, deepspeed_config=config)
    zero = run.trainer.engine._deepspeed._config.zero_config  # type: ignore[attr-defined]
    return zero.model_dump(), run.step(seeded_batch(tiny_jobs.transformer, 0)).loss


def evaluated(world: World, job: str, strategy: str) -> float:
    chosen = getattr(tiny_jobs, job)
    made = trainer(world, replace(chosen, schedule=None), strategy)
    before = made.evaluate([seeded_batch(chosen, 0), seeded_batch(replace(chosen, global_batch=5), 1)])
    made.step(seeded_batch(chosen, 2))
    return before


def empty_group(world: World, strategy: str, folder: str) -> list[int]:
    """A job one of whose groups has no parameters on the first stage: parameters of each group in the checkpoint."""

    def build(params: Any) -> SGD:
        head = [p for name, p in params.named() if name.startswith("5.")]
        rest = [p for name, p in params.named() if not name.startswith("5.")]
        return SGD([{"params": rest}, {"params": head, "lr": 0.02}], lr=0.01, momentum=0.9)

    run = setup(replace(tiny_jobs.sequential, optimizer=build), strategy, world=world)
    run.step(seeded_batch(tiny_jobs.sequential, 0))
    run.save(folder)
    run.load(folder)
    return [len(group["params"]) for group in run.trainer.remembered.param_groups]
