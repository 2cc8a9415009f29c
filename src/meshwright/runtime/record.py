"""Keep what happened in a run: JSON lines always, TensorBoard where it is asked for."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from meshwright.errors import BadInput, OutputError

RECORDS = "records.jsonl"


def prepare_output(folder: Path) -> None:
    """See that a run's folder can be written and holds no run yet. Nothing is left behind: the run makes it."""
    try:
        if (folder / RECORDS).exists():
            raise OutputError(f"{folder} already holds the records of a run; choose another folder for --out.")
        missing = [path for path in (folder, *folder.parents) if not path.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".writable"
        probe.touch()
        probe.unlink()
        for path in missing:
            path.rmdir()
    except OSError as error:
        raise OutputError(f"The output folder {folder} cannot be written: {error.strerror}.") from error


class Recorder:
    """Writes one record a step. Only rank 0 has one with a folder; the others' writes go nowhere."""

    def __init__(self, folder: Path | None, *, tensorboard: bool = False) -> None:
        self._file = None
        self._board: Any = None
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = (folder / RECORDS).open("w", buffering=1)
            self._board = _tensorboard(folder) if tensorboard else None

    def write(self, record: Mapping[str, Any]) -> None:
        if self._file is not None:
            self._file.write(json.dumps({key: _json(value) for key, value in record.items()}) + "\n")
        if self._board is not None:
            for key, value in record.items():
                if key != "step" and isinstance(value, int | float):
                    self._board.add_scalar(key, value, record["step"])

    def close(self) -> None:
        for sink in (self._file, self._board):
            if sink is not None:
                sink.close()

    def __enter__(self) -> Recorder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _json(value: Any) -> Any:
    """JSON knows no infinity: the norm of a step that fp16 overflowed in is null."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def require_tensorboard() -> None:
    """Before a run starts, not after its first step."""
    try:
        import torch.utils.tensorboard  # noqa: F401  # only to see that it is there
    except ImportError as error:
        raise BadInput("--tensorboard needs the package: pip install 'meshwright[tensorboard]'.") from error


def _tensorboard(folder: Path) -> Any:
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(folder / "tensorboard"))
