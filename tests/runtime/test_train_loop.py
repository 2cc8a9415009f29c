"""What `train` does besides steps, in one process: epochs, evaluations, callbacks, early stops."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

import meshwright as mw
from meshwright import EarlyStop, Evaluation, Job
from meshwright.errors import JobError
from meshwright.facts.callbacks import EvalEvent, SaveEvent, StepEvent
from meshwright.runtime.checkpoints import Checkpoints
from meshwright.runtime.summary import Summary
from meshwright.runtime.train import train
from minimal import make_job, sample


def rows(count: int, seed: int = 0) -> list[dict[str, torch.Tensor]]:
    batch = sample(count, seed=seed)
    return [{key: value[index] for key, value in batch.items()} for index in range(count)]


def job(*, every: int | None = None, metrics: Any = None, each_epoch: bool = True, **parts: Any) -> Job:
    evaluation = Evaluation(data=rows(5, seed=1), every=every, each_epoch=each_epoch, metrics=metrics or {})
    return make_job(data=rows(20), evaluation=evaluation, **parts)


def go(made: Job, out: Path | None = None, *, resume: bool = False, **options: Any) -> tuple[Summary, mw.Run]:
    with mw.setup(made, "single", device="cpu") as run:
        checkpoints = Checkpoints(run, out, every=options.pop("save_every", 0)) if out is not None else None
        if resume and checkpoints is not None:
            checkpoints.resume()
        return train(run, out=out, checkpoints=checkpoints, progress=False, **options), run


def records(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "evaluations.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(("limits", "steps"), [({"epochs": 2}, 6), ({"epochs": 2, "steps": 4}, 4), ({"steps": 7}, 7)])
def test_whichever_comes_first(limits: dict[str, int], steps: int) -> None:
    summary, run = go(make_job(data=rows(20)), **limits)
    assert (summary.steps, summary.epochs) == (steps, steps // 3)
    assert run.position == 20 * (steps // 3) + 8 * (steps % 3)


def test_neither_steps_nor_epochs() -> None:
    with pytest.raises(JobError, match="steps or epochs"):
        go(make_job(data=rows(20)))


def test_when_it_evaluates(tmp_path: Path) -> None:
    """At steps, at the ends of epochs of three steps, once where both coincide, and at the end."""
    summary, _ = go(job(every=2), tmp_path, steps=7)
    assert [(r["step"], r["epoch"], r["final"]) for r in records(tmp_path)] == [
        *[(2, 0, False), (3, 1, False), (4, 1, False), (6, 2, False), (7, 2, True)]
    ]
    assert summary.evaluation is not None and summary.evaluation["step"] == 7
    assert summary.evaluation["loss"] == records(tmp_path)[-1]["loss"]

    go(job(every=2), tmp_path, steps=8, resume=True)
    assert [(r["step"], r["final"]) for r in records(tmp_path)][-2:] == [(6, False), (8, False)]


def test_callbacks(tmp_path: Path) -> None:
    events: list[Any] = []
    made = job(on_step=events.append, on_eval=events.append, on_save=events.append)
    go(made, tmp_path, steps=4, save_every=2)
    steps = [event for event in events if isinstance(event, StepEvent)]
    assert [(event.step, event.epoch, event.samples) for event in steps] == [(1, 0, 8), (2, 0, 8), (3, 1, 4), (4, 1, 8)]
    assert all(event.loss > 0 and event.grad_norm > 0 and event.lr == 0.1 and event.is_main for event in steps)
    evaluated = [event for event in events if isinstance(event, EvalEvent)]
    assert [(event.step, event.final, list(event.results)) for event in evaluated] == [
        *[(3, False, ["loss"]), (4, True, ["loss"])]
    ]
    saved = [event for event in events if isinstance(event, SaveEvent)]
    assert [event.step for event in saved] == [2, 4] and all((e.path / "checkpoint.json").is_file() for e in saved)


@pytest.mark.parametrize("callback", ["on_step", "on_eval", "on_save"])
def test_a_callback_that_raises(tmp_path: Path, callback: str) -> None:
    def fail(event: Any) -> None:
        raise ValueError("no such luck")

    with pytest.raises(
        JobError, match=rf"Job\({callback}=...\) failed on rank 0 at step [123]: ValueError: no such luck"
    ):
        go(job(**{callback: fail}), tmp_path, steps=3)


def test_a_callback_that_has_seen_enough() -> None:
    summary, _ = go(job(on_step=lambda event: event.step == 2), steps=9)
    assert (summary.steps, summary.stopped) == (3, "on_step at step 2")


def test_a_metric_that_fails_is_found_before_the_first_step() -> None:
    seen: list[int] = []
    made = job(metrics={"missing": lambda output, batch: (batch["label"], 1)}, on_step=lambda e: seen.append(e.step))
    with pytest.raises(JobError, match="The metric 'missing' raised KeyError"):
        go(made, steps=3)
    assert not seen


def test_an_early_stop_is_kept(tmp_path: Path) -> None:
    """What was counted before a resume counts after it."""
    losses = iter([0.0, 3.0, 2.0, 2.5])  # the first is that of the batch that is tried before the first step
    made = job(
        every=1,
        each_epoch=False,
        metrics={"told": mw.Metric(sums=lambda o, b: torch.ones(1), result=lambda totals: next(losses))},
        early_stop=EarlyStop(metric="told", patience=3),
    )
    summary, _ = go(made, tmp_path, steps=3)
    assert summary.early_stop is None
    losses = iter([0.0, 2.5, 2.4, 1.0])
    summary, _ = go(made, tmp_path, steps=9, resume=True)
    assert summary.steps == 5
    assert summary.early_stop == {"metric": "told", "best": 2.0, "best_step": 2, "misses": 3}
    again, _ = go(made, tmp_path, steps=9, resume=True)
    assert (again.steps, again.samples, again.early_stop) == (5, 0, summary.early_stop)
    assert [event["event"] for event in map(json.loads, (tmp_path / "events.jsonl").read_text().splitlines())].count(
        "stopped early"
    ) == 2


def test_a_schedule_that_follows_evaluations() -> None:
    """Its rate falls after each evaluation that is not better than the one before: none is, by this much."""
    made = job(
        every=2,
        each_epoch=False,
        schedule=lambda optimizer: ReduceLROnPlateau(
            optimizer, factor=0.5, patience=0, threshold=1e9, threshold_mode="abs"
        ),
        schedule_by="evaluation",
    )
    rates: list[float] = []
    go(replace(made, on_step=lambda event: rates.append(event.lr)), steps=7)
    assert rates == [0.1, 0.1, 0.1, 0.1, 0.05, 0.05, 0.025]


def test_a_batch_for_evaluation_of_another_size() -> None:
    one, other = (
        mw.setup(replace(job(), evaluation=Evaluation(data=rows(5), batch=size)), "single", device="cpu").measure()
        for size in (1, 4)
    )
    assert one["loss"] == pytest.approx(other["loss"], rel=1e-6)


def test_data_for_evaluation_that_has_no_length() -> None:
    made = replace(job(), evaluation=Evaluation(data=iter(())))  # type: ignore[arg-type]  # the mistake
    with pytest.raises(JobError, match=r"Evaluation\(data=...\)"):
        go(made, steps=1)
