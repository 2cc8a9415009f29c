"""Files of other tools' checkpoints that hold more than weights: one function per kind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from meshwright.checkpoint.foreign.dcp import write_dcp
from meshwright.checkpoint.foreign.folder import FSDP_OPTIMIZER, FSDP_WEIGHTS, SCALER, TRAINER_STATE
from meshwright.checkpoint.storage import flush, write_durably
from meshwright.checkpoint.training_documents import TrainingDocuments

LIGHTNING = "2.0.0"
"""The oldest release of Lightning with this layout: newer ones migrate it."""


def write_torch_training(folder: Path, state: TrainingDocuments) -> None:
    """One file, as training scripts save it."""
    _save(folder / "checkpoint.pt", {"model": state.model(), **_parts(state, state.numbered_optimizer())})


def write_dcp_training(folder: Path, state: TrainingDocuments) -> None:
    """The same by parameter name, as `dcp.save` writes it."""
    write_dcp(folder, {"model": state.model(), **_parts(state, state.named_optimizer())})


def write_accelerate(folder: Path, state: TrainingDocuments) -> None:
    """What `Accelerator.save_state` writes next to model.safetensors."""
    _save(folder / "optimizer.bin", state.numbered_optimizer())
    _save(folder / "scheduler.bin", state.schedule())
    _save(folder / SCALER, state.scaler())


def write_accelerate_fsdp(folder: Path, state: TrainingDocuments) -> None:
    """What `Accelerator.save_state` writes under FSDP with sharded state dicts."""
    write_dcp(folder / FSDP_WEIGHTS, {"model": state.model()})
    if (optimizer := state.named_optimizer()) is not None:
        write_dcp(folder / FSDP_OPTIMIZER, {"optimizer": optimizer})
    _save(folder / "scheduler.bin", state.schedule())
    _save(folder / SCALER, state.scaler())


def write_trainer(folder: Path, state: TrainingDocuments) -> None:
    """What the Trainer of transformers writes next to the model."""
    _save(folder / "optimizer.pt", state.numbered_optimizer())
    _save(folder / "scheduler.pt", state.schedule())
    _save(folder / SCALER, state.scaler())
    step, samples = state.run_state.step, state.run_state.samples
    progress = {
        "global_step": step,
        "train_batch_size": max(1, samples // max(1, step)),
        "stateful_callbacks": {"TrainerControl": {"args": {}, "attributes": {}}},  # the Trainer's next save needs it
    }
    write_durably(folder / TRAINER_STATE, json.dumps(progress, indent=2) + "\n")


def write_lightning(folder: Path, state: TrainingDocuments) -> None:
    """A .ckpt of Lightning's Trainer, which then begins an epoch at this step."""
    step, optimizer, schedule, scaler = (
        state.run_state.step,
        state.numbered_optimizer(),
        state.schedule(),
        state.scaler(),
    )
    done = {"ready": step, "completed": step}
    progress = {
        "step": {"total": done, "current": done},
        "zero_grad": {"total": {**done, "started": step}, "current": {**done, "started": step}},
    }
    content: dict[str, Any] = {
        "epoch": 0,
        "global_step": step,
        "pytorch-lightning_version": LIGHTNING,
        "state_dict": state.model(),
        "loops": {
            "fit_loop": {
                "epoch_loop.state_dict": {"_batches_that_stepped": step},
                "epoch_loop.automatic_optimization.optim_progress": {"optimizer": progress},
            }
        },
        "callbacks": {},
        "optimizer_states": [] if optimizer is None else [optimizer],
        "lr_schedulers": [] if schedule is None else [schedule],
    }
    _save(folder / "checkpoint.ckpt", content | ({} if scaler is None else {"MixedPrecision": scaler}))


def _parts(state: TrainingDocuments, optimizer: dict[str, Any] | None) -> dict[str, Any]:
    parts = {"optimizer": optimizer, "scheduler": state.schedule(), "scaler": state.scaler()}
    return {**{name: part for name, part in parts.items() if part is not None}, "step": state.run_state.step}


def _save(path: Path, content: Any) -> None:
    """Write what there is; all of it is mapped until it is written."""
    if content is not None:
        with path.open("wb") as file:
            torch.save(content, file)
            flush(file)
