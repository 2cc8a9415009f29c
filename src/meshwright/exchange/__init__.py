"""Read and write the configs of DeepSpeed, Accelerate and torchtitan, and write launch files."""

from __future__ import annotations

from collections.abc import Callable

from meshwright.errors import ExchangeError
from meshwright.exchange.accelerate import write_accelerate
from meshwright.exchange.deepspeed import write_deepspeed
from meshwright.exchange.export_request import Exported, ExportRequest, Unsupported
from meshwright.exchange.fields import Imported
from meshwright.exchange.launchers import write_kubernetes, write_slurm
from meshwright.exchange.read import read_foreign
from meshwright.exchange.torchtitan import write_torchtitan
from meshwright.facts.grammar import nearest

__all__ = ["TARGETS", "ExchangeError", "ExportRequest", "Exported", "Imported", "Unsupported", "export", "read_foreign"]

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
