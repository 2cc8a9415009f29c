"""Optimizers, schedules and steps of others' files: found under any usual name, matched by name, or refused by name."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.optim import SGD, Adam, AdamW
from torch.optim.lr_scheduler import StepLR

import moving_jobs
from checkpoint_samples import everything_below, same_bits
from meshwright.checkpoint.exports import export
from meshwright.checkpoint.imports import import_weights
from meshwright.checkpoint.manifest import RunState, read_manifest
from meshwright.checkpoint.state import merged
from meshwright.checkpoint.whole_tensors import WholeTensors
from meshwright.errors import BadInput, CheckpointError, WrongCheckpoint
from moving_jobs import BATCH, BEFORE, Training, by_hand, mean_loss

JOBS = moving_jobs.__file__


@pytest.fixture(scope="module")
def trained() -> Training:
    training = by_hand()
    training.go_on(BEFORE)
    return training


def parts(training: Training) -> dict[str, Any]:
    return {
        "model": training.model.state_dict(),
        "optimizer": training.optimizer.state_dict(),
        "scheduler": training.schedule.state_dict(),
        "step": training.step,
    }


def write(folder: Path, content: Any) -> Path:
    torch.save(content, folder / "theirs.pt")
    return folder / "theirs.pt"


def imported(folder: Path, content: Any, job: str = "job", **options: Any) -> dict[str, Any]:
    return import_weights(write(folder, content), folder / "run", job=f"{JOBS}:{job}", **options)


def run_state(document: dict[str, Any]) -> RunState:
    return read_manifest(Path(document["path"])).run_state


def moments(document: dict[str, Any]) -> dict[str, torch.Tensor]:
    """First moments by parameter."""
    whole, head, tail = WholeTensors(Path(document["path"])), "optimizer/", "/exp_avg"
    keys = [key for key in whole.manifest.tensors if key.startswith(head) and key.endswith(tail)]
    return {key.removeprefix(head).removesuffix(tail): whole.read(key) for key in keys}


def moments_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    return {n: optimizer.state[p]["exp_avg"] for n, p in model.named_parameters() if p in optimizer.state}


@pytest.mark.parametrize(
    ("names", "more", "left_out"),
    [
        (
            ("state_dict", "optimizer", "scheduler"),
            {"epoch": 1, "arch": "x", "best_acc1": torch.ones(())},
            "epoch, arch",
        ),
        (("model_state_dict", "optimizer_state_dict", "scheduler_state_dict"), {"loss": 0.5}, "loss"),
        (("MODEL_STATE", "OPTIMIZER_STATE", "LR_SCHEDULER"), {"EPOCHS_RUN": 2}, "EPOCHS_RUN"),
        (("model", "optim", "lr_scheduler"), {"rng": torch.get_rng_state()}, "rng"),
    ],
)
def test_usual_spellings(
    trained: Training, tmp_path: Path, names: tuple[str, ...], more: dict[str, Any], left_out: str
) -> None:
    found = parts(trained)
    content = dict(zip(names, (found["model"], found["optimizer"], found["scheduler"]), strict=True)) | more
    document = imported(tmp_path, content)
    assert document["optimizer"] and document["schedule"] == "LambdaLR"
    assert document["step"] == BEFORE and run_state(document).samples == BEFORE * BATCH  # Adam counts its steps
    assert same_bits(moments(document), moments_of(trained.model, trained.optimizer))
    assert any(note.startswith("left out: ") and left_out in note for note in document["notes"])
    assert any("continues at sample 12" in note for note in document["notes"])


def test_what_had_no_gradient_is_named(trained: Training, tmp_path: Path) -> None:
    notes = imported(tmp_path, parts(trained))["notes"]
    assert "optimizer: no state at the source for unused.bias, unused.weight, which had no gradient" in notes


def test_wrappers_inside_of_names(trained: Training, tmp_path: Path) -> None:
    """Blocks that were compiled one by one, in DDP."""
    content = parts(trained)
    content["model"] = {
        f"module.{name}".replace("blocks.0.", "blocks.0._orig_mod."): tensor
        for name, tensor in content["model"].items()
    }
    document = imported(tmp_path, content)
    assert document["prefix"]["off"] == "module." and "names: parts of wrappers removed: _orig_mod" in document["notes"]
    assert same_bits(moments(document), moments_of(trained.model, trained.optimizer))


def one_group(make: Callable[..., torch.optim.Optimizer], params: Callable[[nn.Module], Any]) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = moving_jobs.Model()
    optimizer = make(params(model))
    for step in range(BEFORE):
        optimizer.zero_grad()
        mean_loss(model, step).backward()
        optimizer.step()
    return model, optimizer


def adamw(params: Any) -> AdamW:
    return AdamW(params, lr=3e-3, eps=1e-4)


@pytest.mark.parametrize(
    "params",
    [
        lambda model: model.parameters(),  # frozen ones too
        lambda model: [p for p in model.parameters() if p.requires_grad],
        lambda model: model.named_parameters(),
        lambda model: reversed(list(model.named_parameters())),
    ],
)
def test_one_group_in_any_way(tmp_path: Path, params: Callable[[nn.Module], Any]) -> None:
    model, optimizer = one_group(adamw, params)
    document = imported(tmp_path, {"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "one_group")
    assert same_bits(moments(document), moments_of(model, optimizer))


def test_groups_that_are_one_in_all_but_number(tmp_path: Path) -> None:
    """By name, two groups with the same settings may be one group of the job; others may not."""

    def halves(model: nn.Module) -> Any:
        named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        return [{"params": named[:5]}, {"params": named[5:]}]

    model, optimizer = one_group(adamw, halves)
    content = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    assert same_bits(moments(imported(tmp_path, content, "one_group")), moments_of(model, optimizer))
    content["optimizer"]["param_groups"][1]["weight_decay"] = 0.5
    with pytest.raises(WrongCheckpoint, match=r"has weight_decay 0\.01 and 0\.5; give the job the source's groups"):
        import_weights(write(tmp_path, content), tmp_path / "other", job=f"{JOBS}:one_group")


def test_an_order_that_differs_is_refused(tmp_path: Path) -> None:
    model, optimizer = one_group(adamw, lambda model: list(reversed(list(model.parameters()))))
    with pytest.raises(WrongCheckpoint, match=r"has blocks\.0\.norm\.weight of shape \(16,\), so their orders differ"):
        imported(tmp_path, {"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "one_group")
    assert everything_below(tmp_path) == ["theirs.pt"]


def changed(content: dict[str, Any], **groups: Any) -> dict[str, Any]:
    for group in content["optimizer"]["param_groups"]:
        group.update(groups)
    return content


@pytest.mark.parametrize(
    ("change", "job", "says"),
    [
        (lambda c: c, "one_group", "has 2 parameter groups of 6, 9 parameters, the job's 15 parameters"),
        (
            lambda c: changed(c, decoupled_weight_decay=False),
            "job",
            "is Adam with weight decay, but the job's is AdamW",
        ),
        (lambda c: c, "without_schedule", "but the job has none"),
        (lambda c: c, "stepped", "keeps base_lrs, last_epoch, lr_lambdas, but the job's StepLR keeps"),
        (lambda c: c["scheduler"].update(last_epoch=1) or c, "job", "was stepped 1 times in 3 steps"),
        (lambda c: c | {"optimizer": [c["optimizer"]] * 2}, "job", "holds 2 optimizers, but a job has one"),
        (lambda c: c | {"net": c["model"]}, "job", "weights under 'model' and 'net'"),
        (lambda c: c | {"optimizer": {"lr": 1}}, "job", "is not the state_dict of an optimizer"),
    ],
)
def test_what_does_not_fit_is_refused(
    trained: Training, tmp_path: Path, change: Callable[[Any], Any], job: str, says: str
) -> None:
    content = torch.load(write(tmp_path, parts(trained)), weights_only=True)
    with pytest.raises(CheckpointError) as error:
        imported(tmp_path, change(content), job)
    assert says in str(error.value)
    assert everything_below(tmp_path) == ["theirs.pt"]


def test_other_settings_are_told(trained: Training, tmp_path: Path) -> None:
    content = torch.load(write(tmp_path, parts(trained)), weights_only=True)
    document = imported(tmp_path, changed(content, eps=1e-6, made_up=3))
    assert "optimizer: eps of group 0 is 1e-06, as at the source; the job has 0.0001" in document["notes"]
    assert "optimizer: settings left out, which the job's has not: made_up" in document["notes"]
    old = changed(torch.load(write(tmp_path, parts(trained)), weights_only=True))
    for group in old["optimizer"]["param_groups"]:
        del group["decoupled_weight_decay"]
    notes = import_weights(write(tmp_path, old), tmp_path / "old", job=JOBS)["notes"]
    assert "optimizer: the source does not say whether it is Adam or AdamW; the job's AdamW is assumed" in notes


def test_a_source_without_a_schedule_gets_the_job_s(trained: Training, tmp_path: Path) -> None:
    content = parts(trained)
    expected = content.pop("scheduler")
    document = imported(tmp_path, content)
    assert "schedule: the job's LambdaLR, set to step 3" in document["notes"]
    state = run_state(document)
    assert state.schedule is not None and state.optimizer is not None
    values = dict(state.optimizer["groups"][0]["values"]["dict"])
    assert values["lr"] == pytest.approx(expected["_last_lr"][0]) and values["initial_lr"] == 3e-3


@pytest.mark.parametrize(("choice", "rate"), [("source", 1), ("job", 3)])
def test_whose_schedule(trained: Training, tmp_path: Path, choice: str, rate: int) -> None:
    """A schedule that was stepped once an epoch."""
    content = torch.load(write(tmp_path, parts(trained)), weights_only=True)
    content["scheduler"]["last_epoch"] = 1
    document = imported(tmp_path, content, schedule=choice)
    found = run_state(document).schedule
    assert found is not None and dict(found["state"]["dict"])["last_epoch"] == rate
    assert ("schedule: the source's is left out" in document["notes"]) == (choice == "job")


def test_constants_of_a_schedule_are_told(tmp_path: Path) -> None:
    training = by_hand()
    training.schedule = StepLR(training.optimizer, 5)
    training.go_on(BEFORE)
    notes = imported(tmp_path, parts(training), "stepped")["notes"]
    assert "schedule: step_size is 5, as at the source; the job has 2" in notes


def test_steps_that_nobody_counted(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(
        "from moving_jobs import *\njob = replace(job, schedule=None, optimizer=lambda p: torch.optim.SGD(p, lr=0.1))"
    )
    model, optimizer = one_group(lambda p: SGD(p, lr=0.1), lambda model: model.parameters())
    path = write(tmp_path, {"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    document = import_weights(path, tmp_path / "a", job=str(tmp_path / "job.py"))
    assert document["step"] == 0 and any("0 is assumed (--step N)" in note for note in document["notes"])
    document = import_weights(path, tmp_path / "b", job=str(tmp_path / "job.py"), step=7)
    assert document["step"] == 7 and run_state(document).samples == 7 * BATCH
    with pytest.raises(BadInput, match="must not be negative"):
        import_weights(path, tmp_path / "c", step=-1)


def test_a_count_that_differs_is_told(trained: Training, tmp_path: Path) -> None:
    content = parts(trained) | {"step": 9}
    content.pop("scheduler")
    document = imported(tmp_path, content)
    assert document["step"] == 9 and "step: 9, as the source says; its optimizer counts 3" in document["notes"]


def test_only_weights(trained: Training, tmp_path: Path) -> None:
    for number, options in enumerate(({}, {"job": JOBS, "weights_only": True})):
        document = import_weights(write(tmp_path, parts(trained)), tmp_path / str(number), **options)  # type: ignore[arg-type]
        assert document["step"] == 0 and not document["optimizer"] and run_state(document).optimizer is None
        assert any(note.startswith("left out: optimizer, schedule, step, since only") for note in document["notes"])


def test_numbers_of_old_and_a_loss_scale(trained: Training, tmp_path: Path) -> None:
    """Before torch 1.12 the step was a number; a GradScaler's state becomes the loss scale."""
    content = torch.load(write(tmp_path, parts(trained)), weights_only=True)
    for state in content["optimizer"]["state"].values():
        state["step"] = int(state["step"])
    scaler = torch.amp.GradScaler("cpu", init_scale=128.0, growth_interval=50)
    content["scaler"] = scaler.state_dict() | {"_growth_tracker": 4}
    document = imported(tmp_path, content)
    assert document["step"] == BEFORE
    assert run_state(document).loss_scale == {"value": 128.0, "growth": 2.0, "interval": 50, "steps_since": 4}
    assert "optimizer/token.weight/step:int" in read_manifest(Path(document["path"])).tensors
    export(tmp_path / "run", tmp_path / "out", to="torch", training=True)
    again = torch.load(tmp_path / "out" / "checkpoint.pt", weights_only=True)
    assert again["scaler"] == content["scaler"] and again["optimizer"]["state"][0]["step"] == BEFORE


def test_state_that_is_no_tensor_is_refused(trained: Training, tmp_path: Path) -> None:
    content = torch.load(write(tmp_path, parts(trained)), weights_only=True)
    content["optimizer"]["state"][0]["history"] = [1, 2]
    with pytest.raises(WrongCheckpoint, match=r"history of token\.weight as a list"):
        imported(tmp_path, content)


class Evil:
    def __reduce__(self) -> Any:
        return os.system, ("touch ran",)


@pytest.mark.parametrize("file", ["optimizer.bin", "scheduler.bin", "scaler.pt"])
def test_nothing_is_run(trained: Training, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str) -> None:
    monkeypatch.chdir(tmp_path)
    Path("theirs").mkdir()
    torch.save(trained.model.state_dict(), "theirs/pytorch_model.bin")
    torch.save(Evil(), f"theirs/{file}")
    with pytest.raises(CheckpointError, match=r"holds a posix\.system, but only tensors can be read"):
        import_weights(Path("theirs"), Path("run"), job=JOBS)
    assert not Path("ran").exists() and not Path("run").exists()


def test_a_folder_with_two_models(trained: Training, tmp_path: Path) -> None:
    for name in ("pytorch_model.bin", "pytorch_model_1.bin"):
        torch.save(trained.model.state_dict(), tmp_path / name)
    with pytest.raises(CheckpointError, match="several models or optimizers"):
        import_weights(tmp_path, tmp_path / "run")


@pytest.fixture
def distributed(trained: Training, tmp_path: Path) -> Path:
    dcp.save({"model": trained.model.state_dict(), "extra": {"x": 1}}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    return tmp_path / "dcp"


def test_a_dcp_folder_of_weights(trained: Training, distributed: Path, tmp_path: Path) -> None:
    document = import_weights(distributed, tmp_path / "run", job=JOBS)
    assert not document["optimizer"] and "left out: extra" in document["notes"]
    found = WholeTensors(Path(document["path"]))
    assert torch.equal(found.read("model/token.weight"), trained.model.token.weight)


def test_nothing_of_dcp_s_metadata_is_run(distributed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(distributed.parent)
    (distributed / ".metadata").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(CheckpointError, match=r"holds a posix\.system, but only descriptions of tensors"):
        import_weights(distributed, Path("run"))
    assert not Path("ran").exists()


def test_values_of_dcp_that_would_run_are_left_out(
    trained: Training, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    dcp.save({"model": trained.model.state_dict(), "loader": Evil()}, checkpoint_id="dcp", no_dist=True)
    assert "left out: loader" in import_weights(Path("dcp"), Path("run"))["notes"]
    assert not Path("ran").exists()


@pytest.mark.parametrize("file", [".metadata", "__0_0.distcp"])
@pytest.mark.parametrize("kept", [0, 50])
def test_half_of_a_dcp_folder(distributed: Path, tmp_path: Path, file: str, kept: int) -> None:
    path = distributed / file
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(CheckpointError, match="cannot be read as a torch"):
        import_weights(distributed, tmp_path / "run")
    (distributed / "__0_0.distcp").unlink()
    with pytest.raises(BadInput):
        import_weights(distributed, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_dcp_file_outside_of_its_folder(distributed: Path, tmp_path: Path) -> None:
    path = distributed / ".metadata"
    path.write_bytes(path.read_bytes().replace(b"__0_0.distcp", b"../secrets/x"))
    with pytest.raises(CheckpointError, match="which is not inside the folder"):
        import_weights(distributed, tmp_path / "run")


def test_plain_adam_s_state(tmp_path: Path) -> None:
    """Without weight decay Adam is AdamW, and says so."""
    model, optimizer = one_group(lambda p: Adam(p, lr=3e-3, eps=1e-4), lambda model: model.parameters())
    content = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    document = imported(tmp_path, content, "one_group")
    assert "optimizer: weight_decay of group 0 is 0, as at the source; the job has 0.01" in document["notes"]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"to": "hf", "training": True}, "holds weights only; for the training choose one of torch --training, dcp"),
        ({"to": "safetensors", "prefix": "model."}, "--prefix is for dcp"),
        ({"to": "dcp", "dtype": "bf16"}, "--dtype casts weights only"),
    ],
)
def test_exports_that_make_no_sense(tmp_path: Path, options: dict[str, Any], says: str) -> None:
    with pytest.raises(BadInput, match=says):
        export(tmp_path, tmp_path / "out", **options)


def test_exports_tell_what_they_leave_out(trained: Training, tmp_path: Path) -> None:
    imported(tmp_path, parts(trained))
    notes = export(tmp_path / "run", tmp_path / "weights", to="safetensors")["notes"]
    assert notes == ["left out: optimizer, schedule, step 3; `--to torch --training` writes them"]
    notes = export(tmp_path / "run", tmp_path / "whole", to="accelerate")["notes"]
    assert "left out: random generators, and the position in the data, which is sample 12" in notes
    assert any("Accelerate steps it once per process" in note for note in notes)
    import_weights(tmp_path / "weights", tmp_path / "bare", job=JOBS)
    document = export(tmp_path / "bare", tmp_path / "again", to="accelerate")
    assert "optimizer: the checkpoint has none" in document["notes"] and not document["optimizer"]
    assert everything_below(tmp_path / "again") == ["model.safetensors"]


def test_groups_of_stages_are_joined_in_the_model_s_order() -> None:
    """Optimizers elsewhere are numbered in this order; a rank of an interleaved pipeline holds every other stage."""
    place = {name: at for at, name in enumerate("abcd")}
    assert merged((["a", "c"], ["b", "d"]), place) == ["a", "b", "c", "d"]
    assert merged((["d", "a"], ["d", "a"]), place) == ["d", "a"]  # the job's own order, where every rank has all
