"""Folders that plain DeepSpeed wrote become checkpoints of ours, optimizer included, and training goes on from them."""

import pickle
import shutil
from pathlib import Path

import pytest
import torch

import deepspeed_programs
from checkpoint_samples import TINY_JOBS
from deepspeed_programs import Truth
from meshwright.checkpoint.imports import import_weights
from meshwright.checkpoint.whole_tensors import WholeTensors
from meshwright.errors import CheckpointError, WrongCheckpoint
from meshwright.strategies.deepspeed.package import is_installed
from rank_pool import RankPool

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not is_installed(), reason="DeepSpeed is not installed: pip install 'meshwright[deepspeed]'"),
]

KINDS = [
    *(("transformer", 0, "fp32"), ("transformer", 1, "fp32"), ("transformer", 2, "fp32"), ("transformer", 3, "fp32")),
    *(("transformer", 1, "bf16"), ("partial", 3, "bf16")),
    *(pytest.param(*kind, marks=pytest.mark.thorough) for kind in (("transformer", 2, "fp16"), ("partial", 2, "bf16"))),
]


def write(pool: RankPool, folder: Path, job: str, stage: int, precision: str) -> tuple[Path, Truth]:
    path = folder / f"{job}-{stage}-{precision}"
    return path, pool(deepspeed_programs.plain_run, job, stage, precision, str(path))[0]


@pytest.fixture(scope="module")
def written(two_ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Truth]:
    return write(two_ranks, tmp_path_factory.mktemp("plain"), "transformer", 2, "fp32")


@pytest.mark.parametrize(("job", "stage", "precision"), KINDS)
def test_masters_and_moments_bit_by_bit(
    two_ranks: RankPool, tmp_path: Path, job: str, stage: int, precision: str
) -> None:
    source, truth = write(two_ranks, tmp_path, job, stage, precision)
    document = import_weights(source, tmp_path / "run", job=f"{TINY_JOBS}:{job}")
    assert document["optimizer"] and document["step"] == 3
    found = WholeTensors(Path(document["path"]))
    for name, (master, *moments) in truth.items():
        assert torch.equal(found.read(f"model/{name}"), master), name
        for key, moment in zip(("exp_avg", "exp_avg_sq"), moments, strict=True):
            assert torch.equal(found.read(f"optimizer/{name}/{key}"), moment), (name, key)
    run_state = found.manifest.run_state
    assert (run_state.step, run_state.samples, run_state.ranks) == (3, 24, 2) and run_state.schedule is not None
    assert (run_state.loss_scale is not None) == (precision == "fp16")


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "zero3,engine=deepspeed"])
def test_training_goes_on(
    two_ranks: RankPool, written: tuple[Path, Truth], tmp_path_factory: pytest.TempPathFactory, strategy: str
) -> None:
    """As a run of ours that was never DeepSpeed's, with the same weights, batches and optimizer from the beginning."""
    run = tmp_path_factory.mktemp("run") / "run"
    document = import_weights(written[0], run, job=f"{TINY_JOBS}:transformer")
    went_on = two_ranks(deepspeed_programs.go_on_from, "transformer", strategy, document["path"], 3)[0]
    expected = two_ranks(deepspeed_programs.losses, "transformer", "ddp", 6)[0]
    assert went_on == pytest.approx(expected[3:], rel=1e-5)


def test_without_a_job_weights_only(written: tuple[Path, Truth], tmp_path: Path) -> None:
    document = import_weights(written[0], tmp_path / "run")
    assert not document["optimizer"] and document["step"] == 0
    assert torch.equal(WholeTensors(Path(document["path"])).read("model/head.weight"), written[1]["token.weight"][0])


def test_another_optimizer_is_named(written: tuple[Path, Truth], tmp_path: Path) -> None:
    job = tmp_path / "job.py"
    job.write_text(
        "from dataclasses import replace\nfrom torch.optim import SGD\nimport tiny_jobs\n"
        "job = replace(tiny_jobs.transformer, optimizer=lambda p: SGD(p, lr=0.1, momentum=0.9))\n"
    )
    with pytest.raises(WrongCheckpoint, match=r"has betas, but the job's is SGD; `--weights-only` imports"):
        import_weights(written[0], tmp_path / "run", job=str(job))


def test_a_missing_rank_is_named(written: tuple[Path, Truth], tmp_path: Path) -> None:
    copy = shutil.copytree(written[0], tmp_path / "copy")
    next(copy.glob("*/zero_pp_rank_1_*optim*")).unlink()
    with pytest.raises(CheckpointError, match="by 2 ranks, but has optimizer states of only 1"):
        import_weights(copy, tmp_path / "run")


def test_a_file_without_what_belongs_there_is_named(written: tuple[Path, Truth], tmp_path: Path) -> None:
    copy = shutil.copytree(written[0], tmp_path / "copy")
    path = next(copy.glob("*/zero_pp_rank_0_*optim*"))
    torch.save({"optimizer_state_dict": {"base_optimizer_state": {}}}, path)
    with pytest.raises(CheckpointError, match=r"does not have the layout of DeepSpeed 0\.19: KeyError"):
        import_weights(copy, tmp_path / "run")


class Foreign:
    """What a pickle could run."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return print, ("this must not be printed",)


def test_nothing_foreign_is_unpickled(
    written: tuple[Path, Truth], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    copy = shutil.copytree(written[0], tmp_path / "copy")
    path = next(copy.glob("*/mp_rank_00_model_states.pt"))
    torch.save({"module": {}, "more": Foreign()}, path, pickle_module=pickle)
    with pytest.raises(CheckpointError, match="only tensors, numbers and text can be read"):
        import_weights(copy, tmp_path / "run")
    assert "printed" not in capfd.readouterr().out
