"""Every error that Meshwright raises on purpose.

    MeshwrightError
    ├── BadInput                 what was asked cannot be; exit 2, one sentence
    │   ├── StrategyError        the strategy's text is wrong
    │   │   ├── UnknownTerm          a term that is not in the grammar
    │   │   ├── ContradictoryTerms   terms that exclude each other
    │   │   └── NotBuiltYet          a term that parses, and whose engine is not there yet
    │   ├── Refused              a sound strategy that this job or these ranks cannot take
    │   ├── ClusterError         the cluster's text or file is wrong
    │   ├── JobError             the job's file, model, sample or loss is wrong
    │   ├── OutputError          a folder cannot be written
    │   ├── Unreadable           a file of somebody else's is no plain file, too large, or not what it should be
    │   ├── CheckpointError      a checkpoint is not there, or cannot be made or taken
    │   │   ├── DamagedCheckpoint    its files are not what was written
    │   │   └── WrongCheckpoint      a sound one of another model or optimizer
    │   └── NonFiniteLoss        the loss stopped being a number
    └── RankFailed               a rank ended with a traceback or a signal; exit 1

Each message says what was asked, what was found and what to do.
"""

from __future__ import annotations

import os
from pathlib import Path


class MeshwrightError(Exception):
    """The root: catching it catches everything that Meshwright raises on purpose."""

    exit_code = 1


class BadInput(MeshwrightError):
    """The user can mend this by changing what was asked."""

    exit_code = 2


class StrategyError(BadInput):
    """The strategy's text cannot be understood or cannot be run."""


class UnknownTerm(StrategyError):
    """Wrong: `Strategy.parse("fsdpp")`. Right: `Strategy.parse("fsdp")`."""


class ContradictoryTerms(StrategyError):
    """Wrong: `Strategy.parse("ddp,fsdp")`. Right: `Strategy.parse("fsdp")`."""


class NotBuiltYet(StrategyError):
    """The term is part of the grammar, but no engine here runs it."""


class Refused(BadInput):
    """A sound strategy that this job, these ranks or this device cannot take."""


class ClusterError(BadInput):
    """Wrong: `Cluster.parse("8*A100")`. Right: `Cluster.parse("8xA100-40GB")`."""


class JobError(BadInput):
    """The job's file, model, sample, inputs, loss or optimizer does not work."""


class OutputError(BadInput):
    """A folder or file that was asked for cannot be written."""


class Unreadable(BadInput):
    """A file that was given cannot be read. `why` is the reason alone, for an error that says more."""

    def __init__(self, path: object, why: str, *, missing: bool = False) -> None:
        super().__init__(f"{path} cannot be read: {why}.")
        self.why, self.missing = why, missing


class CheckpointError(BadInput):
    """A checkpoint is not there, or cannot be made or taken."""


class DamagedCheckpoint(CheckpointError):
    """Files of a checkpoint are missing, foreign or not what was written; the message names file and parameter."""


class WrongCheckpoint(CheckpointError):
    """A sound checkpoint that does not fit the job: another model, another optimizer."""


class NonFiniteLoss(BadInput):
    """The loss became infinite or not a number; the message names step and rank."""


class RankFailed(MeshwrightError):
    """A rank ended early, or hung. `traceback` is that rank's own, empty where a signal ended it.

    `signal` names the one that ended it, and `ended_with` is the exit code of a rank that left without a word.
    """

    def __init__(
        self, message: str, *, rank: int, traceback: str = "", signal: str | None = None, ended_with: int | None = None
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.traceback = traceback
        self.signal, self.ended_with = signal, ended_with


def named(path: Path) -> str:
    """A path as a user would write it: relative where it lies below the working folder."""
    return os.path.relpath(path) if path.is_absolute() and path.is_relative_to(Path.cwd()) else str(path)


def one_line(error: BaseException) -> str:
    """Somebody else's error as part of our sentence: its kind and first line, closed by one full stop."""
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}{': ' * bool(first)}{first}".rstrip(".") + "."
