"""What a strategy looks like on paper."""

from dataclasses import replace

import pytest

from meshwright.commands.layout import show_layout
from meshwright.describe.model import describe
from meshwright.errors import Refused
from meshwright.facts.strategy import Strategy
from pipeline_jobs import tied
from tiny_jobs import transformer


def paper(text: str, ranks: int, job=None) -> dict:  # type: ignore[no-untyped-def,type-arg]
    job = job or tied
    return show_layout(job, describe(job), Strategy.parse(text), ranks)


def test_a_mesh_names_its_axes() -> None:
    assert paper("pp=2:1f1b,fsdp", 4)["mesh"] == {"pipeline": 2, "data": 2}


def test_stages_hold_all_parameters_and_receive_from_each_other() -> None:
    job = tied
    document = paper("pp=2:1f1b", 2, job)
    whole = sum(p.count * p.itemsize for p in describe(job).parameters)
    assert sum(stage["parameter_bytes"] for stage in document["stages"]) >= whole
    assert [bool(stage["receives"]) for stage in document["stages"]] == [False, True]
    assert sum(stage["flops_share"] for stage in document["stages"]) == pytest.approx(1.0)


def test_the_schedule_is_drawn_and_simulated() -> None:
    schedule = paper("pp=2:interleaved", 2)["schedule"]
    assert schedule["grid"].startswith("interleaved ranks=2 virtual=2")
    assert 0 < schedule["bubble_if_balanced"] <= schedule["bubble"] < 1


def test_a_tensor_plan_can_be_passed_back() -> None:
    job = transformer
    mapping = paper("tp=2", 2, job)["tensor_plan"]
    assert set(mapping.values()) >= {"column", "row"}
    again = paper("tp=2", 2, replace(job, tensor_plan=mapping))
    assert again["tensor_plan"] == mapping


def test_what_would_be_refused_is_refused() -> None:
    with pytest.raises(Refused, match="cannot be cut into"):
        paper("pp=32:gpipe", 32)
