"""Export a strategy to another framework or launcher."""

from __future__ import annotations

from collections.abc import Callable

from meshwright.exchange.accelerate import write_accelerate
from meshwright.exchange.deepspeed import write_deepspeed
from meshwright.exchange.errors import ExchangeError
from meshwright.exchange.export_request import Exported, ExportRequest
from meshwright.exchange.launchers import write_kubernetes, write_slurm
from meshwright.exchange.torchtitan import write_torchtitan
from meshwright.facts.grammar import nearest

TARGETS: dict[str, Callable[[ExportRequest], Exported]] = {
    "accelerate": write_accelerate,
    "deepspeed": write_deepspeed,
    "torchtitan": write_torchtitan,
    "slurm": write_slurm,
    "kubernetes": write_kubernetes,
}


def export(request: ExportRequest, to: str) -> Exported:
    """Write the request as a config of another framework, or as a launch file."""
    if to not in TARGETS:
        near = nearest(to, TARGETS)
        hint = f"; did you mean {near}?" if near else "."
        raise ExchangeError(f"--to {to!r} is unknown{hint} Known: {', '.join(TARGETS)}.")
    return TARGETS[to](request)
