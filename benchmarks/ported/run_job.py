"""Train a ported job under several strategies on the batches of the original, and write the loss of every step.

torchrun --nproc-per-node 2 run_job.py OUT.json FOLDER NAME BATCHES.pt STRATEGY[;STRATEGY]
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

import torch

import meshwright as mw
from meshwright.errors import MeshwrightError
from run_script import with_stand_ins


def whole_batches(noted: list[dict[str, torch.Tensor]], passes: int) -> list[dict[str, torch.Tensor]]:
    """The batches of all backward passes of a step, together."""
    steps = [noted[first : first + passes] for first in range(0, len(noted), passes)]
    return [{name: torch.cat([one[name] for one in step]) for name in step[0]} for step in steps]


def main() -> None:
    out, folder, name, batches, strategies = sys.argv[1:]
    torch.set_num_threads(1)
    os.chdir(folder)
    with_stand_ins(Path(folder).absolute())
    import jobs

    ported = jobs.JOBS[name]()
    given = whole_batches(torch.load(batches), ported.passes)
    found: dict[str, Any] = {}
    for strategy in strategies.split(";"):
        try:
            run = mw.setup(ported.job(given[0]), strategy, seed=ported.seed)
            found[strategy] = {"losses": [run.step(batch).loss for batch in given], "passes": ported.passes}
        except MeshwrightError as error:
            found[strategy] = {"error": f"{type(error).__name__}: {error}"}
        except Exception as error:
            found[strategy] = {"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}
        if os.environ.get("RANK", "0") == "0":
            Path(out).write_text(json.dumps(found))
    os._exit(0)


if __name__ == "__main__":
    main()
