"""Launches the toy worker on one of several hosts, and prints the outcome as JSON: python node_launcher.py OPTIONS."""

from __future__ import annotations

import json
import sys
from typing import Any

from meshwright.errors import MeshwrightError
from meshwright.launch.launch import launch
from meshwright.launch.node_options import node_options


def main(does: str, nodes: str, rank: str, restarts: str, patience: str) -> None:
    results: list[Any] = []
    options = node_options(nodes, int(rank), "host0:29500", interface=None, wait=40.0)
    try:
        launch(
            {"does": does},
            2,
            results=results,
            max_restarts=int(restarts),
            grace=30.0,
            worker="toy_worker",
            patience=float(patience),
            nodes=options,
        )
        print(json.dumps({"results": results}))
    except MeshwrightError as error:
        print(json.dumps({"results": results, "error": type(error).__name__, "message": str(error)}))


if __name__ == "__main__":
    main(*sys.argv[1:])
