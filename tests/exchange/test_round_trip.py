"""What is exported and read again is what the export says it became, and every change has been named."""

import random
from collections.abc import Iterator
from dataclasses import fields
from itertools import product
from pathlib import Path

import pytest

from meshwright.errors import MeshwrightError
from meshwright.exchange import ExportRequest, export, read_foreign
from meshwright.facts.strategy import Strategy

CONFIGS = ("accelerate", "deepspeed", "torchtitan")
DATA = (
    *("", "single", "dp", "ddp", "ddp=1", "zero1", "zero2", "fsdp", "fsdp=1", "fsdp:grad-op", "fsdp:no-shard"),
    *("hsdp=2x2", "hsdp=1x4", "hsdp=4x1"),
)
AXES = (
    "",
    "tp=2",
    "cp=2",
    "ep=2",
    "op=2",
    "pp=2:1f1b",
    "pp=2:zbv",
    "layers=2",
    "tp=2,pp=2:interleaved",
    "op=2,layers=2",
)
PRECISIONS = ("", "bf16", "fp16", "fp8", "bf16:pure", "fp16:pure", "fp8:pure", "bf16:autocast")
POLICIES = (
    *("", "ac=full", "ac=selective", "offload=optimizer", "offload=params", "offload=nvme:/scratch", "mb=4", "compile"),
    *(
        "engine=deepspeed",
        "ac=selective,offload=params,mb=2,compile",
        "ac=full,offload=nvme:/fast,mb=2,engine=deepspeed",
        "reduce=bf16",
        "mb=2,reduce=bf16,engine=deepspeed",
    ),
)
SETTINGS = tuple(product((None, 64), ("cuda", "cpu")))
EXACT = {
    "deepspeed": (
        *("zero1=8,mb=4,engine=deepspeed", "zero2=8,bf16,offload=optimizer,mb=1,engine=deepspeed"),
        *("fsdp=8,fp16:pure,mb=2,engine=deepspeed", "fsdp=8,bf16:pure,offload=nvme:/scratch,mb=2,engine=deepspeed"),
        *("ddp=8,mb=1,engine=deepspeed", "single,mb=8,engine=deepspeed"),
        *("zero1=8,bf16,mb=4,reduce=bf16,engine=deepspeed", "fsdp=8,bf16,mb=1,reduce=bf16,engine=deepspeed"),
    ),
    "accelerate": (
        *("single", "ddp=8,bf16,compile", "fsdp=8,bf16,ac=full,reduce=bf16", "fsdp=8:grad-op,fp16,offload=params"),
        *(
            "hsdp=2x4,bf16,ac=full,reduce=bf16,compile",
            "fsdp=4,tp=2,bf16,reduce=bf16",
            "hsdp=2x2,tp=2,fp8",
            "tp=8,bf16",
        ),
        *("zero2=8,bf16,reduce=bf16,engine=deepspeed", "zero2=8,engine=deepspeed"),
        *("zero1=4,offload=optimizer,engine=deepspeed", "fsdp=8,fp16,offload=params,engine=deepspeed"),
    ),
    "torchtitan": (
        *("single,mb=4", "ddp=8,bf16,mb=4,compile", "fsdp=8,bf16,ac=selective,mb=2", "fsdp=8:grad-op,bf16:pure,mb=1"),
        *("hsdp=2x4,bf16,ac=full,mb=1", "fsdp=2,tp=2,pp=2:zb,bf16,mb=1", "fsdp=4,tp=2,fp8,offload=params,mb=1"),
        *("tp=8,mb=8", "pp=8:dualpipev,bf16:pure,mb=1", "hsdp=2x2,pp=2:interleaved,bf16,mb=2"),
    ),
}


def parsed(text: str) -> tuple[Strategy, int] | None:
    """The strategy with its ranks, where the words can stand together."""
    try:
        strategy = Strategy.parse(text or "fp32")
        ranks = strategy.model_ranks * strategy.data_size if strategy.data_size else 8
        ranks = 1 if strategy.data == "single" else ranks
        return strategy.resolve(ranks), ranks
    except MeshwrightError:
        return None


def grammar() -> Iterator[tuple[Strategy, int]]:
    for words in product(DATA, AXES, PRECISIONS, POLICIES):
        found = parsed(",".join(filter(None, words)))
        if found is not None:
            yield found


def changed(before: Strategy, after: Strategy) -> set[str]:
    return {item.name for item in fields(Strategy) if getattr(before, item.name) != getattr(after, item.name)}


def explained(request: ExportRequest, to: str) -> set[str]:
    """Fields that may differ, by what the export says was lost."""
    exported = export(request, to)
    named = {field for loss in exported.without_equal for field in loss.becomes}
    if named & {"axes", "data"}:
        named |= {"data", "data_size"}  # ranks of an axis go to the data axis
    return named | ({"engine"} if to == "deepspeed" else set())  # who reads the file runs it


@pytest.mark.parametrize("to", CONFIGS)
def test_what_is_read_is_what_was_said(to: str, tmp_path: Path) -> None:
    path = tmp_path / "config"
    cases = random.Random(7).sample(list(grammar()), 160)
    for strategy, ranks in cases:
        for batch, device in SETTINGS:
            request = ExportRequest(strategy=strategy, ranks=ranks, global_batch=batch, device=device)
            exported = export(request, to)
            path.write_text(exported.text)
            found = read_foreign(path)
            assert found.origin == to
            assert found.strategy == exported.strategy, (strategy, exported.text)
            assert found.ignored == (), (strategy, exported.text)
            assert changed(strategy, exported.strategy) <= explained(request, to), (strategy, exported.strategy)


@pytest.mark.parametrize(("to", "text"), [(to, text) for to, texts in EXACT.items() for text in texts])
def test_what_has_an_equal_comes_back(to: str, text: str, tmp_path: Path) -> None:
    found = parsed(text)
    assert found is not None
    strategy, ranks = found
    exported = export(ExportRequest(strategy=strategy, ranks=ranks, global_batch=64), to)
    assert exported.without_equal == ()
    path = tmp_path / "config"
    path.write_text(exported.text)
    assert str(read_foreign(path).strategy) == text


@pytest.mark.parametrize(
    ("to", "text", "lost", "becomes"),
    [
        ("deepspeed", "fsdp=4,pp=2:1f1b,mb=1", "pp=2:1f1b", "fsdp=8,mb=1,engine=deepspeed"),
        ("deepspeed", "hsdp=2x4,mb=1", "hsdp=2x4", "fsdp=8,mb=1,engine=deepspeed"),
        ("deepspeed", "zero2=8,mb=1,sync=last", "sync=last", "zero2=8,mb=1,engine=deepspeed"),
        ("torchtitan", "fsdp=8,mb=1,sync=last", "sync=last", "fsdp=8,mb=1"),
        ("torchtitan", "ddp=8,bf16,mb=1,graphs", "graphs", "ddp=8,bf16,mb=1"),
        ("accelerate", "ddp=8,bf16,graphs", "graphs", "ddp=8,bf16"),
        ("torchtitan", "fsdp=8,bf16,mb=1,reduce=bf16", "reduce=bf16", "fsdp=8,bf16,mb=1"),
        ("accelerate", "ddp=8,bf16,reduce=bf16", "reduce=bf16", "ddp=8,bf16"),
        ("accelerate", "fsdp=8,bf16", "reduce=fp32", "fsdp=8,bf16,reduce=bf16"),
        ("accelerate", "zero2=8,bf16,engine=deepspeed", "reduce=fp32", "zero2=8,bf16,reduce=bf16,engine=deepspeed"),
        ("deepspeed", "zero1=8,ac=full,mb=1", "ac=full", "zero1=8,mb=1,engine=deepspeed"),
        ("accelerate", "zero1=8", "zero1=8", "zero1=8,engine=deepspeed"),
        ("accelerate", "ddp=4,tp=2", "ddp=4", "fsdp=4,tp=2"),
        ("accelerate", "fsdp=8,ac=selective", "ac=selective", "fsdp=8,ac=full"),
        ("accelerate", "fsdp=8,mb=4", "mb=4", "fsdp=8"),
        ("torchtitan", "zero2=8,mb=1", "zero2=8", "fsdp=8:grad-op,mb=1"),
        ("torchtitan", "tp=8,bf16,mb=8", "bf16", "tp=8,mb=8"),
        ("torchtitan", "fsdp=4,op=2,mb=1", "op=2", "fsdp=8,mb=1"),
    ],
)
def test_what_has_none_is_named(to: str, text: str, lost: str, becomes: str) -> None:
    found = parsed(text)
    assert found is not None
    exported = export(ExportRequest(strategy=found[0], ranks=found[1]), to)
    assert [loss.term for loss in exported.without_equal] == [lost]
    assert str(exported.strategy) == becomes
    assert str(exported.without_equal[0]) in exported.to_json()["without_equal"]


def test_fsdp_on_cpu_ranks_is_what_accelerate_makes_of_it() -> None:
    exported = export(ExportRequest(strategy=Strategy.parse("fsdp=2,bf16"), ranks=2, device="cpu"), "accelerate")
    assert str(exported.strategy) == "ddp=2,bf16"
    assert "CPU" in str(exported.without_equal[0])
