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
from typing import Any, TextIO

from meshwright.described import Described, described
from meshwright.errors import MeshwrightError
from meshwright.planning import Planner
from meshwright.ranking import rank
from meshwright.report.plan_html import body
from meshwright.serve.errors import status_of
from meshwright.serve.request import PlanRequest
from meshwright.timelines import first_timeline

KEPT = 6
"""Models whose description is kept; the one that was asked for longest ago goes first."""
PLAYED = 4000
"""Actions of a pipeline that is drawn: more would be waited for at every turn of a knob."""


class Shelf:
    """The descriptions that are kept."""

    def __init__(self) -> None:
        self._models: OrderedDict[tuple[str, int], Described] = OrderedDict()

    def take(self, source: str, stamp: int) -> Described:
        """The model of a text, whose file was written at that time."""
        key = source, stamp
        if key not in self._models:
            self._models[key] = described(source)
        self._models.move_to_end(key)
        while len(self._models) > KEPT:
            self._models.popitem(last=False)
        return self._models[key]


def answer(request: PlanRequest, shelf: Shelf) -> dict[str, Any]:
    """What the page is told: the plans as data, and all of it as it is shown."""
    known = shelf.take(request.source, request.stamp)
    # A planner of its own for every question: it keeps what it was asked, and costs alone are worth keeping.
    planner = Planner(known.job, known.facts, request.batch or known.job.global_batch, costs=known.costs)
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
