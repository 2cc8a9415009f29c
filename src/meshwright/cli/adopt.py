"""`meshwright adopt`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from meshwright.cli.outcome import print_result
from meshwright.errors import BadInput

NOTES = """The script is read, never run or imported. What could not be carried over is listed at the top of the job
file. Mistakes are the script's; the job does not make them."""


def adopt(
    script: Annotated[Path, typer.Argument(help="A training script with a loop of its own.")],
    out: Annotated[Path | None, typer.Option("--out", "-o", help="The job file to write; default: none.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the job file.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks of errors.")] = False,
) -> None:
    """Read a training script: name its mistakes, and write a job to start from.

    [bold]meshwright adopt train.py[/]

    [bold]meshwright adopt train.py -o job.py && meshwright verify job.py --ranks 2[/]
    """
    from meshwright.adopt.adopt import adopt as read
    from meshwright.report.adopt import adopt_page
    from meshwright.report.html import write_file

    if out is not None and out.exists() and (not force or out.resolve() == script.resolve()):
        raise BadInput(f"{out} exists already; name another file, or give --force unless it is the script itself.")
    document = read(script, name=str(out or "job.py")).to_json() | {"file": None if out is None else str(out)}
    if out is not None:
        write_file(document["job"], out, what="job")
    print_result(document, adopt_page(document), as_json=as_json)
