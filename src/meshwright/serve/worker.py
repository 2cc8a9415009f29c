"""The planning process: reads one request per line, writes one answer per line.

Why a process: a request that takes too long can be stopped, and the server stays responsive meanwhile. Each model is
described only once.
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
"""Models whose description is cached; the least recently used goes first."""
PLAYED = 4000
"""The largest pipeline, in actions, that is drawn: more would slow down every change of a setting."""


class Shelf:
    """Cache of model descriptions."""

    def __init__(self) -> None:
        self._models: OrderedDict[tuple[str, int], Described] = OrderedDict()

    def take(self, source: str, stamp: int) -> Described:
        """The description of a model whose file was written at `stamp`."""
        key = source, stamp
        if key not in self._models:
            self._models[key] = described(source)
        self._models.move_to_end(key)
        while len(self._models) > KEPT:
            self._models.popitem(last=False)
        return self._models[key]


def answer(request: PlanRequest, shelf: Shelf) -> dict[str, Any]:
    """The page's answer: the plans as data, and the rendered HTML."""
    known = shelf.take(request.source, request.stamp)
    # Each request gets its own planner, because a planner keeps notes; only the costs are shared.
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
    """An answer or an error; after any exception the next line is still read."""
    try:
        return {"answer": answer(PlanRequest.from_json(json.loads(line)), shelf)}
    except MeshwrightError as error:
        return {"error": str(error), "status": status_of(error)}
    except Exception as error:
        traceback.print_exc(file=sys.stderr)
        return {
            "error": f"Internal error while planning ({type(error).__name__}); see the server's output.",
            "status": 500,
        }


def work(lines: TextIO, out: TextIO) -> None:
    shelf = Shelf()
    for line in lines:
        out.write(json.dumps(answer_line(line, shelf)) + "\n")
        out.flush()


def main() -> None:
    # A job's module may print; keep stdout for answers.
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    work(sys.stdin, out)


if __name__ == "__main__":
    main()
