"""`meshwright serve`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

NOTES = """Listens on this machine only, asks nothing of a network, and runs nothing that a visitor names.
Needs `pip install 'meshwright\\[serve]'`. Ctrl-C ends it."""


def serve(
    job: Annotated[str, typer.Argument(help="A job that may be planned beside presets and configs.")] = "",
    folder: Annotated[Path, typer.Option(help="Hugging Face configs inside it may be planned.")] = Path(),
    port: Annotated[int, typer.Option(min=0, max=65535, help="Where to listen; 0 takes any that is free.")] = 8765,
    host: Annotated[str, typer.Option(help="127.0.0.1, localhost or ::1; others are refused.")] = "127.0.0.1",
    as_json: Annotated[bool, typer.Option("--json", help="Tell the address as one JSON document on stdout.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks of errors.")] = False,
) -> None:
    """The planner as a page on this machine: turn the knobs, see the ranking.

    [bold]meshwright serve[/]

    [bold]meshwright serve examples/gpt.py --port 0[/]

    [bold]meshwright serve --folder models[/]
    """
    from meshwright.serve import server

    def told(address: str) -> None:
        document = {"url": address, "job": job, "folder": str(folder)}
        print(json.dumps(document) if as_json else f"Open {address} in a browser; Ctrl-C ends it.", flush=True)

    server.serve(job=job, folder=folder, host=host, port=port, told=told)
