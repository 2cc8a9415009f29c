"""How ranks and the launcher that started them speak: through files in its folder, apart for each attempt.

    orders.json                 what every rank is told
    task                        what its worker does
    asked                       the name of a signal that asked the run to stop
    attempt-0/                  the first start of all ranks, attempt-1 the first restart
        pids.json               of every rank, by the launcher
        listening-RANK          a rank that takes signals: its pid
        results.jsonl           what rank 0 reports
        heartbeat-RANK              what a rank does, and since when
        stacks-RANK             where its threads stand, once it was asked
        failure-RANK.json       a failed rank's last words
        finished-RANK           a rank that did its work

Imports no torch: a rank listens before it has loaded that.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import sys
import time
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

from meshwright.environment import own_folder, own_rank, restart_count
from meshwright.launch.heartbeat import Beat


@dataclass(frozen=True, kw_only=True)
class Orders:
    """What every rank is told, whatever its task is."""

    launcher: int
    """The process that it ends with."""
    grace: float | None
    """Seconds to save and end in after a signal; None where there is nothing to save."""
    patience: float
    """Seconds of silence after which it counts as failed; 0: any time."""


@dataclass(frozen=True, kw_only=True)
class LastWords:
    """What a failed rank leaves for the launcher."""

    rank: int
    time: float
    kind: str
    """The name of the error's class."""
    message: str
    traceback: str


@dataclass(frozen=True)
class Attempt:
    """One start of all ranks."""

    folder: Path
    """The launcher's, in which all attempts lie."""
    number: int

    @property
    def path(self) -> Path:
        return self.folder / f"attempt-{self.number}"

    def hand_out(self, orders: Orders, task: Any) -> None:
        """For this attempt and all later ones."""
        (self.folder / "orders.json").write_text(json.dumps(asdict(orders)))
        (self.folder / "task").write_bytes(pickle.dumps(task))

    def orders(self) -> Orders:
        return Orders(**json.loads((self.folder / "orders.json").read_text()))

    def task(self) -> Any:
        """To be asked for once the worker's modules are imported: a task may need torch."""
        return pickle.loads((self.folder / "task").read_bytes())

    def ask_to_stop(self, signal_name: str) -> None:
        """Also for ranks that listen only later, and for later attempts."""
        _write_whole(self.folder / "asked", signal_name)

    def asked_to_stop(self) -> str | None:
        path = self.folder / "asked"
        return path.read_text() if path.exists() else None

    def set_up(self) -> None:
        self.path.mkdir()

    def started(self, pids: dict[int, int]) -> None:
        _write_whole(self.path / "pids.json", json.dumps(pids))

    def pids(self) -> dict[int, int]:
        """Of the ranks, once all are started."""
        path = self.path / "pids.json"
        return {int(rank): pid for rank, pid in json.loads(path.read_text()).items()} if path.exists() else {}

    def lost_ranks(self) -> list[int]:
        """Ranks that are gone and have not done their work."""
        return [rank for rank, pid in self.pids().items() if not _lives(pid) and not self._finished(rank).exists()]

    def heartbeat(self, rank: int) -> Path:
        return self.path / f"heartbeat-{rank}"

    def beats(self) -> dict[int, Beat]:
        """The last that was heard of each rank that has begun."""
        found = {rank: Beat.read(self.heartbeat(rank)) for rank in self.pids() if not self._finished(rank).exists()}
        return {rank: beat for rank, beat in found.items() if beat is not None}

    def stack_file(self, rank: int) -> Path:
        return self.path / f"stacks-{rank}"

    def stacks(self, rank: int) -> str:
        path = self.stack_file(rank)
        return path.read_text(errors="replace") if path.exists() else ""

    def listen(self, rank: int) -> None:
        _write_whole(self.path / f"listening-{rank}", str(os.getpid()))

    def stop_listening(self, rank: int) -> None:
        (self.path / f"listening-{rank}").unlink(missing_ok=True)

    def listeners(self) -> list[int]:
        """Pids of the ranks that take signals."""
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

    def leave_words(self, rank: int, error: BaseException) -> None:
        words = LastWords(
            rank=rank,
            time=time.time(),
            kind=type(error).__name__,
            message=str(error),
            traceback="".join(traceback.format_exception(error)),
        )
        _write_whole(self.path / f"failure-{rank}.json", json.dumps(asdict(words)))

    def words(self) -> list[LastWords]:
        """What failed ranks said, the first one first."""
        found = [LastWords(**json.loads(path.read_text())) for path in self.path.glob("failure-*.json")]
        return sorted(found, key=lambda words: words.time)

    def last_lines(self, rank: int, count: int = 20) -> str:
        """The end of what a silent rank wrote to its stderr, where torch's agent put it."""
        logs = [*self.folder.glob(f"*/attempt_{self.number}/{rank}/stderr.log")]
        return "\n".join(logs[0].read_text(errors="replace").splitlines()[-count:]) if logs else ""


def own_attempt() -> Attempt | None:
    """The attempt that this process is a rank of; None where Meshwright did not start it."""
    folder = own_folder()
    return None if folder is None else Attempt(folder, restart_count())


def own_task() -> Any:
    """What this rank was started for. What it prints from now on goes to stderr: stdout holds one document alone."""
    attempt = own_attempt()
    assert attempt is not None, "a rank was started by the launcher"
    os.dup2(2, 1)
    return attempt.task()


def report(document: Any) -> None:
    """Rank 0 tells the launcher something; each call is one result."""
    attempt = own_attempt()
    if attempt is not None and own_rank() == 0:
        attempt.report(document)


def leave(code: int) -> NoReturn:
    """End this process at once, without a farewell to peers: they may be waiting where this rank never comes."""
    for child in multiprocessing.active_children():
        child.kill()  # data-loading processes would take seconds to see that they are alone
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
    """Nobody reads half of it."""
    part = path.with_name(f"{path.name}.part")
    part.write_text(text)
    part.rename(path)
