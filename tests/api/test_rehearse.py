"""Rehearsals without processes: roles, documents, the ladder of changes, and what is kept for `train`."""

import re
from pathlib import Path
from typing import Any

import pytest

import tiny_jobs
from meshwright.api.job_planner import Planner
from meshwright.api.kept_forecasts import compare_run, keep_rehearsal
from meshwright.api.rehearsal_site import find_site
from meshwright.api.rehearse import rehearse_strategy
from meshwright.api.rehearser import Rehearser
from meshwright.api.roles import distinct_roles
from meshwright.api.smaller import ladder
from meshwright.api.tune import TuneOptions, tune
from meshwright.describe.model import describe
from meshwright.environment import CACHE
from meshwright.errors import BadInput
from meshwright.facts.model import ModelFacts
from meshwright.facts.rehearsal import BACKWARD, OUT_OF_MEMORY, Moment, Rehearsal
from meshwright.facts.strategy import Strategy
from meshwright.planner.candidates import Allowed
from meshwright.rehearse.task import RehearsalTask
from meshwright.report.rehearse import rehearsal_page, tuning_page
from meshwright.report.rehearse_html import rehearsal_html

NAME = f"{Path(tiny_jobs.__file__)}:transformer"
KIB = 1 << 10


@pytest.fixture(scope="module")
def facts() -> ModelFacts:
    return describe(tiny_jobs.transformer)


class Stage:
    """Rehearsals as they might end: each sample of a micro-batch takes memory, and recomputing saves half of it."""

    def __init__(self) -> None:
        self.tasks: list[RehearsalTask] = []

    def __call__(self, task: RehearsalTask, *, timeout: float, tell: object) -> Rehearsal:
        self.tasks.append(task)
        strategy = task.strategy
        samples = strategy.micro_batch or (task.global_batch or 8) // strategy.data_ranks
        each = {"none": 40, "selective": 30, "full": 20}[strategy.recompute]
        needs = (100 + samples * each) * KIB
        if task.limit is not None and needs > task.limit:
            at = Moment(phase=BACKWARD, module="blocks.1")
            held = {"activations": task.limit - 10}
            return Rehearsal(
                status=OUT_OF_MEMORY, device="cpu", peak=task.limit - 10, memory=held, peak_at=at, wanted=KIB
            )
        seconds = 0.1 + 0.1 / samples
        held = {"activations": needs}
        return Rehearsal(device="cpu", peak=needs, memory=held, seconds=seconds, quickest=seconds)


def rehearser(facts: ModelFacts, memory: str, stage: Stage, world: int = 2) -> Rehearser:
    job = tiny_jobs.transformer
    site = find_site(world=world, on=None, device="cpu", memory=memory)
    planner = Planner(job, facts, job.global_batch)
    return Rehearser(job=NAME, planner=planner, site=site, run=stage, traced=False)


def test_what_fits_is_told_with_its_room(facts: ModelFacts) -> None:
    document = rehearse_strategy(rehearser(facts, "1MiB", Stage()), "ddp")
    assert document["fits"] and document["change"] is None
    assert document["room_gib"] == pytest.approx((1024 - 260) / 2**20)
    assert set(document["error"]) == {"memory", "reserved", "time"}
    assert document["error"]["time"] == pytest.approx(document["forecast"]["compute_ms"] / 125 - 1)
    assert document["measured"]["step_ms"] == pytest.approx(125 + document["forecast"]["waiting_ms"])
    assert "fits into 1 MiB" in _text(rehearsal_page(document))
    assert "ddp=2" in rehearsal_html(document)


def test_the_smallest_change_that_fits_is_rehearsed(facts: ModelFacts) -> None:
    stage = Stage()
    document = rehearse_strategy(rehearser(facts, "200KiB", stage), "ddp")
    assert document["status"] == OUT_OF_MEMORY
    assert document["measured"]["peak_at"] == {"phase": "backward", "module": "blocks.1"}
    assert document["change"]["strategy"] == "ddp=2,mb=2"
    assert document["change"]["changed"] == ["mb=2"]
    assert document["change"]["rehearsal"]["fits"]
    text = _text(rehearsal_page(document))
    assert "backward of blocks.1" in text and "mb=2" in text
    assert "blocks.1" in rehearsal_html(document)


def test_the_ladder_begins_with_the_smallest_change() -> None:
    rungs = [str(rung) for rung in ladder(Strategy.parse("ddp").resolve(4))]
    assert rungs[:4] == ["ddp=4", "ddp=4,loss=pieced", "ddp=4,ac=selective", "ddp=4,ac=full"]
    assert rungs.index("zero1=4") < rungs.index("fsdp=4") < rungs.index("fsdp=4,ac=full,offload=optimizer")


def test_no_change_saves_what_is_never_enough(facts: ModelFacts) -> None:
    stage = Stage()
    document = rehearse_strategy(rehearser(facts, "90KiB", stage), "ddp")
    assert document["change"]["strategy"] is None and document["change"]["advice"]
    assert len(stage.tasks) <= 6


def test_tuning_finds_the_fastest_that_fits(facts: ModelFacts) -> None:
    stage = Stage()
    tuned = tune(rehearser(facts, "200KiB", stage), TuneOptions(allowed=Allowed(precisions=("fp32",)), strategy="ddp"))
    assert tuned["strategy"] == "ddp=2,ac=full,mb=4"
    assert tuned["peak_gib"] <= tuned["limit_gib"]
    assert len(tuned["trials"]) == len(stage.tasks) < tuned["candidates"]
    assert tuned["strategy"] in _text(tuning_page(tuned))
    assert tuned["strategy"] in re.sub("<[^>]+>", "", rehearsal_html(tuned))


def test_roles_are_stages_and_uneven_ranks(facts: ModelFacts) -> None:
    def roles(text: str, ranks: int, batch: int = 8) -> list[int]:
        return distinct_roles(Strategy.parse(text).resolve(ranks), facts, batch)

    assert roles("ddp", 4) == [0]
    assert roles("pp=2,ddp", 4) == [0, 2]
    assert roles("ddp", 4, batch=7) == [0, 3]


def test_a_run_is_compared_with_its_rehearsal(
    facts: ModelFacts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CACHE, str(tmp_path))
    document = rehearse_strategy(rehearser(facts, "1MiB", Stage()), "ddp")
    keep_rehearsal(document)
    summary = {"strategy": "ddp=2", "ranks": 2, "device": "cpu", "global_batch": 8, "step_ms": 250.0, "peak_bytes": [1]}
    found = compare_run(summary, NAME)
    assert found is not None and found["forecast"]["source"] == "rehearse"
    assert found["error"]["time"] == pytest.approx(document["measured"]["step_ms"] / 250 - 1)
    assert found["error"]["memory"] is None  # a CPU's peak is that of the process
    assert compare_run({**summary, "global_batch": 16}, NAME) is None
    assert compare_run({**summary, "device": "cuda"}, NAME) is None


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"world": None, "on": None}, "--world"),
        ({"world": 4, "on": "8xH100-80GB"}, "8 devices"),
        ({"world": 4, "memory": "lots"}, "--memory"),
        ({"world": 4, "memory": "0GiB"}, "--memory"),
        ({"world": 4, "device": "tpu"}, "--device"),
    ],
)
def test_wrong_options_are_told(given: dict[str, Any], words: str) -> None:
    with pytest.raises(BadInput, match=words):
        find_site(**{"on": None, "device": "cpu", "memory": None, **given})


@pytest.mark.parametrize("text", ["dp", "engine=deepspeed,zero1"])
def test_what_a_fake_world_cannot_stand_for_is_refused(facts: ModelFacts, text: str) -> None:
    with pytest.raises(BadInput):
        rehearse_strategy(rehearser(facts, "1MiB", Stage()), text)


def _text(page: Any) -> str:
    from rich.console import Console

    console = Console(width=200)
    with console.capture() as capture:
        console.print(page)
    return " ".join(capture.get().split())
