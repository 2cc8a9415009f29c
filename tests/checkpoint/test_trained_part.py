"""`Job(save="trained")`: checkpoints without the frozen weights, which the job makes again, and their fingerprints."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch

import trained_part_programs as programs
from meshwright.assemble.world import alone
from meshwright.checkpoint.frozen import _sum_of
from meshwright.checkpoint.manifest import read_manifest
from meshwright.checkpoint.parts import HeldParts, Part
from meshwright.errors import CheckpointError, JobError, WrongCheckpoint
from meshwright.runtime.run import Run, setup
from moving_jobs import Model, batch_of, job
from rank_pool import RankPool


def run_of(seed: int = 0, **changes: object) -> Run:
    made = replace(programs.trained_job, **changes)  # type: ignore[arg-type]
    return setup(made, "single", seed=seed, world=alone(torch.device("cpu")))


def saved(folder: Path) -> Path:
    run = run_of()
    run.step(batch_of(0))
    run.save(folder / "saved")
    return folder / "saved"


def boxes(tensor: torch.Tensor, rows: list[int], columns: list[int]) -> int:
    whole = HeldParts(tuple(tensor.shape), tensor.dtype, ())
    parts = [
        Part((top, left), tensor[top:bottom, left:right])
        for top, bottom in pairwise(rows)
        for left, right in pairwise(columns)
    ]
    return sum(_sum_of(part, whole, tensor.dtype) for part in parts) % 2**64


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_fingerprints_do_not_depend_on_the_boxes(dtype: torch.dtype) -> None:
    tensor = torch.randn(7, 6, generator=torch.Generator().manual_seed(0)).to(dtype)
    whole = boxes(tensor, [0, 7], [0, 6])
    assert boxes(tensor, [0, 3, 7], [0, 1, 6]) == whole
    swapped = tensor[[1, 0, *range(2, 7)]]
    assert boxes(swapped, [0, 7], [0, 6]) != whole
    tensor[3, 3] += 0.5
    assert boxes(tensor, [0, 7], [0, 6]) != whole


def test_the_frozen_part_is_left_out_and_told(tmp_path: Path) -> None:
    manifest = read_manifest(saved(tmp_path))
    assert set(manifest.run_state.frozen or ()) == {"frozen.weight", "frozen.bias"}
    assert not [name for name in manifest.tensors if "frozen" in name]
    assert "model/scale" in manifest.tensors and "model/unused.weight" in manifest.tensors


def test_another_base_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WrongCheckpoint, match=r"trained on other frozen weights: frozen\.bias \(2 of 2\)"):
        run_of(seed=1).load(saved(tmp_path))


def test_a_parameter_that_is_trained_now_is_refused(tmp_path: Path) -> None:
    def thawed() -> Model:
        model = Model()
        model.frozen.requires_grad_(True)
        return model

    with pytest.raises(WrongCheckpoint, match=r"without frozen\.bias, which was frozen then"):
        run_of(model=thawed).load(saved(tmp_path))


def test_a_base_that_was_changed_is_not_saved(tmp_path: Path) -> None:
    run = run_of()
    dict(run.trainer.engine.model.named_parameters())["frozen.bias"].data.add_(1.0)
    with pytest.raises(CheckpointError, match=r"frozen\.bias \(1 in all\) is not what Job\(model=\.\.\.\) made"):
        run.save(tmp_path / "saved")


def test_whole_checkpoints_are_loaded_and_then_not_left_out(tmp_path: Path) -> None:
    other = setup(job, "single", seed=1, world=alone(torch.device("cpu")))
    other.save(tmp_path / "whole")
    run = run_of()
    run.load(tmp_path / "whole")
    with pytest.raises(CheckpointError, match="changed or loaded since"):
        run.save(tmp_path / "part")


def test_wrong_words_are_refused() -> None:
    with pytest.raises(JobError, match=r'Job\(save=\.\.\.\) must be "all" or "trained"'):
        replace(job, save="some")


@pytest.mark.slow
@pytest.mark.parametrize(("source", "target"), [("fsdp", "tp=2"), ("tp=2", "fsdp"), ("pp=2:1f1b", "zero1")])
def test_moves_between_strategies(two_ranks: RankPool, tmp_path: Path, source: str, target: str) -> None:
    """The losses after a move are those of the run that went on."""
    expected = two_ranks(programs.train_and_save, source, str(tmp_path / "part"))[0][2:]
    found = two_ranks(programs.load_and_train, target, str(tmp_path / "part"))[0]
    assert found == pytest.approx(expected, rel=1e-5)
    assert programs.in_one_process(str(tmp_path / "part")) == pytest.approx(expected, rel=1e-5)
