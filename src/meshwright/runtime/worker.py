"""What a started rank runs: read the request, do it, report."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from meshwright.describe.jobfile import load_job
from meshwright.facts.job import Job
from meshwright.facts.model import ModelFacts
from meshwright.runtime.environment import own_folder
from meshwright.runtime.launch import guard, report
from meshwright.runtime.run import enter_world, setup
from meshwright.runtime.train import train
from meshwright.runtime.verify import verify


def run_train(request: dict[str, Any]) -> dict[str, Any]:
    """Train as asked; returns the summary."""
    job = _job(request)
    with setup(
        job,
        request["strategy"],
        seed=request["seed"],
        device=request["device"],
        workers=request["workers"],
        facts=_facts(request),
    ) as run:
        out = Path(request["out"]) if request["out"] else None
        summary = train(run, steps=request["steps"], out=out, tensorboard=request["tensorboard"])
    return summary.to_json()


def run_verify(request: dict[str, Any]) -> list[dict[str, Any]]:
    """Verify as asked; every verdict is also reported as soon as it is there."""
    verdicts = []
    job = _job(request)
    facts = _facts(request)
    world = enter_world(request["device"], patience=timedelta(hours=4))  # rank 0 runs the references meanwhile
    strategies = request["strategies"]
    for number, verdict in enumerate(
        verify(job, facts, strategies, world, steps=request["steps"], seed=request["seed"]), start=1
    ):
        if world.is_main:
            word = "equal" if verdict.equal else "DIFFERS"
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
    folder = own_folder()
    if folder is None:
        raise SystemExit("meshwright.runtime.worker is started by meshwright itself; use `meshwright train`.")
    os.dup2(2, 1)  # a job that prints must not write into the one document on stdout
    request = json.loads((folder / "request.json").read_text())
    if request["verb"] == "train":
        guard(lambda: report(run_train(request)))
    else:
        guard(lambda: run_verify(request))


if __name__ == "__main__":
    main()
