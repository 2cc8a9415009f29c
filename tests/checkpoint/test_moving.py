"""Checkpoints of other tools in and out: the next ten losses are those of the training that was never moved."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import moving_jobs
import moving_programs
from meshwright.checkpoint.exports import export
from meshwright.checkpoint.imports import import_weights
from moving_jobs import AFTER, BATCH, BEFORE, Training, batch_of, by_hand, mean_loss
from rank_pool import RankPool

JOBS = moving_jobs.__file__
CLOSE = 1e-5


def close(losses: list[float]) -> Any:
    assert len(losses) == AFTER
    return pytest.approx(losses, rel=CLOSE)


# One writer and one reader per kind: what a script does with that tool.


def torch_write(training: Training, folder: Path) -> Path:
    """As nanoGPT does it, from a compiled model."""
    folder.mkdir()
    content = {
        "model": {f"_orig_mod.{name}": tensor for name, tensor in training.model.state_dict().items()},
        "optimizer": training.optimizer.state_dict(),
        "scheduler": training.schedule.state_dict(),
        "iter_num": training.step,
        "best_val_loss": torch.tensor(2.5),
        "config": {"learning_rate": 3e-3},
    }
    torch.save(content, folder / "ckpt.pt")
    return folder / "ckpt.pt"


def torch_read(training: Training, folder: Path) -> None:
    content = torch.load(folder / "checkpoint.pt", weights_only=True)
    training.model.load_state_dict(content["model"])
    training.optimizer.load_state_dict(content["optimizer"])
    training.schedule.load_state_dict(content["scheduler"])
    training.step = content["step"]


def accelerated(training: Training) -> Any:
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True)
    prepared = accelerator.prepare(training.model, training.optimizer, training.schedule)
    training.model, training.optimizer, training.schedule = prepared
    return accelerator


def accelerate_write(training: Training, folder: Path) -> Path:
    accelerated(training).save_state(str(folder))
    return folder


def accelerate_read(training: Training, folder: Path) -> None:
    accelerated(training).load_state(str(folder))
    training.step = BEFORE


def lightning_module(training: Training, losses: list[float]) -> Any:
    lightning = pytest.importorskip("pytorch_lightning")

    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = training.model

        def training_step(self, batch: Tensor, at: int) -> Tensor:
            loss = mean_loss(self.model, int(batch))
            losses.append(loss.item())
            return loss

        def configure_optimizers(self) -> Any:
            schedule = {"scheduler": training.schedule, "interval": "step"}
            return {"optimizer": training.optimizer, "lr_scheduler": schedule}

    return Module()


def lightning_fit(training: Training, first: int, last: int, **options: Any) -> tuple[Any, list[float]]:
    losses: list[float] = []
    module = lightning_module(training, losses)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = pytest.importorskip("pytorch_lightning").Trainer(
        max_steps=last, accelerator="cpu", enable_model_summary=False, **quiet
    )
    trainer.fit(module, DataLoader(list(range(first, last)), batch_size=None), **options)
    return trainer, losses


def lightning_write(training: Training, folder: Path) -> Path:
    """The dict that Lightning's `dump_checkpoint` makes."""
    folder.mkdir()
    content = {
        "epoch": 0,
        "global_step": training.step,
        "pytorch-lightning_version": "2.6.0",
        "state_dict": {f"model.{name}": tensor for name, tensor in training.model.state_dict().items()},
        "loops": {"fit_loop": {"state_dict": {}}},
        "callbacks": {},
        "optimizer_states": [training.optimizer.state_dict()],
        "lr_schedulers": [training.schedule.state_dict()],
        "hparams_name": "kwargs",
        "hyper_parameters": {"width": 16},
    }
    torch.save(content, folder / "last.ckpt")
    return folder / "last.ckpt"


def lightning_read(training: Training, folder: Path) -> None:
    """What Lightning restores of a checkpoint."""
    content = torch.load(folder / "checkpoint.ckpt", weights_only=True)
    nn.ModuleDict({"model": training.model}).load_state_dict(content["state_dict"])
    training.optimizer.load_state_dict(content["optimizer_states"][0])
    training.schedule.load_state_dict(content["lr_schedulers"][0])
    training.step = content["global_step"]


KINDS: dict[str, tuple[Callable[[Training, Path], Path], Callable[[Training, Path], None], dict[str, Any]]] = {
    "torch": (torch_write, torch_read, {"training": True}),
    "accelerate": (accelerate_write, accelerate_read, {}),
    "lightning": (lightning_write, lightning_read, {"prefix": "model."}),
}


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_moves_in(kind: str, two_ranks: RankPool, tmp_path: Path) -> None:
    training = by_hand()
    training.go_on(BEFORE)
    source = KINDS[kind][0](training, tmp_path / "theirs")
    expected = training.go_on(AFTER)
    document = import_weights(source, tmp_path / "run", job=JOBS)
    assert document["optimizer"] and document["step"] == BEFORE and document["schedule"] == "LambdaLR"
    assert moving_programs.go_on(None, "job", "single", document["path"]) == close(expected)
    assert two_ranks(moving_programs.go_on, "job", "fsdp", document["path"])[0] == close(expected)


@pytest.fixture(scope="module")
def saved(two_ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Written by fsdp on two ranks."""
    path = tmp_path_factory.mktemp("ours") / "saved"
    two_ranks(moving_programs.train_and_save, "fsdp", str(path))
    return path


@pytest.fixture(scope="module")
def expected(saved: Path) -> list[float]:
    """How our run goes on."""
    return moving_programs.go_on(None, "job", "single", str(saved))


def test_moves_out(kind: str, saved: Path, expected: list[float], tmp_path: Path) -> None:
    _, read, options = KINDS[kind]
    document = export(saved, tmp_path / "out", to=kind, **options)
    assert document["optimizer"] and document["step"] == BEFORE
    training = by_hand(seed=5)
    read(training, tmp_path / "out")
    assert training.go_on(AFTER) == close(expected)


@pytest.mark.parametrize("kind", ["dcp", "torchtitan", "accelerate-fsdp"])
def test_sharded_moves_in(kind: str, two_ranks: RankPool, tmp_path: Path) -> None:
    theirs = two_ranks(moving_programs.fsdp_run, str(tmp_path / "theirs"), kind)[0]
    document = import_weights(tmp_path / "theirs", tmp_path / "run", job=JOBS)
    assert document["optimizer"] and document["step"] == BEFORE and document["schedule"] == "LambdaLR"
    assert moving_programs.go_on(None, "job", "single", document["path"]) == close(theirs)
    assert two_ranks(moving_programs.go_on, "job", "fsdp", document["path"])[0] == close(theirs)


@pytest.mark.parametrize("kind", ["dcp", "accelerate-fsdp"])
def test_sharded_moves_out(kind: str, saved: Path, expected: list[float], two_ranks: RankPool, tmp_path: Path) -> None:
    export(saved, tmp_path / "out", to=kind)
    assert two_ranks(moving_programs.fsdp_goes_on, str(tmp_path / "out"), kind)[0] == close(expected)


@pytest.mark.slow
def test_the_library_of_lightning(saved: Path, expected: list[float], tmp_path: Path) -> None:
    """Its own file comes in, and ours is resumed by its own Trainer."""
    training = by_hand()
    lightning_fit(training, 0, BEFORE)[0].save_checkpoint(tmp_path / "last.ckpt")
    training.step = BEFORE
    document = import_weights(tmp_path / "last.ckpt", tmp_path / "run", job=JOBS)
    assert document["prefix"]["off"] == "model." and document["step"] == BEFORE
    assert moving_programs.go_on(None, "job", "single", document["path"]) == close(training.go_on(AFTER))
    export(saved, tmp_path / "out", to="lightning", prefix="model.")
    resumed = {"ckpt_path": tmp_path / "out" / "checkpoint.ckpt"}
    assert lightning_fit(by_hand(seed=5), BEFORE, BEFORE + AFTER, **resumed)[1] == close(expected)


class Samples(Dataset[Any]):
    """The samples of all batches in order."""

    def __len__(self) -> int:
        return (BEFORE + AFTER) * BATCH

    def __getitem__(self, at: int) -> Any:
        return {key: value[at % BATCH] for key, value in batch_of(at // BATCH).items()}


def trained_by_trainer(model: nn.Module, folder: Path, resume: Path | None = None) -> list[float]:
    """Transformers' Trainer with its own optimizer and schedule; it saves after `BEFORE` steps."""
    transformers = pytest.importorskip("transformers")
    losses: list[float] = []

    class Trainer(transformers.Trainer):  # type: ignore[misc,name-defined]
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **rest: Any) -> Any:
            logits = model(inputs["x"]).logits
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), inputs["y"].flatten())
            losses.append(loss.item())
            return loss

        def _get_train_sampler(self, *args: Any) -> Any:
            return torch.utils.data.SequentialSampler(self.train_dataset)

    options = transformers.TrainingArguments(
        output_dir=str(folder),
        max_steps=BEFORE + AFTER,
        save_steps=BEFORE,
        save_total_limit=None,
        per_device_train_batch_size=BATCH,
        learning_rate=3e-3,
        adam_epsilon=1e-4,
        weight_decay=0.1,
        max_grad_norm=0.0,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        remove_unused_columns=False,
    )
    Trainer(model=model, args=options, train_dataset=Samples()).train(resume_from_checkpoint=resume and str(resume))
    return losses[-AFTER:]


@pytest.mark.slow
def test_the_trainer_of_transformers(two_ranks: RankPool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    expected = trained_by_trainer(moving_jobs.hf.model(), tmp_path / "theirs")
    source = tmp_path / "theirs" / f"checkpoint-{BEFORE}"
    document = import_weights(source, tmp_path / "run", job=f"{JOBS}:hf")
    assert document["optimizer"] and document["step"] == BEFORE and document["schedule"] == "LambdaLR"
    assert moving_programs.go_on(None, "hf", "single", document["path"]) == close(expected)
    assert two_ranks(moving_programs.go_on, "hf", "fsdp", document["path"])[0] == close(expected)
    export(tmp_path / "run", tmp_path / "out", to="trainer")
    again = trained_by_trainer(moving_jobs.hf.model(), tmp_path / "again", tmp_path / "out")
    assert again == close(expected)


@pytest.mark.slow
def test_an_adapter_alone(two_ranks: RankPool, tmp_path: Path) -> None:
    """LoRA with its optimizer, as the Trainer saves it; the base model is what the job's builder makes."""
    peft = pytest.importorskip("peft")
    training = by_hand(moving_jobs.lora)
    training.go_on(BEFORE)
    training.model.save_pretrained(tmp_path / "theirs")
    torch.save(training.optimizer.state_dict(), tmp_path / "theirs" / "optimizer.pt")
    torch.save(training.schedule.state_dict(), tmp_path / "theirs" / "scheduler.pt")
    expected = training.go_on(AFTER)
    document = import_weights(tmp_path / "theirs", tmp_path / "run", job=f"{JOBS}:lora")
    assert document["optimizer"] and document["step"] == BEFORE
    assert any("what the job's builder makes" in note for note in document["notes"])
    assert moving_programs.go_on(None, "lora", "single", document["path"]) == close(expected)
    assert two_ranks(moving_programs.go_on, "lora", "fsdp", document["path"])[0] == close(expected)

    export(tmp_path / "run", tmp_path / "out", to="trainer")
    assert (tmp_path / "out" / "adapter_model.safetensors").stat().st_size < 20_000
    model = peft.PeftModel.from_pretrained(moving_jobs.base(), tmp_path / "out", is_trainable=True)
    optimizer = moving_jobs.simple_optimizer([p for p in model.parameters() if p.requires_grad])
    again = Training(model, optimizer, moving_jobs.schedule_of(optimizer), BEFORE)
    again.optimizer.load_state_dict(torch.load(tmp_path / "out" / "optimizer.pt", weights_only=True))
    again.schedule.load_state_dict(torch.load(tmp_path / "out" / "scheduler.pt", weights_only=True))
    assert again.go_on(AFTER) == close(expected)
