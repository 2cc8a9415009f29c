"""Call stacks of ranks: what they say about where a rank is, and whether it waits for its peers. Imports no torch."""

from __future__ import annotations

import re
import sys
import sysconfig
import traceback
from dataclasses import dataclass
from pathlib import Path

_FRAME = re.compile(r'\s*File "(?P<file>.+)", line (?P<line>\d+) in (?P<name>.+)')
_WAITING = ("torch/distributed/", "torch/autograd/graph.py", "meshwright/assemble/world.py", "torch/_C/_distributed")
_COLLECTIVES = "torch/distributed/distributed_c10d.py"
_LOADING = "torch/utils/data/dataloader.py"
_QUEUES = "multiprocessing/queues.py"
_LIBRARIES = tuple(
    {str(Path(sysconfig.get_path(name))) for name in ("stdlib", "purelib", "platlib")}
    | {str(Path(__file__).parents[1])}
)
_INNERMOST = 6
"""Frames in which a rank that waits has a call of torch's."""


@dataclass(frozen=True, kw_only=True)
class CallStack:
    """Call stack of a rank's main thread, innermost frame first; empty if the rank did not answer."""

    text: str
    frames: tuple[tuple[str, int, str], ...]

    @property
    def waits(self) -> bool:
        """Whether the rank waits for its peers."""
        return waits_for_peers([file for file, _, _ in self.frames[:_INNERMOST]])

    @property
    def loads(self) -> bool:
        """Whether the rank waits for its data-loading processes."""
        return any(_LOADING in file for file, _, _ in self.frames)

    @property
    def collective(self) -> str:
        """The name of the collective that the rank is in; empty if the stack does not show one."""
        names = [name for file, _, name in self.frames if _COLLECTIVES in file and name != "wrapper"]
        return names[-1] if names else ""

    @property
    def line(self) -> str:
        """The innermost line of the user's code; without one, the innermost of all."""
        own = [frame for frame in self.frames if not frame[0].startswith((*_LIBRARIES, "<"))]
        if not self.frames:
            return ""
        file, line, name = (own or list(self.frames))[0]
        return f"{Path(file).name}:{line}, in {name}"

    @property
    def place(self) -> str:
        if not self.frames:
            return "it does not answer, so it may be stopped, or stuck in the system"
        loading = "it waits for a data-loading process; " if self.loads else ""
        return f"{loading}it stands at {self.line}"


def waits_for_peers(files: list[str]) -> bool:
    """Whether the files of the innermost frames are those of a rank that waits for its peers."""
    return any(part in file for file in files for part in _WAITING)


def waits_for_loaders(files: list[str]) -> bool:
    """The same of a rank that waits for its data-loading processes."""
    return any(_QUEUES in file for file in files)


def read_stack(text: str, thread: int | None = None) -> CallStack:
    """One thread's last stack in the output of `faulthandler`; without a thread, the one that ran Python code."""
    parts = re.split(r"(?m)^(?=(?:Current thread|Thread) 0x)", text)
    mark = "Current thread" if thread is None else f"0x{thread:016x}"
    own = [part for part in parts if mark in part.partition("\n")[0]]
    part = own[-1].rstrip() if own else ""
    frames = tuple((found["file"], int(found["line"]), found["name"]) for found in _FRAME.finditer(part))
    return CallStack(text=part, frames=frames)


def own_stack(thread: int) -> CallStack:
    """Call stack of a thread of this process."""
    walk = traceback.walk_stack(sys._current_frames().get(thread))  # documented for this use
    frames = [(frame.f_code.co_filename, line, frame.f_code.co_name) for frame, line in walk]
    text = "\n".join(f'  File "{file}", line {line} in {name}' for file, line, name in frames)
    return CallStack(text=text, frames=tuple(frames))
