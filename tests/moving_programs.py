"""What ranks do when checkpoints move: go on from one of ours, or train with PyTorch's FSDP2 and save as it does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

import moving_jobs
from meshwright.assemble.world import World
from meshwright.runtime.run import Run, setup
from moving_jobs import AFTER, BEFORE, Training, batch_of, by_hand, optimizer_of, schedule_of


def go_on(world: World | None, name: str, strategy: str, folder: str, steps: int = AFTER) -> list[float]:
    """Losses of a run of ours that begins with a checkpoint."""
    job = getattr(moving_jobs, name)
    if world is None:
        with setup(job, strategy, device="cpu") as run:
            return _losses(run, folder, steps)
    return _losses(setup(job, strategy, world=world), folder, steps)


def _losses(run: Run, folder: str, steps: int) -> list[float]:
    start = run.load(Path(folder)).step
    return [run.step(batch_of(start + step)).loss for step in range(steps)]


def train_and_save(world: World, strategy: str, folder: str) -> None:
    """A run of ours from the first step, saved after `BEFORE`."""
    run = setup(moving_jobs.job, strategy, world=world, seed=3)
    for step in range(BEFORE):
        run.step(batch_of(step))
    run.save(Path(folder))


def sharded_by_hand() -> Training:
    """PyTorch's FSDP2; every rank sees the whole batch, so that losses are those of one process."""
    model = by_hand().model
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = optimizer_of((name, p) for name, p in model.named_parameters() if p.requires_grad)
    return Training(model, optimizer, schedule_of(optimizer))


def fsdp_run(world: World, folder: str, kind: str) -> list[float]:
    """Train with FSDP2, save in one of the layouts that are built on DCP, and go on."""
    training = sharded_by_hand()
    training.go_on(BEFORE)
    save_sharded(training, folder, kind)
    return training.go_on(AFTER)


def save_sharded(training: Training, folder: str, kind: str) -> None:
    options = StateDictOptions(flatten_optimizer_state_dict=kind == "torchtitan")
    model, optimizer = get_state_dict(training.model, training.optimizer, options=options)
    schedule, step = training.schedule.state_dict(), training.step
    if kind == "dcp":
        dcp.save({"model": model, "optim": optimizer, "scheduler": schedule, "step": step}, checkpoint_id=folder)
    elif kind == "torchtitan":
        progress = {"step": torch.tensor(step, dtype=torch.int32), "ntokens_seen": torch.tensor(9)}
        rest = {
            "optimizer": optimizer,
            "lr_scheduler": schedule,
            "train_state": progress,
            "dataloader": {"dp_rank_0": b"x"},
        }
        dcp.save({**model, **rest}, checkpoint_id=folder)
    else:
        dcp.save({"model": model}, checkpoint_id=f"{folder}/pytorch_model_fsdp_0")
        dcp.save({"optimizer": optimizer}, checkpoint_id=f"{folder}/optimizer_0")
        if torch.distributed.get_rank() == 0:
            torch.save(schedule, f"{folder}/scheduler.bin")
            torch.save({"step": 0, "numpy": object}, f"{folder}/random_states_0.pkl")
        torch.distributed.barrier()


def fsdp_goes_on(world: World, folder: str, kind: str) -> list[float]:
    """Load one of our exports into FSDP2 as its documentation shows, and go on."""
    training = sharded_by_hand()
    model, optimizer = get_state_dict(training.model, training.optimizer)
    found: dict[str, Any] = {"model": model}, {"optimizer": optimizer}
    places = (folder, folder) if kind == "dcp" else (f"{folder}/pytorch_model_fsdp_0", f"{folder}/optimizer_0")
    for part, place in zip(found, places, strict=True):
        dcp.load(part, checkpoint_id=place)
    set_state_dict(
        training.model, training.optimizer, model_state_dict=found[0]["model"], optim_state_dict=found[1]["optimizer"]
    )
    if kind == "dcp":
        rest: dict[str, Any] = {"scheduler": training.schedule.state_dict()}
        dcp.load(rest, checkpoint_id=folder)
        training.schedule.load_state_dict(rest["scheduler"])
    else:
        training.schedule.load_state_dict(torch.load(f"{folder}/scheduler.bin", weights_only=True))
    training.step = BEFORE
    return training.go_on(AFTER)
