"""What DeepSpeed cannot do is refused before any process starts, with the better word."""

from dataclasses import replace
from pathlib import Path

import pytest
from torch import nn

import tiny_jobs
from meshwright.assemble.check import check
from meshwright.commands.train import train_command
from meshwright.describe.model import describe
from meshwright.errors import Refused
from meshwright.facts.job import Job
from meshwright.facts.strategy import Strategy
from meshwright.runtime.request import TrainRequest
from meshwright.strategies import Place
from meshwright.strategies.deepspeed import package

FACTS = describe(tiny_jobs.transformer)


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(package, "is_installed", lambda: True)


def refusal(strategy: str, job: Job = tiny_jobs.transformer, ranks: int = 2) -> str:
    facts = FACTS if job is tiny_jobs.transformer else describe(job)
    place = Place(device="cpu", devices=8, ranks=ranks, local_ranks=ranks)
    with pytest.raises(Refused) as caught:
        check(job, facts, Strategy.parse(f"{strategy},engine=deepspeed"), place)
    return str(caught.value)


@pytest.mark.parametrize(
    ("strategy", "better"),
    [
        ("hsdp=1x2", "use zero3,engine=deepspeed"),
        ("fsdp:grad-op", "use zero2,engine=deepspeed"),
        ("fsdp:no-shard", "use ddp,engine=deepspeed"),
        ("tp=2", "tp=2 runs on our own engine only"),
        ("op=2", "op=2 runs on our own engine only"),
        ("layers=2", "layers=2 runs on our own engine only"),
        ("zero2,compile", "compile is not built"),
        ("zero2,bf16:pure", "use bf16, or drop engine=deepspeed"),
        ("ddp,offload=optimizer", "use zero1,offload=optimizer"),
        ("zero2,offload=params", "which only zero3 does; use fsdp"),
        ("ddp,bf16,reduce=bf16", "use zero1 without a pipeline, or drop reduce=bf16"),
        ("pp=2:gpipe", "use pp=2:1f1b"),
        ("pp=2:1f1b,offload=optimizer", "offload=optimizer is not built for DeepSpeed's pipeline"),
        ("pp=2:1f1b", "give an nn.Sequential, or drop engine=deepspeed"),
    ],
)
def test_the_better_word(strategy: str, better: str) -> None:
    assert better in refusal(strategy)


def test_a_pipeline_with_more_than_stage_1() -> None:
    assert "takes ddp or zero1, not zero2" in refusal("pp=2:1f1b,zero2", tiny_jobs.sequential, ranks=4)


def test_one_process() -> None:
    assert "use ddp,engine=deepspeed" in refusal("single", ranks=1)


def test_a_parameter_without_dims() -> None:
    assert "cannot send a parameter without dims: scale" in refusal("zero1", tiny_jobs.plain)


def test_a_cut_within_a_layer() -> None:
    nested = replace(tiny_jobs.sequential, model=lambda: nn.Sequential(tiny_jobs.layers()))
    assert "would begin within the layer '0'" in refusal("pp=2:1f1b", nested)


def test_a_parameter_in_two_layers() -> None:
    def tied() -> nn.Module:
        model = tiny_jobs.layers()
        model[5].weight = model[0].token.weight  # type: ignore[index, union-attr]
        return model

    assert "are one parameter in two layers" in refusal("pp=2:1f1b", replace(tiny_jobs.sequential, model=tied))


def test_nvme_without_its_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(package, "refuse_nvme", lambda folder, device: f"no libaio for {folder} on {device}")
    assert refusal("zero3,offload=nvme:/scratch") == "no libaio for /scratch on cpu"
    assert "only zero3" in refusal("zero2,offload=nvme:/scratch")


def test_nothing_is_saved_under_nvme() -> None:
    with pytest.raises(Refused, match="No checkpoint is made under"):
        strategy = Strategy.parse("zero3,offload=nvme:/scratch,engine=deepspeed")
        train_command(TrainRequest(job="job.py", strategy=strategy, ranks=2, out=Path("runs")))


def test_a_missing_package_is_named_with_what_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(package, "is_installed", lambda: False)
    assert "pip install 'meshwright[deepspeed]'" in refusal("zero1")
