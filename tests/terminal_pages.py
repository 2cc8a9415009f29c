"""Pages as a terminal of a given width shows them, and pieces of strategies that were broken there."""

from __future__ import annotations

import io
import re
from typing import Any

from rich.console import Console, RenderableType

FIRST = "zero2=8,bf16,ac=selective,mb=1"
LONG = "zero1=16,tp=4,pp=2:interleaved,bf16:autocast,ac=selective,offload=optimizer,mb=2,sync=last,loss=pieced"
TERMS = set(f"{FIRST},{LONG}".split(","))


def shown(page: RenderableType, width: int) -> list[str]:
    console = Console(width=width, file=io.StringIO(), record=True)
    console.print(page)
    return console.export_text().splitlines()


def plan(strategy: str, *why: str) -> dict[str, Any]:
    return {
        **{"strategy": strategy, "fits": True, "peak_gib": 66.8, "reserved_gib": 70.0, "step_ms": 64330.0},
        **{"memory": {"parameters": 14.96, "gradients": 3.74}, "time": {"compute": 60e3, "bubble": 4330.0}},
        **{"samples_per_s": 1.0, "tokens_per_s_per_device": 8150.0, "mfu": 0.43, "grade": "trace", "why": list(why)},
        **{"error_bar": {"memory": 0.1, "time": 0.2}, "stages": [], "host_gib": 0.0, "saving_gib": 0.0},
    }


def ranking() -> dict[str, Any]:
    reasons = [{"strategy": LONG, "reason": f"refused by rule {number}"} for number in range(9)]
    return {
        **{"job": "job.py", "cluster": "8xH100-80GB", "candidates": 5013, "seconds": 1.0, "advice": [f"Try {LONG}."]},
        "plans": [plan(FIRST, f"As fast, but more complex: {LONG}."), *[plan(LONG, "would cost 3%.")] * 5],
        **{"refused": reasons, "against": None, "findings": []},
    }


def broken_terms(lines: list[str]) -> set[str]:
    """Pieces of strategies that are not whole terms."""
    words = re.findall(r"[\w=:]+(?:,[\w=:]*)*", " ".join(lines))
    pieces = {piece.rstrip(":") for word in words for piece in word.split(",")}
    return {piece for piece in pieces if re.search("[=:]", piece)} - TERMS
