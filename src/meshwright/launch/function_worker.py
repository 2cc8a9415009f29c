"""Worker of ranks that run a user's function: each rank leaves its result in a file."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.environment import own_rank
from meshwright.launch.attempt import own_task


@dataclass(frozen=True, kw_only=True)
class FunctionTask:
    call: bytes
    """The function and its arguments, pickled."""
    folder: Path
    """Where results are left."""

    def result(self, rank: int) -> Path:
        return self.folder / f"result-{rank}"


def main() -> None:
    task: FunctionTask = own_task()
    function, positional, named = pickle.loads(task.call)
    result: Any = function(*positional, **named)
    task.result(own_rank()).write_bytes(pickle.dumps(result))
