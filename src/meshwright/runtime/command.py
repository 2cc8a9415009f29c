"""What the command line asks for: checked here, before any process starts, then done by ranks."""

from __future__ import annotations

import sys
from contextlib import nullcontext, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

from meshwright.build.check import check, check_engine_config
from meshwright.build.rehearsal import rehearse
from meshwright.describe.jobfile import load_job
from meshwright.describe.model import describe
from meshwright.errors import BadInput, Refused
from meshwright.facts.job import Job
from meshwright.facts.model import ModelFacts
from meshwright.facts.strategy import Strategy
from meshwright.runtime.checkpoints import saved_seed
from meshwright.runtime.environment import Launched, launched, restart_count
from meshwright.runtime.launch import launch
from meshwright.runtime.layout import lay_out_on_paper
from meshwright.runtime.lock import owned
from meshwright.runtime.place import choose_device, has_one_process_axis, in_one_process, place_for, place_of_layers
from meshwright.runtime.record import prepare_output, require_tensorboard
from meshwright.runtime.worker import run_train

RESTARTS = 3
"""How often a run that saves itself is restarted where nobody says otherwise."""


def train_command(*, out: Path | None, **asked: Any) -> dict[str, Any] | None:
    """Train, alone in the run's folder; returns the summary, or None on a rank that has nothing to print."""
    place = launched()
    mine = out if place is None or place.rank == 0 else None
    with nullcontext() if mine is None else owned(mine):
        return _checked(out=out, place=place, **asked)


def _checked(
    *,
    place: Launched | None,
    job: str,
    strategy: str,
    ranks: int | None,
    out: Path | None,
    tensorboard: bool,
    resume: bool,
    max_restarts: int | None,
    deepspeed_config: dict[str, Any] | None = None,
    **rest: Any,
) -> dict[str, Any] | None:
    """All that can be told before any process starts, then the training."""
    _refuse_without_folder(out, resume=resume, **rest)
    resume = resume or (out is not None and restart_count() > 0)  # torchrun restarts all of the command
    parsed = Strategy.parse(strategy)
    if parsed.offload == "nvme" and out is not None:
        raise Refused(f"No checkpoint is made under {parsed}, so --out has nothing to keep; leave it out.")
    rest["device"] = choose_device(known_device(rest["device"]))
    count = count_ranks(ranks, default=_fewest_ranks(parsed, rest["device"]))
    loaded, facts = look(job)
    in_one = count == 1 and has_one_process_axis(parsed)
    place_checked = place_of_layers(rest["device"], parsed) if in_one else find_place(rest["device"], count)
    clipped = _with_norm(loaded, rest["max_norm"])
    resolved = check(clipped, facts, parsed, place_checked)
    if deepspeed_config is not None:
        check_engine_config(deepspeed_config, clipped, resolved)
    rehearse(loaded, facts, resolved)
    if parsed.traits.many_devices:
        strategy = str(replace(parsed, data_size=count))
    if facts.drops and (note := other_masks(resolved)):
        print(f"note: {note}", file=sys.stderr)
    loaded.dataset()
    if tensorboard:
        require_tensorboard()
        if out is None:
            raise BadInput("--tensorboard writes into the run's folder; give --out a folder.")
    request = {
        **{"verb": "train", "job": job, "strategy": strategy, "out": None if out is None else str(out.resolve())},
        **{"tensorboard": tensorboard, "resume": resume, "facts": facts.to_json()},
        "deepspeed_config": deepspeed_config,
        **rest,
    }
    return _train(request, place, parsed, count, max_restarts=max_restarts)


def _train(
    request: dict[str, Any], place: Launched | None, strategy: Strategy, count: int, *, max_restarts: int | None
) -> dict[str, Any] | None:
    """By ranks that are there, by this process alone, or by ranks that are started for it."""
    out = Path(request["out"]) if request["out"] else None
    if out is not None and (place is None or place.rank == 0):
        prepare_output(out, resume=request["resume"])
        if request["resume"]:
            saved_seed(out, request["seed"])  # refuses another seed before any process starts
    restarts = (RESTARTS if out is not None and count > 1 else 0) if max_restarts is None else max_restarts
    if place is not None or strategy.traits.many_devices or (count == 1 and not restarts):
        with redirect_stdout(sys.stderr):
            summary = run_train(request)
        return summary if place is None or place.rank == 0 else None
    results: list[Any] = []
    launch(
        request,
        count,
        results=results,
        max_restarts=restarts,
        grace=request["grace"],
        patience=request["patience"],
    )
    return results[0]  # type: ignore[no-any-return]


def other_masks(strategy: Strategy) -> str:
    """What to say of a job with dropout whose masks are not those of one process; empty where they are."""
    if strategy.compile:
        why = "compiled code draws its own"
    elif strategy.model_ranks > 1:
        why = "it divides the model, and each part draws for itself"
    elif strategy.data_ranks > 1 or strategy.micro_batch is not None:
        why = "each micro-batch draws for itself; strategies that cut the batch alike draw the same"
    else:
        return ""
    return (
        f"{strategy} draws other random numbers (dropout) than one process would: {why}. "
        "They are equal in distribution, not in bits; see docs/same-training.md."
    )


def _refuse_without_folder(out: Path | None, *, resume: bool, save_every: int, **rest: Any) -> None:
    if out is None and (resume or save_every):
        raise BadInput(f"{'--resume' if resume else '--save-every'} needs the run's folder; give it with --out.")


def layout_command(*, job: str, strategy: str, ranks: int | None) -> dict[str, Any]:
    """How a strategy would lie, on as few ranks as it needs where no number is given."""
    parsed = Strategy.parse(strategy)
    loaded, facts = look(job)
    return lay_out_on_paper(loaded, facts, parsed, ranks or parsed.model_ranks * (parsed.data_size or 1))


def look(job: str) -> tuple[Job, ModelFacts]:
    with redirect_stdout(sys.stderr):
        loaded = load_job(job)
        return loaded, describe(loaded)


def _with_norm(job: Job, max_norm: float | None) -> Job:
    return job if max_norm is None else replace(job, max_norm=max_norm)


def count_ranks(asked: int | None, *, default: int) -> int:
    place = launched()
    if place is None:
        return asked or default
    if asked is not None and asked != place.ranks:
        raise BadInput(f"--ranks {asked} was asked for, but the launcher started {place.ranks} ranks; leave it out.")
    return place.ranks


def _fewest_ranks(strategy: Strategy, device: str) -> int:
    """As many as the strategy's sizes ask for; layers over GPUs run in one process where nobody asks for ranks."""
    if in_one_process(strategy) and strategy.data is None and device == "cuda":
        return 1
    return strategy.model_ranks * (strategy.data_size or 1)


def find_place(device: str, ranks: int) -> Any:
    place = launched()
    return place_for(device, ranks, local_ranks=place.local_ranks if place else ranks)


def known_device(device: str | None) -> str | None:
    if device not in (None, "cpu", "cuda"):
        raise BadInput(f"--device must be cpu or cuda, not {device!r}.")
    return device
