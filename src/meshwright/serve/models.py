"""What a visitor may plan: presets, configs inside one folder, and the job named when the server started.

A visitor names models; no code that a visitor names is run. Python files are loaded only from the command line.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from meshwright.errors import BadInput, Unreadable
from meshwright.jobs.presets import PRESETS, Text, preset_job
from meshwright.reading import Limits, read_json
from meshwright.serve.errors import Forbidden

JOB = "job"
PRESET, HF = "preset:", "hf:"
LARGEST = 1 << 20
"""Largest config in bytes; real ones have a few thousand."""
LISTED, MOST_ENTRIES, DEPTH = 100, 5000, 4
"""Limits of the search for configs: results, files and folders seen, and levels of folders."""


@dataclass(frozen=True, kw_only=True)
class Model:
    """One model that may be planned."""

    text: str
    """As written on the command line."""
    source: str
    """What is loaded: a config by its resolved path, so that the file that was checked is the one that is read."""
    takes_length: bool
    """Whether `:seq=TOKENS` may follow."""
    stamp: int = 0
    """When its file was last written; a changed file is another model."""

    def at(self, length: int | None) -> tuple[str, str]:
        """Text and source for samples of `length` tokens."""
        if length is None:
            return self.text, self.source
        if not self.takes_length:
            raise BadInput(f"seq={length} does not apply to {self.text}, which defines its own samples; leave it out.")
        if self.text.startswith(PRESET):
            preset_job(f"{self.text.removeprefix(PRESET)}:seq={length}")  # raises if it has fewer positions
        return f"{self.text}:seq={length}", f"{self.source}:seq={length}"


@dataclass(frozen=True, kw_only=True)
class Models:
    """All models that may be planned."""

    folder: Path
    """The folder of the configs, as the user wrote it."""
    job: str = ""
    """The job on the command line, or ""."""

    def find(self, name: str) -> Model:
        """The model for a visitor's text: `preset:NAME`, `hf:PATH` inside the folder, or `job`."""
        if name.startswith(PRESET):
            return self._preset(name)
        if name.startswith(HF):
            return self._config(name.removeprefix(HF))
        if name == JOB and self.job:
            return Model(text=self.job, source=self.job, takes_length=False, stamp=_stamp(self.job.partition(":")[0]))
        known = f", or {JOB!r} for {self.job}" if self.job else ""
        raise BadInput(
            f"This page cannot plan the model {name!r}: write preset:NAME, or hf:PATH of a config inside "
            f"the served folder{known}. A Python file must be named when the server starts."
        )

    def configs(self) -> list[str]:
        """Paths of Hugging Face configs inside the folder, up to a limit."""
        found = (path for path in _config_files(self.folder) if not (self.folder / path).is_symlink())
        return sorted(path for path in found if _read_config(self.folder / path) is not None)[:LISTED]

    def _preset(self, name: str) -> Model:
        if ":" in name.removeprefix(PRESET):
            raise BadInput(f"The model {name!r} has options; give them as `seq` and `batch` of the request.")
        preset_job(name.removeprefix(PRESET))
        return Model(text=name, source=name, takes_length=isinstance(PRESETS[name.removeprefix(PRESET)], Text))

    def _config(self, name: str) -> Model:
        path = self._inside(name)
        if path.suffix != ".json" or ":" in name:
            raise BadInput(f"hf:{name} is not a config: name a .json file; options go into `seq` and `batch`.")
        config = _read_config(path)
        if config is None:
            raise BadInput(
                f"hf:{name} is not a Hugging Face config: it must be a JSON object with a `model_type`, "
                f"of at most {LARGEST} bytes."
            )
        if "auto_map" in config:
            raise Forbidden(f"hf:{name} names its own Python code (`auto_map`), which is not run for visitors.")
        return Model(text=f"{HF}{self.folder / name}", source=f"{HF}{path}", takes_length=True, stamp=_stamp(path))

    def _inside(self, name: str) -> Path:
        """The resolved file; an error if it is outside the folder, whether or not it exists."""
        if not name or PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts or "\\" in name:
            raise Forbidden(f"hf:{name} is not inside the served folder; give a path below it, without '..'.")
        try:
            path = (self.folder / name).resolve()
            if not path.is_relative_to(self.folder.resolve()):
                raise Forbidden(f"hf:{name} links out of the served folder; give a file inside it.")
            if path.is_file():
                return path
        except (OSError, ValueError, RuntimeError):  # not a path: a null byte, a name too long, a loop of links
            pass
        raise BadInput(f"There is no config {name!r} in the served folder; give the path of a config.json inside it.")


def _stamp(path: str | Path) -> int:
    try:
        return Path(path).stat().st_mtime_ns
    except OSError:
        return 0


def _config_files(folder: Path) -> Iterator[str]:
    """Files named config.json up to a depth, without following symbolic links."""
    seen = 0
    for place, folders, files in os.walk(folder):
        inside = Path(place).relative_to(folder)
        folders[:] = sorted(name for name in folders if not name.startswith(".")) if len(inside.parts) < DEPTH else []
        seen += len(files) + len(folders)
        if seen > MOST_ENTRIES:
            return
        if "config.json" in files:
            yield str(inside / "config.json")


def _read_config(path: Path) -> dict[str, Any] | None:
    """A config with a model type; None if the file is anything else."""
    try:
        value = read_json(path, Limits(bytes=LARGEST, finite=False))
    except Unreadable:
        return None
    return value if isinstance(value, dict) and isinstance(value.get("model_type"), str) else None
