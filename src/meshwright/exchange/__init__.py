"""Read and write the configs of DeepSpeed, Accelerate and torchtitan, and write launch files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from meshwright.errors import ExchangeError, Unreadable
from meshwright.exchange import read_accelerate, read_deepspeed, read_torchtitan
from meshwright.exchange.accelerate import write_accelerate
from meshwright.exchange.deepspeed import write_deepspeed
from meshwright.exchange.export_request import Exported, ExportRequest, Unsupported
from meshwright.exchange.fields import Fields, Imported
from meshwright.exchange.launchers import write_kubernetes, write_slurm
from meshwright.exchange.megatron import write_megatron
from meshwright.exchange.ray import write_kuberay, write_ray
from meshwright.exchange.torchtitan import write_torchtitan
from meshwright.facts.grammar import nearest
from meshwright.reading import parse_json, parse_toml, parse_yaml, read_text
from meshwright.units import MIB

__all__ = ["TARGETS", "ExchangeError", "ExportRequest", "Exported", "Imported", "Unsupported", "export", "read_foreign"]

TARGETS: dict[str, Callable[[ExportRequest], Exported]] = {
    "accelerate": write_accelerate,
    "deepspeed": write_deepspeed,
    "torchtitan": write_torchtitan,
    "megatron": write_megatron,
    "slurm": write_slurm,
    "kubernetes": write_kubernetes,
    "ray": write_ray,
    "kuberay": write_kuberay,
}
_KNOWN = (
    "a DeepSpeed JSON (zero_optimization), an Accelerate YAML (distributed_type) or a torchtitan TOML ([parallelism])"
)


def export(request: ExportRequest, to: str) -> Exported:
    """Write the request as a config of another framework, or as a launch file."""
    if to not in TARGETS:
        near = nearest(to, TARGETS)
        hint = f"; did you mean {near}?" if near else "."
        raise ExchangeError(f"--to {to!r} is unknown{hint} Known: {', '.join(TARGETS)}.")
    return TARGETS[to](request)


def read_foreign(path: Path | str, *, ranks: int | None = None) -> Imported:
    """Read the strategy of another framework's config, which is recognised by its keys, not by its name.

    `ranks` is used if the file does not set the number of ranks.
    """
    path = Path(path)
    values = _load(path)
    fields = Fields(values, path)
    if any(sign in values for sign in read_accelerate.SIGNS):
        return read_accelerate.read_accelerate(fields, ranks=ranks)
    if any(isinstance(values.get(sign), Mapping) for sign in read_torchtitan.SIGNS):
        return read_torchtitan.read_torchtitan(fields, ranks=ranks)
    if any(sign in values for sign in read_deepspeed.SIGNS):
        return read_deepspeed.read_deepspeed(fields)
    found = ", ".join(map(str, list(values)[:4])) or "nothing"
    raise ExchangeError(f"{path} contains {found}, so it is not a config that can be read here: {_KNOWN}.")


def _load(path: Path) -> Mapping[str, Any]:
    try:
        text = read_text(path, limit=MIB)
    except Unreadable as error:
        raise ExchangeError(f"Cannot read {str(path)!r}: {error.why}. Name {_KNOWN}.") from None
    problem = ""
    # YAML last, because nearly any text is valid YAML.
    for parse in (parse_json, parse_toml, parse_yaml):
        try:
            values = parse(text)
        except ValueError as error:
            problem = f" ({error})"
            continue
        if isinstance(values, Mapping):
            return values
    raise ExchangeError(f"{path} is not a table of settings in JSON, TOML or YAML{problem}; name {_KNOWN}.")
