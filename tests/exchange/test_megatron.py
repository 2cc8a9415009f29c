"""Options of Megatron-LM: sizes of all axes under its names, and what it cannot say."""

import shlex
import subprocess
from typing import Any

import pytest

from meshwright.exchange import ExportRequest, export
from meshwright.facts.strategy import Strategy

FLAGS = {
    *("sequence-parallel", "use-distributed-optimizer", "use-megatron-fsdp", "no-gradient-accumulation-fusion"),
    *("bf16", "fp16", "grad-reduce-in-bf16", "accumulate-allreduce-grads-in-fp32"),
}
NAMES = {
    *("tensor-model-parallel-size", "pipeline-model-parallel-size", "context-parallel-size"),
    *("expert-model-parallel-size", "cp-comm-type", "num-virtual-stages-per-pipeline-rank"),
    *("data-parallel-sharding-strategy", "fp8-format", "recompute-granularity", "recompute-method"),
    *("recompute-num-layers", "micro-batch-size", "global-batch-size", "clip-grad"),
}
"""From megatron/training/arguments.py."""


def exported(text: str, ranks: int = 16, **rest: Any) -> tuple[dict[str, str], Any]:
    strategy = Strategy.parse(text).resolve(ranks)
    found = export(ExportRequest(strategy=strategy, ranks=ranks, **rest), "megatron")
    printed = subprocess.run(
        ["bash", "-c", f'{found.text}\nprintf "%s\\n" "${{MEGATRON[@]}}"'], capture_output=True, text=True, check=True
    )
    options: dict[str, str] = {}
    for word in shlex.split(printed.stdout):
        if word.startswith("--"):
            options[word[2:]] = ""
        else:
            options[list(options)[-1]] = word
    return options, found


def test_context_and_experts() -> None:
    options, found = exported("fsdp=2,tp=2,cp=4,bf16,ac=full,mb=1", global_batch=64, max_norm=0.5)
    assert options["context-parallel-size"] == "4" and options["cp-comm-type"] == "allgather"
    assert options["tensor-model-parallel-size"] == "2" and "sequence-parallel" in options
    assert options["data-parallel-sharding-strategy"] == "optim_grads_params"
    assert (options["global-batch-size"], options["clip-grad"]) == ("64", "0.5")
    assert found.without_equal == ()
    options, found = exported("ddp=2,ep=8,bf16,mb=1")
    assert options["expert-model-parallel-size"] == "8" and found.without_equal == ()


@pytest.mark.parametrize(
    "text",
    [
        *("ddp,mb=1", "zero1,fp16,mb=2", "zero2,bf16,reduce=bf16,mb=1", "fsdp=4,tp=4,fp8,ac=selective,mb=1"),
        *("fsdp=4,pp=4:interleaved,bf16,ac=full,mb=1", "cp=16,bf16,mb=1"),
    ],
)
def test_every_name_is_known_there(text: str) -> None:
    options, found = exported(text, global_batch=64)
    assert {name for name, value in options.items() if value} <= NAMES
    assert {name for name, value in options.items() if not value} <= FLAGS
    assert found.without_equal == ()


@pytest.mark.parametrize(
    ("text", "lost", "becomes"),
    [
        ("fsdp=4,pp=4:zbv,mb=1", "pp=4:zbv", "fsdp=4,pp=4:1f1b,mb=1"),
        ("hsdp=4x4,mb=1", "hsdp=4x4", "fsdp=16,mb=1"),
        ("fsdp:grad-op,mb=1", "fsdp=16:grad-op", "zero2=16,mb=1"),
        ("ddp=8,op=2,mb=1", "op=2", "ddp=16,mb=1"),
        ("ddp,bf16,compile,mb=1", "compile", "ddp=16,bf16,mb=1"),
        ("fsdp,offload=params,mb=1", "offload=params", "fsdp=16,mb=1"),
    ],
)
def test_what_has_no_equal_is_named(text: str, lost: str, becomes: str) -> None:
    found = exported(text)[1]
    assert [loss.term for loss in found.without_equal] == [lost]
    assert str(found.strategy) == becomes and lost in found.text
