"""Every error that Meshwright raises on purpose.

        MeshwrightError
        ├── BadInput                 the request cannot be met as written; exit 2, one sentence
        │   ├── StrategyError        the strategy's text is wrong
        │   │   ├── UnknownTerm          a term that is not in the grammar
        │   │   ├── ContradictoryTerms   terms that exclude each other
        │   │   └── NotBuiltYet          a valid term that no engine can run yet
        │   ├── Refused              a valid strategy that this job or these ranks cannot run
        │   ├── ClusterError         the cluster's text or file is wrong
        │   ├── JobError             the job's file, model, sample or loss is wrong
        │   ├── ExchangeError        another framework's config cannot be read or written
        │   ├── OutputError          a folder cannot be written
        │   ├── Unreadable           an input file is not a regular file, too large, or malformed
        │   ├── CheckpointError      a checkpoint is missing, or cannot be written or loaded
        │   │   ├── DamagedCheckpoint    its files differ from what was written
        │   │   └── WrongCheckpoint      an intact checkpoint of another model or optimizer
        │   ├── OutOfMemory          a rank ran out of memory; the same run would again
        │   └── NonFiniteLoss        the loss or a gradient became infinite or NaN
        ├── RankFailed               a rank ended with a traceback or a signal; exit 1
        └── NodesMissing             too few nodes of a run are there; exit 1

Each message says what was asked, what was found and what to do.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


class MeshwrightError(Exception):
    """The base class of every error that Meshwright raises on purpose."""

    exit_code = 1


class BadInput(MeshwrightError):
    """The user can fix this by changing the request."""

    exit_code = 2


class StrategyError(BadInput):
    """The strategy's text cannot be understood or cannot be run."""


class UnknownTerm(StrategyError):
    """Wrong: `Strategy.parse("fsdpp")`. Right: `Strategy.parse("fsdp")`."""


class ContradictoryTerms(StrategyError):
    """Wrong: `Strategy.parse("ddp,fsdp")`. Right: `Strategy.parse("fsdp")`."""


class NotBuiltYet(StrategyError):
    """The term is part of the grammar, but no engine can run it yet."""


class Refused(BadInput):
    """A valid strategy that this job, these ranks or this device cannot run."""


class ClusterError(BadInput):
    """Wrong: `Cluster.parse("8*A100")`. Right: `Cluster.parse("8xA100-40GB")`."""


class JobError(BadInput):
    """The job's file, model, sample, inputs, loss or optimizer does not work.

    `kind` is a word for the mistake, and `name` the parameter or module that it is about, if they are known.
    """

    def __init__(self, message: str, *, kind: str = "job", name: str = "") -> None:
        super().__init__(message)
        self.kind, self.name = kind, name


class ExchangeError(BadInput):
    """A config that cannot be read, contradicts itself, or cannot express the strategy."""


class OutputError(BadInput):
    """A requested folder or file cannot be written."""


class Unreadable(BadInput):
    """An input file cannot be read. `why` is the bare reason, for errors that add to it."""

    def __init__(self, path: object, why: str, *, missing: bool = False) -> None:
        super().__init__(f"{path} cannot be read: {why}.")
        self.why, self.missing = why, missing


class CheckpointError(BadInput):
    """A checkpoint is missing, or cannot be written or loaded."""


class DamagedCheckpoint(CheckpointError):
    """Files of a checkpoint are missing, unknown or changed; the message names the file and the parameter."""


class WrongCheckpoint(CheckpointError):
    """An intact checkpoint that does not fit the job: another model or another optimizer."""


class OutOfMemory(BadInput):
    """A rank ran out of memory. `details` is its `MemoryReport` as JSON, empty if the rank could not write one."""

    def __init__(self, message: str, details: Mapping[str, Any] | None = None) -> None:
        super().__init__(message)
        self.details = dict(details or {})


class NonFiniteLoss(BadInput):
    """The loss or a gradient became infinite or NaN; the message names the step, the rank and the first module."""


class RankFailed(MeshwrightError):
    """A rank ended early or hung. `traceback` is that rank's own, empty if a signal ended it.

    `signal` names the signal that ended it; `ended_with` is the exit code of a rank that left no message.
    """

    def __init__(
        self, message: str, *, rank: int, traceback: str = "", signal: str | None = None, ended_with: int | None = None
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.traceback = traceback
        self.signal, self.ended_with = signal, ended_with


class NodesMissing(MeshwrightError):
    """Nodes of a run did not come, or did not come back, within the time to wait for them."""


def named(path: Path) -> str:
    """A path as part of our sentence: relative if it is inside the working folder."""
    return os.path.relpath(path) if path.is_absolute() and path.is_relative_to(Path.cwd()) else str(path)


def either(words: Sequence[str]) -> str:
    """Alternatives as part of our sentence: `a`, `a or b`, `a, b or c`."""
    return " or ".join(filter(None, [", ".join(words[:-1]), words[-1]]))


def one_line(error: BaseException) -> str:
    """Another library's error as part of our sentence: its class and first line, ending in one full stop."""
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}{': ' * bool(first)}{first}".rstrip(".") + "."
