"""The process that plans: a request a line on its input, an answer a line on its output.

It is a process of its own so that a question without end can be ended, and so that the page answers meanwhile. What a
model's description costs is paid once for each model.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any, TextIO

from meshwright.describe.jobfile import load_job
from meshwright.describe.model import describe
from meshwright.errors import MeshwrightError
from meshwright.facts.costs import ModelCosts
from meshwright.facts.job import Job
from meshwright.facts.model import ModelFacts
from meshwright.planning import Planner, rank
from meshwright.report.plan_html import body
from meshwright.serve.errors import status_of
from meshwright.serve.request import PlanRequest
from meshwright.timelines import first_timeline

KEPT = 6
"""Models whose description is kept; the one that was asked for longest ago goes first."""
PLAYED = 4000
"""Actions of a pipeline that is drawn: more would be waited for at every turn of a knob."""


@dataclass(frozen=True, kw_only=True)
class Described:
    """A model that was described, with what tracing found of its costs so far."""

    job: Job
    facts: ModelFacts
    costs: dict[tuple[str, str], ModelCosts] = field(default_factory=dict)

    def planner(self, batch: int | None) -> Planner:
        """A planner of its own for every question: it keeps what it was asked, and costs alone are worth keeping."""
        return Planner(self.job, self.facts, batch or self.job.global_batch, costs=self.costs)


class Shelf:
    """The descriptions that are kept."""

    def __init__(self) -> None:
        self._models: OrderedDict[tuple[str, int], Described] = OrderedDict()

    def take(self, source: str, stamp: int) -> Described:
        """The model of a text, whose file was written at that time."""
        key = source, stamp
        if key not in self._models:
            job = load_job(source)
            self._models[key] = Described(job=job, facts=describe(job))
        self._models.move_to_end(key)
        while len(self._models) > KEPT:
            self._models.popitem(last=False)
        return self._models[key]


def answer(request: PlanRequest, shelf: Shelf) -> dict[str, Any]:
    """What the page is told: the plans as data, and all of it as it is shown."""
    planner = shelf.take(request.source, request.stamp).planner(request.batch)
    ranking = rank(planner, request.cluster, request.wishes, name=request.job)
    timeline = first_timeline(planner.setting(request.cluster), ranking.plans, largest=PLAYED)
    document = ranking.to_json()
    return {
        "command": request.command,
        "job": request.job,
        "cluster": document["cluster"],
        "plans": document["plans"],
        "advice": document["advice"],
        "candidates": document["candidates"],
        "refused": len(document["refused"]),
        "batch": planner.global_batch,
        "html": body(document, timeline),
    }


def answer_line(line: str, shelf: Shelf) -> dict[str, Any]:
    """An answer, or the error instead: whatever happens here is told, and the next line is read."""
    try:
        return {"answer": answer(PlanRequest.from_json(json.loads(line)), shelf)}
    except MeshwrightError as error:
        return {"error": str(error), "status": status_of(error)}
    except Exception as error:
        traceback.print_exc(file=sys.stderr)
        return {
            "error": f"Planning this failed ({type(error).__name__}); the server's own output says where.",
            "status": 500,
        }


def work(lines: TextIO, out: TextIO) -> None:
    shelf = Shelf()
    for line in lines:
        out.write(json.dumps(answer_line(line, shelf)) + "\n")
        out.flush()


def main() -> None:
    # A job's own module may print; answers go where nothing else is written.
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    work(sys.stdin, out)


if __name__ == "__main__":
    main()
