"""Record a run: always as JSON lines and CSV, and on request for TensorBoard and other tools."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from meshwright.errors import BadInput, OutputError, named, one_line
from meshwright.runtime.sinks import CsvFile, Sink

RECORDS, EVALUATIONS, EVENTS = "records.jsonl", "evaluations.jsonl", "events.jsonl"


def prepare_output(folder: Path, *, resume: bool = False) -> None:
    """Check that a run's folder can be written and, without `resume`, holds no run yet. Leaves nothing behind."""
    try:
        if not resume and any((folder / name).exists() for name in (RECORDS, "checkpoints")):
            raise OutputError(
                f"{named(folder)} already holds a run; continue it with --resume or choose another --out."
            )
        missing = [path for path in (folder, *folder.parents) if not path.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".writable"
        probe.touch()
        probe.unlink()
        for path in missing:
            path.rmdir()
    except OSError as error:
        raise OutputError(f"The output folder {named(folder)} cannot be written: {error.strerror}.") from error


class RunRecorder:
    """Writes a record per step and per evaluation. Only rank 0 passes a folder; without one, nothing is written."""

    def __init__(
        self, folder: Path | None, *, tensorboard: bool = False, after: int = 0, services: Sequence[Sink] = ()
    ) -> None:
        """A run resumed `after` a step repeats later steps, so their old records are dropped."""
        self._file = None
        self._folder = folder
        self._evaluations: Any = None
        self._board: Any = None
        self._sinks: list[Sink] = []
        self._services = services
        self._warned = False
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            _keep_until(folder / RECORDS, after)
            if (folder / EVALUATIONS).exists():
                _keep_until(folder / EVALUATIONS, after)
            self._file = (folder / RECORDS).open("a", buffering=1)
            self._sinks.append(CsvFile(folder, after=after))
            self._board = _tensorboard(folder) if tensorboard else None

    def write(self, record: Mapping[str, Any]) -> None:
        """Write the record of a step."""
        self._write_line(self._file, record)
        self._plot(record)
        for sink in self._sinks:
            self._try(partial(sink.write, record))

    def write_evaluation(self, record: Mapping[str, Any]) -> None:
        """Write the record of an evaluation; plots get its values under `eval/`."""
        if self._folder is not None and self._evaluations is None:
            self._try(self._open_evaluations)
        self._write_line(self._evaluations, record)
        measured = {f"eval/{key}": value for key, value in record.items() if key not in ("step", "epoch", "final")}
        self._plot({"step": record["step"], **measured})

    def _open_evaluations(self) -> None:
        assert self._folder is not None
        self._evaluations = (self._folder / EVALUATIONS).open("a", buffering=1)

    def _write_line(self, file: Any, record: Mapping[str, Any]) -> None:
        if file is not None:
            try:
                file.write(json.dumps({key: _json(value) for key, value in record.items()}) + "\n")
            except OSError as error:  # a full disk must not end the training
                self._warn(error)

    def _plot(self, record: Mapping[str, Any]) -> None:
        """Send numbers to TensorBoard and to other tools."""
        if self._board is not None:
            for key, value in record.items():
                if key != "step" and isinstance(value, int | float):
                    self._board.add_scalar(key, value, record["step"])
        for service in self._services:
            self._try(partial(service.write, record))

    def close(self) -> None:
        for one in (*self._sinks, *self._services):
            self._try(one.close)
        for sink in (self._file, self._evaluations, self._board):
            if sink is not None:
                try:
                    sink.close()
                except OSError as error:
                    self._warn(error)

    def _try(self, write: Callable[[], None]) -> None:
        """Call a client of another tool. Whatever it raises is a warning, so that training goes on."""
        try:
            write()
        except Exception as error:
            self._warn(error)

    def _warn(self, error: Exception) -> None:
        if not self._warned:
            reason = error.strerror if isinstance(error, OSError) and error.strerror else one_line(error).rstrip(".")
            print(f"warning: records cannot be written: {reason}.", file=sys.stderr)
        self._warned = True

    def __enter__(self) -> RunRecorder:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def write_event(folder: Path, event: str, **values: Any) -> None:
    """Append one event: the run was resumed, saved, could not be saved, or got a signal to stop."""
    at = datetime.now(UTC).isoformat(timespec="milliseconds")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / EVENTS).open("a") as file:
            file.write(json.dumps({"at": at, "event": event, **values}) + "\n")
    except OSError as error:  # a full disk must not end the run that reports it
        print(f"warning: {folder / EVENTS} cannot be written: {error.strerror}.", file=sys.stderr)


def _keep_until(path: Path, step: int) -> None:
    """Drop records of later steps, and an unfinished last line of a killed run.

    The extra evaluation at a run's end goes as well: the run goes on, and would not have made it.
    """
    kept = []
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if record.get("step", 0) <= step and not record.get("final"):
            kept.append(line + "\n")
    part = path.with_suffix(".part")
    part.write_text("".join(kept))
    part.replace(path)


def _json(value: Any) -> Any:
    """Null for infinity and NaN, which JSON does not have: the norm of a step in which fp16 overflowed."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def require_tensorboard() -> None:
    """Refuse --tensorboard without its package, before the run starts."""
    try:
        import torch.utils.tensorboard  # noqa: F401  # only to check that it is installed
    except ImportError as error:
        raise BadInput("--tensorboard needs the package: pip install 'meshwright[tensorboard]'.") from error


def _tensorboard(folder: Path) -> Any:
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(folder / "tensorboard"))
