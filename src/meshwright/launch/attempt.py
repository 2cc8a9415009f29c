"""Files through which the launcher and its ranks exchange messages, in a folder per attempt.

    options.json                options of every rank
    task                        the pickled task of the worker
    asked                       the name of a signal that asked the run to stop
    attempt-0/                  the first start of all ranks; attempt-1 is the first restart
        pids.json               pids of all ranks, written by the launcher
        listening-RANK          pid of a rank that handles signals
        results.jsonl           results that rank 0 reports
        heartbeat-RANK          what a rank is doing, and since when
        asked                   how often ranks were asked for their last collectives
        stacks-RANK             stacks of the rank's threads, on request
        stacks-RANK-PID         stacks of a data-loading process of the rank
        collectives-RANK        the rank's last collectives, with the number of the request
        failure-RANK.json       a failed rank's error
        warnings-RANK           warnings of libraries that a rank uses
        finished-RANK           marks a rank that finished its work

Imports no torch: a rank handles signals before it has loaded torch.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import sys
import time
import traceback
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from meshwright.environment import own_folder, own_rank, restart_count
from meshwright.launch.heartbeat import Beat


@dataclass(frozen=True, kw_only=True)
class RankOptions:
    """Options of every rank, whatever its task is."""

    launcher: int
    """The pid of the launcher, with which the rank ends."""
    grace: float | None
    """Seconds to save and end after a signal; None if there is nothing to save."""
    patience: float
    """Seconds of silence after which the rank counts as failed; 0: no limit."""


@dataclass(frozen=True, kw_only=True)
class RankError:
    """A failed rank's error, as the launcher reads it."""

    rank: int
    time: float
    kind: str
    """The name of the error's class."""
    message: str
    traceback: str
    details: dict[str, Any] = field(default_factory=dict)
    """What else the error says, if it has `details`."""


@dataclass(frozen=True)
class Attempt:
    """One start of all ranks, and the files that belong to it."""

    folder: Path
    """The launcher's folder, which holds all attempts."""
    number: int

    @property
    def path(self) -> Path:
        return self.folder / f"attempt-{self.number}"

    def hand_out(self, options: RankOptions, task: Any) -> None:
        """Write options and task for the ranks of this attempt and all later ones."""
        (self.folder / "options.json").write_text(json.dumps(asdict(options)))
        (self.folder / "task").write_bytes(pickle.dumps(task))

    def options(self) -> RankOptions:
        return RankOptions(**json.loads((self.folder / "options.json").read_text()))

    def task(self) -> Any:
        """Unpickle the task. Import the worker's modules first: a task may need torch."""
        return pickle.loads((self.folder / "task").read_bytes())

    def ask_to_stop(self, signal_name: str) -> None:
        """Leave the request for ranks that start to listen later, and for later attempts."""
        _write_whole(self.folder / "asked", signal_name)

    def asked_to_stop(self) -> str | None:
        path = self.folder / "asked"
        return path.read_text() if path.exists() else None

    def set_up(self) -> None:
        self.path.mkdir()

    def started(self, pids: dict[int, int]) -> None:
        _write_whole(self.path / "pids.json", json.dumps(pids))

    def pids(self) -> dict[int, int]:
        """Pids of this node's ranks; empty until all of them are started."""
        path = self.path / "pids.json"
        return {int(rank): pid for rank, pid in json.loads(path.read_text()).items()} if path.exists() else {}

    def lost_ranks(self) -> list[int]:
        """Ranks that are gone and have not finished their work."""
        return [rank for rank, pid in self.pids().items() if not _lives(pid) and not self._finished(rank).exists()]

    def heartbeat(self, rank: int) -> Path:
        return self.path / f"heartbeat-{rank}"

    def beats(self) -> dict[int, Beat]:
        """The last heartbeat of each rank that has started and not finished."""
        found = {rank: Beat.read(self.heartbeat(rank)) for rank in self.pids() if not self._finished(rank).exists()}
        return {rank: beat for rank, beat in found.items() if beat is not None}

    def stack_file(self, rank: int) -> Path:
        return self.path / f"stacks-{rank}"

    def stacks(self, rank: int) -> str:
        path = self.stack_file(rank)
        return path.read_text(errors="replace") if path.exists() else ""

    def warnings(self, rank: int) -> Path:
        return self.path / f"warnings-{rank}"

    def loader_stack_file(self, rank: int, pid: int) -> Path:
        return self.path / f"stacks-{rank}-{pid}"

    def loader_stacks(self, rank: int) -> dict[int, str]:
        """Stacks of the rank's living data-loading processes, by pid."""
        found = {int(path.name.rpartition("-")[2]): path for path in self.path.glob(f"stacks-{rank}-*")}
        return {pid: path.read_text(errors="replace") for pid, path in found.items() if _lives(pid)}

    def ask(self) -> None:
        """Ask the ranks for their last collectives, and empty the files for stacks, which signals ask for."""
        for path in self.path.glob("stacks-*"):
            os.truncate(path, 0)
        _write_whole(self.path / "asked", str(self.times_asked() + 1))

    def times_asked(self) -> int:
        path = self.path / "asked"
        return int(path.read_text()) if path.exists() else 0

    def tell_collectives(self, rank: int, collectives: str, asked: int) -> None:
        _write_whole(self.path / f"collectives-{rank}", f"{asked}\n{collectives}")

    def has_told(self, rank: int) -> bool:
        """Whether the rank has answered the last request."""
        return self._told(rank)[0] >= self.times_asked()

    def collectives(self, rank: int) -> list[dict[str, Any]]:
        """The rank's last collectives; empty if it has not answered the last request."""
        asked, text = self._told(rank)
        return json.loads(text) if asked >= self.times_asked() else []

    def _told(self, rank: int) -> tuple[int, str]:
        path = self.path / f"collectives-{rank}"
        asked, _, text = path.read_text().partition("\n") if path.exists() else ("0", "", "[]")
        return int(asked), text

    def listen(self, rank: int) -> None:
        _write_whole(self.path / f"listening-{rank}", str(os.getpid()))

    def stop_listening(self, rank: int) -> None:
        (self.path / f"listening-{rank}").unlink(missing_ok=True)

    def listeners(self) -> list[int]:
        """Pids of the ranks that handle signals."""
        return [int(path.read_text()) for path in self.path.glob("listening-*") if not path.suffix]

    def finish(self, rank: int) -> None:
        self._finished(rank).touch()

    def _finished(self, rank: int) -> Path:
        return self.path / f"finished-{rank}"

    def report(self, document: Any) -> None:
        with (self.path / "results.jsonl").open("a") as file:
            file.write(json.dumps(document) + "\n")

    def results(self) -> list[Any]:
        path = self.path / "results.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def report_error(self, rank: int, error: BaseException) -> None:
        trace = "".join(traceback.format_exception(error))
        found = RankError(
            rank=rank,
            time=time.time(),
            kind=type(error).__name__,
            message=str(error),
            traceback=trace,
            details=getattr(error, "details", {}),
        )
        _write_whole(self.path / f"failure-{rank}.json", json.dumps(asdict(found)))

    def errors(self) -> list[RankError]:
        """Errors of failed ranks, the earliest first."""
        found = [RankError(**json.loads(path.read_text())) for path in self.path.glob("failure-*.json")]
        return sorted(found, key=lambda error: error.time)

    def last_lines(self, rank: int, count: int = 20) -> str:
        """The last lines that a rank of this node wrote to stderr, from the log of torch's agent."""
        local = rank - min(self.pids(), default=rank)
        logs = sorted(self.folder.glob(f"*/attempt_*/{local}/stderr.log"), key=lambda path: path.stat().st_mtime)
        return "\n".join(logs[-1].read_text(errors="replace").splitlines()[-count:]) if logs else ""


def own_attempt() -> Attempt | None:
    """The attempt that this process is a rank of; None if Meshwright did not start it."""
    folder = own_folder()
    return None if folder is None else Attempt(folder, restart_count())


def own_task() -> Any:
    """This rank's task. From now on the rank prints to stderr: stdout is for one JSON document."""
    attempt = own_attempt()
    assert attempt is not None, "ranks are started by the launcher"
    os.dup2(2, 1)
    return attempt.task()


def report(document: Any) -> None:
    """Send a result from rank 0 to the launcher; other ranks do nothing."""
    attempt = own_attempt()
    if attempt is not None and own_rank() == 0:
        attempt.report(document)


def exit_now(code: int) -> NoReturn:
    """End this process without leaving the process group: peers may wait in a collective that this rank never joins."""
    for child in multiprocessing.active_children():
        child.kill()  # data-loading processes would take seconds to notice
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def _write_whole(path: Path, text: str) -> None:
    """Write through a rename, so that readers never see half a file."""
    part = path.with_name(f"{path.name}.part")
    part.write_text(text)
    part.rename(path)
