"""What a started rank runs: read the request, do it, report."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from meshwright.describe.jobfile import load_job
from meshwright.environment import restart_count
from meshwright.facts.job import Job
from meshwright.facts.model import ModelFacts
from meshwright.runtime.attempt import own_attempt, report
from meshwright.runtime.checkpoints import Checkpoints, saved_seed
from meshwright.runtime.preemption import Preemption
from meshwright.runtime.profile_train import ProfileWish
from meshwright.runtime.pulse import tell_of_compiling
from meshwright.runtime.references import Elsewhere
from meshwright.runtime.run import enter_world, setup
from meshwright.runtime.silence import watching_itself
from meshwright.runtime.train import train
from meshwright.runtime.verify import verify

UNWATCHED = timedelta(hours=24)
"""How long collectives wait where something else watches the ranks."""


def run_train(request: dict[str, Any]) -> dict[str, Any]:
    """Train as asked; returns the summary."""
    job = _job(request)
    out = Path(request["out"]) if request["out"] else None
    resume = out is not None and (request["resume"] or restart_count() > 0)
    patience = request.get("patience", 0.0)
    with (
        Preemption(grace=request["grace"]) as preemption,
        watching_itself(patience),
        setup(
            job,
            request["strategy"],
            seed=saved_seed(out, request["seed"]) if out is not None and resume else request["seed"] or 0,
            device=request["device"],
            workers=request["workers"],
            facts=_facts(request),
            # Whom a collective waits for is found by its silence, before the collective gives up.
            world=enter_world(request["device"], **({"patience": UNWATCHED} if patience else {})),
            deepspeed_config=request["deepspeed_config"],
        ) as run,
    ):
        checkpoints = None
        if run.strategy.compile:
            tell_of_compiling()
        if out is not None:
            checkpoints = Checkpoints(
                run, out, every=request["save_every"], keep=request["keep"], keep_every=request["keep_every"]
            )
            if resume:
                checkpoints.resume()
        summary = train(
            run,
            steps=request["steps"],
            out=out,
            checkpoints=checkpoints,
            preemption=preemption,
            tensorboard=request["tensorboard"],
            log_to=request.get("log_to", ()),
            profile=ProfileWish.from_json(request["profile"]) if request.get("profile") else None,
        )
    return summary.to_json()


def run_verify(request: dict[str, Any], patience: timedelta | None = None) -> list[dict[str, Any]]:
    """Verify as asked; every verdict is also reported as soon as it is there."""
    verdicts = []
    job, facts, strategies = _job(request), _facts(request), request["strategies"]
    world = enter_world(request["device"], patience=patience or timedelta(seconds=request["timeout"]))
    # Rank 0 alone compares, and what it compares with lies on its machine.
    made = Elsewhere(Path(request["references"])) if world.is_main else None
    found = verify(job, facts, strategies, world, steps=request["steps"], seed=request["seed"], references=made)
    for number, verdict in enumerate(found, start=1):
        if world.is_main:
            word = verdict.status if verdict.equal else verdict.status.upper()
            print(f"[{number}/{len(strategies)}] {verdict.strategy}: {word}", file=sys.stderr, flush=True)
        verdicts.append(verdict.to_json())
        report(verdicts[-1])
    world.leave()
    return verdicts


def _job(request: dict[str, Any]) -> Job:
    job = load_job(request["job"])
    return job if request.get("max_norm") is None else replace(job, max_norm=request["max_norm"])


def _facts(request: dict[str, Any]) -> ModelFacts:
    return ModelFacts.from_json(request["facts"])


def main() -> None:
    """What `meshwright.runtime.rank` calls on every rank."""
    attempt = own_attempt()
    assert attempt is not None, "a rank was started by the launcher"
    os.dup2(2, 1)  # a job that prints must not write into the one document on stdout
    request = attempt.request()
    if request["verb"] == "train":
        report(run_train(request))
    else:
        run_verify(request)
