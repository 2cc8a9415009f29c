"""What a job says about evaluation, early stops, schedules and averages, checked when it is written."""

from typing import Any

import pytest
from torch.optim.lr_scheduler import ReduceLROnPlateau

from meshwright import EarlyStop, Evaluation
from meshwright.describe.model import describe
from meshwright.errors import JobError
from minimal import make_job, sample

DATA = [{key: value[index] for key, value in sample(4).items()} for index in range(4)]


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"early_stop": EarlyStop()}, "needs evaluations"),
        ({"on_eval": print}, "needs evaluations"),
        ({"schedule_by": "evaluation"}, "needs evaluations"),
        ({"schedule_by": "epochs"}, "must be one of step, epoch, evaluation"),
        ({"ema": 1.0}, "between 0 and 1"),
        ({"on_step": 3}, "must be a function"),
        ({"evaluation": DATA}, "must be an Evaluation"),
        ({"evaluation": Evaluation(data=DATA, weights="ema")}, "give Job"),
        ({"evaluation": Evaluation(data=DATA), "early_stop": EarlyStop(metric="f1")}, "is not measured"),
        ({"evaluation": Evaluation(data=DATA, each_epoch=False), "early_stop": EarlyStop()}, "before the end"),
    ],
)
def test_contradictions_in_a_job(changes: dict[str, Any], why: str) -> None:
    with pytest.raises(JobError, match=why):
        make_job(**changes)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"every": 0}, "whole number above 0"),
        ({"weights": "averaged"}, "trained"),
        ({"metrics": {"loss": print}}, "cannot be named 'loss'"),
        ({"metrics": {"f1": 3}}, "must be a function"),
    ],
)
def test_contradictions_in_an_evaluation(options: dict[str, Any], why: str) -> None:
    with pytest.raises(JobError, match=why):
        Evaluation(data=DATA, **options)


@pytest.mark.parametrize("options", [{"better": "max"}, {"patience": 0}, {"by_at_least": -1.0}])
def test_contradictions_in_an_early_stop(options: dict[str, Any]) -> None:
    with pytest.raises(JobError, match=next(iter(options))):
        EarlyStop(**options)


def test_what_counts_as_better() -> None:
    lower, higher = EarlyStop(by_at_least=0.1), EarlyStop(better="higher")
    assert lower.improves(3.0, None) and lower.improves(2.8, 3.0) and not lower.improves(2.95, 3.0)
    assert higher.improves(3.1, 3.0) and not higher.improves(3.0, 3.0)
    assert not lower.improves(float("nan"), None)


def test_a_plateau_by_epoch_has_no_loss() -> None:
    job = make_job(schedule=ReduceLROnPlateau, schedule_by="epoch")
    with pytest.raises(JobError, match='schedule_by="evaluation"'):
        describe(job)
