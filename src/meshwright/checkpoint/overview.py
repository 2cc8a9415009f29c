"""Show and check a checkpoint: its content, its integrity, and whether it fits a job."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any

from meshwright.checkpoint.folder import find_checkpoint, reading
from meshwright.checkpoint.integrity import Damage, inspect, raise_damage
from meshwright.checkpoint.job_match import match_names
from meshwright.checkpoint.json_state import decode
from meshwright.checkpoint.manifest import (
    DIGESTS,
    EMA,
    MANIFEST,
    MODEL,
    OPTIMIZER,
    RNG,
    Manifest,
    RunState,
    read_manifest,
)
from meshwright.checkpoint.name_matching import ExpectedState, expected_by
from meshwright.checkpoint.progress import Progress, silent
from meshwright.errors import DamagedCheckpoint, WrongCheckpoint


@dataclass(frozen=True)
class CheckResult:
    path: Path
    damage: tuple[Damage, ...]
    fits: bool | None = None
    """Whether it fits the job; None if no job was given, or too little of the checkpoint is readable."""
    misfit: str = ""

    def to_json(self) -> dict[str, Any]:
        damage = [asdict(one) for one in self.damage]
        intact = {"path": str(self.path), "sound": not self.damage, "damage": damage}
        return intact | {"fits": self.fits, "misfit": self.misfit or None}

    def raise_problem(self) -> None:
        """Raise DamagedCheckpoint or WrongCheckpoint if there is a problem."""
        raise_damage(self.path, list(self.damage))
        if self.misfit:
            raise WrongCheckpoint(self.misfit)


def check(path: Path, job: str | None = None, progress: Progress = silent) -> CheckResult:
    """Read every byte of a checkpoint; with a job, compare names and shapes, too."""
    expected = expected_by(job) if job is not None else None
    with reading(path):
        if (path / DIGESTS).is_file() and not (path / MANIFEST).exists():
            return CheckResult(path, (Damage(MANIFEST, "is missing"),))
        folder = find_checkpoint(path)
        try:
            manifest = read_manifest(folder)
        except DamagedCheckpoint as error:
            return CheckResult(folder, (_damage_of_manifest(folder, str(error)),))
        misfit = _misfit(expected, manifest) if expected is not None else ""
        damage = inspect(folder, manifest, progress)
    return CheckResult(folder, tuple(damage), None if expected is None else not misfit, misfit)


def show(path: Path, *, tensors: bool = False) -> dict[str, Any]:
    """What a checkpoint holds, from its manifest alone; with `tensors`, list each tensor."""
    with reading(path):
        folder = find_checkpoint(path)
        manifest = read_manifest(folder)
    run_state = manifest.run_state
    document = {
        **{"path": str(folder), "step": run_state.step, "samples": run_state.samples, "seed": run_state.seed},
        **{"strategy": run_state.strategy, "ranks": run_state.ranks, "made": dict(run_state.made)},
        **_count(manifest),
        "bytes": {kind: _bytes(manifest, prefix) for kind, prefix in _KINDS.items()} | {"total": manifest.bytes},
        "files": [{"name": name, "bytes": file.bytes} for name, file in sorted(manifest.files.items())],
        "optimizer": _optimizer(run_state),
        "schedule": run_state.schedule["class"] if run_state.schedule else None,
        "ema": dict(run_state.ema) if run_state.ema else None,
        "frozen_left_out": len(run_state.frozen) if run_state.frozen is not None else None,
        "loss_scale": dict(run_state.loss_scale) if run_state.loss_scale else None,
        "tied": dict(run_state.tied),
        "hugging_face": _hugging_face(run_state.hugging_face),
    }
    return document | ({"tensors": _tensors(manifest)} if tensors else {})


_KINDS = {"model": MODEL, "optimizer": OPTIMIZER, "ema": EMA, "rng": RNG}


def _damage_of_manifest(folder: Path, message: str) -> Damage:
    """Split the message about a refused manifest into file and problem."""
    file = DIGESTS if message.startswith(str(folder / DIGESTS)) else MANIFEST
    return Damage(file, message.removeprefix(f"{folder / file} ").removesuffix("."))


def _misfit(expected: ExpectedState, manifest: Manifest) -> str:
    shapes = {p.name: p.shape for p in expected.facts.parameters} | expected.buffers
    try:
        match_names({MODEL + name: shape for name, shape in shapes.items()}, manifest)
    except WrongCheckpoint as error:
        return str(error)
    return ""


def _count(manifest: Manifest) -> dict[str, int | None]:
    """Elements of parameters and persistent buffers, which a checkpoint does not distinguish, and of trained ones."""
    model = {key.removeprefix(MODEL): entry for key, entry in manifest.tensors.items() if key.startswith(MODEL)}
    elements = {name: prod(entry.shape) for name, entry in model.items()}
    groups = manifest.run_state.optimizer["groups"] if manifest.run_state.optimizer else None
    trained = None if groups is None else sum(elements.get(name, 0) for group in groups for name in group["names"])
    return {"parameters": sum(elements.values()), "trained": trained}


def _bytes(manifest: Manifest, prefix: str) -> int:
    return sum(entry.bytes for key, entry in manifest.tensors.items() if key.startswith(prefix))


def _optimizer(run_state: RunState) -> dict[str, Any] | None:
    if run_state.optimizer is None:
        return None
    groups = [
        {"parameters": len(group["names"]), "lr": _number(decode(group["values"]).get("lr"))}
        for group in run_state.optimizer["groups"]
    ]
    return {"class": run_state.optimizer["class"], "groups": groups}


def _number(value: Any) -> float | None:
    """The learning rate as a float; it may be a tensor."""
    return None if value is None else float(value)


def _hugging_face(found: Mapping[str, Any] | None) -> dict[str, Any] | None:
    if found is None:
        return None
    config, named = found["config"], found["config"].get("architectures")
    architecture = str(named[0]) if isinstance(named, list) and named else None
    return {"architecture": architecture, "model_type": config.get("model_type"), "prefix": found["prefix"]}


def _tensors(manifest: Manifest) -> list[dict[str, Any]]:
    return [
        {"name": name, "dtype": entry.dtype, "shape": list(entry.shape), "chunks": len(entry.chunks)}
        for name, entry in manifest.tensors.items()
    ]
