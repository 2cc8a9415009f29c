"""`meshwright serve`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from meshwright.cli.streams import result_stream

NOTES = """Listens on this machine only, makes no network requests, and runs no code that a visitor names.
Needs `pip install 'meshwright\\[serve]'`. Press Ctrl-C to stop."""


def serve(
    job: Annotated[str, typer.Argument(help="A job to offer next to presets and configs.")] = "",
    folder: Annotated[Path, typer.Option(help="Offer the Hugging Face configs in this folder.")] = Path(),
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 picks a free one.")] = 8765,
    host: Annotated[str, typer.Option(help="127.0.0.1, localhost or ::1; others are refused.")] = "127.0.0.1",
    as_json: Annotated[bool, typer.Option("--json", help="Print the address as one JSON document on stdout.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks of errors.")] = False,
) -> None:
    """Serve the planner as a local web page: change the settings, see the ranking.

    [bold]meshwright serve[/]

    [bold]meshwright serve examples/gpt.py --port 0[/]

    [bold]meshwright serve --folder models[/]
    """
    from meshwright.serve import server

    def print_address(address: str) -> None:
        document = {"url": address, "job": job, "folder": str(folder)}
        words = json.dumps(document) if as_json else f"Open {address} in a browser; press Ctrl-C to stop."
        print(words, file=result_stream(), flush=True)

    server.serve(job=job, folder=folder, host=host, port=port, on_ready=print_address)
