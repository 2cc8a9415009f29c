"""The file of results of `gpu_speed.py`, and the check that all ways of a row train the same."""

from __future__ import annotations

import json
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

AGREEMENT = {"bf16": 0.02, "fp8": 0.1, "torchtitan": 0.1}
"""How far losses of the first steps may be from the hand-written model's. They begin at about 12.

torchtitan's rotary positions turn other elements. With 64 ranks a rank holds half a head, so reordering its rows does
not make it the same model; with 8 ranks (`--tiny`) it does, and there it must agree as closely as all others.
"""


def bound_for(way: str, ranks: int) -> float:
    if way == "torchtitan" and ranks > 8:
        return AGREEMENT["torchtitan"]
    return AGREEMENT["fp8" if "fp8" in way else "bf16"]


class Results:
    """The file of results. New results replace those of the same row and way; others stay."""

    def __init__(self, path: Path | None, kind: str) -> None:
        self.path, self.run = path, time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime())
        known = json.loads(path.read_text()) if path and path.exists() else {}
        self.document: dict[str, Any] = {
            "device": torch.cuda.get_device_name() if kind == "cuda" else kind,
            "versions": {name: installed(name) for name in ("torch", "accelerate", "lightning")},
            "agreement": AGREEMENT,
            "rates": known.get("rates", {}),
            "results": [each for each in known.get("results", []) if "row" in each],
        }

    def add(self, row: str, way: str, found: dict[str, Any]) -> None:
        others = [each for each in self.document["results"] if (each["row"], each["way"]) != (row, way)]
        self.document["results"] = [*others, {"row": row, "way": way, "run": self.run, **found}]
        self.write()

    def add_rates(self, found: dict[str, Any]) -> None:
        if "error" not in found:
            self.document["rates"] |= found
            self.write()

    def write(self) -> None:
        if self.path:
            self.path.write_text(json.dumps(self.document, indent=1) + "\n")

    def judge(self, names: list[str]) -> list[str]:
        """Note how far losses are from the hand-written model's; those that do not train alike."""
        apart = []
        for each in self.document["results"]:
            if each["row"] not in names or "losses" not in each:
                continue
            reference = self._reference(each["row"])
            if reference is None:
                apart.append(f"{each['row']}, {each['way']}: no hand-written model to compare its losses with")
                continue
            differences = [abs(a - b) for a, b in zip(each["losses"], reference["losses"], strict=True)]
            each["loss_apart"] = max(differences)
            bound = bound_for(each["way"], each["ranks"])
            if not all(difference <= bound for difference in differences):  # max() overlooks NaN
                apart.append(f"{each['row']}, {each['way']}: {each['losses']} where {reference['losses']} was expected")
        self.write()
        return apart

    def _reference(self, row: str) -> dict[str, Any] | None:
        found = (r for r in self.document["results"] if r["row"] == row and r["way"].startswith("hand-written"))
        return next((each for each in found if "losses" in each), None)


def installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
