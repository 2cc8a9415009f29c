"""Adopt a training script: what is wrong with it, and a job to start from."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from meshwright.adopt.finding import Finding
from meshwright.adopt.findings import find
from meshwright.adopt.kind import kind_of
from meshwright.adopt.script import Script
from meshwright.adopt.write import WrittenJob, write_job
from meshwright.errors import BadInput


@dataclass(frozen=True, kw_only=True)
class Adoption:
    """What is known about a script."""

    script: str
    kind: str
    """What it trains with."""
    job: WrittenJob
    findings: list[Finding] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return {
            "script": self.script,
            "kind": self.kind,
            "strategy": self.job.strategy,
            "global_batch": self.job.global_batch,
            "findings": [one.to_json() for one in self.findings],
            "todo": self.job.todo,
            "notes": list(dict.fromkeys(self.job.notes)),
            "job": self.job.text,
        }


def adopt(path: Path, name: str = "job.py") -> Adoption:
    """Read a script; `name` is what the job file will be called. Raises `BadInput` if it trains nothing."""
    return adopt_script(Script.read(path), name)


def adopt_script(script: Script, name: str = "job.py") -> Adoption:
    kind = kind_of(script)
    if not kind.trains:
        raise BadInput(
            f"{script.path} is no training script: it calls neither backward() nor another library's Trainer. "
            "Give the file that holds the training loop."
        )
    try:
        job, findings = write_job(script, kind, name), find(script, kind)
    except RecursionError:
        raise BadInput(f"{script.path} nests too deeply to be read; give one training script.") from None
    return Adoption(script=str(script.path), kind=str(kind), job=job, findings=findings)
