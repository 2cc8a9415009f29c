"""Tasks reach the ranks as they were made."""

from dataclasses import FrozenInstanceError, fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest

import tiny_jobs
from meshwright.describe.model import describe
from meshwright.facts.strategy import Strategy
from meshwright.launch.attempt import Attempt, RankOptions
from meshwright.runtime import request
from meshwright.runtime.profile_train import ProfileOptions
from meshwright.runtime.request import (
    CauseTask,
    CompareRequest,
    CompareTask,
    ProbeRequest,
    ReferenceTask,
    TrainRequest,
    TrainTask,
    VerifyRequest,
    VerifyTask,
)

FACTS = describe(tiny_jobs.transformer)
STRATEGY = Strategy.parse("fsdp,tp=2,bf16,offload=optimizer")
VERIFY = VerifyRequest(job="job.py", strategies=("ddp", "fsdp"))
TASKS = (
    TrainTask(
        request=TrainRequest(
            job="job.py",
            strategy=STRATEGY,
            out=Path("runs"),
            profile=ProfileOptions(first=1, last=2, ranks=None),
            deepspeed_config={"zero_optimization": {"stage": 1}},
        ),
        facts=FACTS,
    ),
    VerifyTask(request=VERIFY, facts=FACTS, device="cpu", references=Path("references"), strategies=("ddp",)),
    ReferenceTask(request=VERIFY, facts=FACTS, device="cpu", wanted=(STRATEGY,)),
    CauseTask(request=VERIFY, device="cpu"),
    CompareTask(
        request=CompareRequest(job="job.py", ranks=2), facts=FACTS, device="cpu", strategy=STRATEGY, profile=True
    ),
    ProbeRequest(ranks=2),
)


@pytest.mark.parametrize("task", TASKS, ids=lambda task: type(task).__name__)
def test_a_task_travels(task: Any, tmp_path: Path) -> None:
    options = RankOptions(launcher=7, grace=None, patience=1.5)
    Attempt(tmp_path, 0).hand_out(options, task)
    later = Attempt(tmp_path, 1)
    assert (later.options(), later.task()) == (options, task)


def test_requests_are_frozen_and_given_by_keyword() -> None:
    kinds = [kind for kind in vars(request).values() if is_dataclass(kind) and kind.__module__ == request.__name__]
    assert {type(task) for task in TASKS} < set(kinds)
    assert all(field.kw_only for kind in kinds for field in fields(kind))
    with pytest.raises(FrozenInstanceError):
        VERIFY.steps = 4  # type: ignore[misc]
