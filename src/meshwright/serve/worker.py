"""The planning process: reads one request per line, writes one answer per line.

Why a process: a request that takes too long can be stopped, and the server stays responsive meanwhile. Each model is
described only once.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from functools import lru_cache
from typing import Any, TextIO

from meshwright.api.described_presets import JobDescription, describe_job
from meshwright.api.job_planner import Planner
from meshwright.api.plan import rank
from meshwright.api.timeline import first_timeline
from meshwright.errors import MeshwrightError
from meshwright.report.plan_html import body
from meshwright.serve.errors import status_of
from meshwright.serve.request import PlanRequest

KEPT = 6
"""Models whose description is cached; the least recently used goes first."""
MOST_ACTIONS = 4000
"""The largest pipeline, in actions, that is drawn: more would slow down every change of a setting."""


@lru_cache(KEPT)
def described(source: str, stamp: int) -> JobDescription:
    """The description of a model whose file was written at `stamp`: a changed file is described again."""
    return describe_job(source)


def answer(request: PlanRequest) -> dict[str, Any]:
    """The page's answer: the plans as data, and the rendered HTML."""
    known = described(request.source, request.stamp)
    # Each request gets its own planner, because a planner keeps notes; only the costs are shared.
    planner = Planner(known.job, known.facts, request.batch or known.job.global_batch, costs=known.costs)
    ranking = rank(planner, request.cluster, request.options, name=request.job)
    timeline = first_timeline(planner.context(request.cluster), ranking.plans, largest=MOST_ACTIONS)
    document = ranking.to_json()
    return {
        "command": request.command,
        "job": request.job,
        **{key: document[key] for key in ("cluster", "plans", "advice", "candidates")},
        "refused": len(document["refused"]),
        "batch": planner.global_batch,
        "html": body(document, timeline),
    }


def answer_line(line: str) -> dict[str, Any]:
    """An answer or an error; after any exception the next line is still read."""
    try:
        return {"answer": answer(PlanRequest.from_json(json.loads(line)))}
    except MeshwrightError as error:
        return {"error": str(error), "status": status_of(error)}
    except Exception as error:
        traceback.print_exc(file=sys.stderr)
        message = f"Internal error while planning ({type(error).__name__}); see the server's output."
        return {"error": message, "status": 500}


def work(lines: TextIO, out: TextIO) -> None:
    for line in lines:
        out.write(json.dumps(answer_line(line)) + "\n")
        out.flush()


def main() -> None:
    # A job's module may print; keep stdout for answers.
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    work(sys.stdin, out)


if __name__ == "__main__":
    main()
