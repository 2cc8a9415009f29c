"""Signals that ask a process to stop, and what it finds in the launcher's folder."""

import ctypes
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from meshwright.launch.attempt import Attempt
from meshwright.launch.preemption import SIGNALS, Forwarding, Preemption, spare_loader
from toy_worker import LIMIT_SECONDS, wait_for


@pytest.fixture
def attempt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Attempt:
    """This process as rank 3 of the first restart."""
    monkeypatch.setenv("MESHWRIGHT_FOLDER", str(tmp_path))
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    monkeypatch.setenv("RANK", "3")
    made = Attempt(tmp_path, 1)
    made.set_up()
    return made


def ended_pid() -> int:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        return process.pid


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_asks(number: signal.Signals) -> None:
    with Preemption() as preemption:
        assert preemption.asked is None
        os.kill(os.getpid(), number)
        wait_for(lambda: preemption.asked is not None)
        assert preemption.asked == number.name


def test_the_first_signal_counts() -> None:
    with Preemption() as preemption:
        os.kill(os.getpid(), signal.SIGUSR1)
        wait_for(lambda: preemption.asked is not None)
        os.kill(os.getpid(), signal.SIGTERM)
    assert preemption.asked == "SIGUSR1"


def test_a_signal_is_noticed_while_the_main_thread_is_in_c() -> None:
    """The main thread reads from a pipe, without Python, until somebody has seen that it was asked."""
    ear, mouth = os.pipe()
    seen: list[str | None] = []

    def see() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        try:
            wait_for(lambda: preemption.asked is not None)
        finally:
            seen.append(preemption.asked)
            os.write(mouth, b".")

    with Preemption() as preemption:
        thread = threading.Thread(target=see)
        thread.start()
        assert ctypes.CDLL(None).read(ear, ctypes.create_string_buffer(1), 1) == 1
        thread.join()
    os.close(ear)
    os.close(mouth)
    assert seen == ["SIGTERM"]


def test_everything_is_put_back() -> None:
    def handlers() -> list[object]:
        return [signal.getsignal(number) for number in SIGNALS]

    ear, mouth = os.pipe()
    os.set_blocking(mouth, False)
    before, threads = handlers(), threading.active_count()
    outer = signal.set_wakeup_fd(mouth)
    with Preemption():
        assert handlers() != before
    assert signal.set_wakeup_fd(outer) == mouth
    assert (handlers(), threading.active_count()) == (before, threads)
    os.close(ear)
    os.close(mouth)


def test_inside_another_one_it_is_that_one() -> None:
    with Preemption() as outer:
        with Preemption() as inner:
            assert inner is outer
        os.kill(os.getpid(), signal.SIGUSR1)
        wait_for(lambda: outer.asked is not None)


def test_another_thread_is_never_asked() -> None:
    asked: list[str | None] = ["nobody looked"]

    def look() -> None:
        with Preemption() as preemption:
            asked[0] = preemption.asked

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert asked == [None]


def test_a_process_that_does_not_end_in_time_leaves() -> None:
    program = (
        "import os, signal, threading\n"
        "from meshwright.launch.preemption import Preemption\n"
        "with Preemption(grace=0.1):\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        f"    threading.Event().wait({LIMIT_SECONDS})\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == "error: SIGTERM asked the run to stop, and it had not ended 0.1 s later.\n"


def echo(pipe: Connection, prepare: Callable[[int], None] | None) -> None:
    if prepare is not None:
        prepare(0)
    while True:
        pipe.send(pipe.recv())


@contextmanager
def forked_child(prepare: Callable[[int], None] | None) -> Iterator[tuple[Any, Callable[[], None]]]:
    """A process, and a question that it answers while it lives."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    child = context.Process(target=echo, args=(theirs, prepare), daemon=True)
    child.start()

    def ask() -> None:
        ours.send("there?")
        assert ours.poll(LIMIT_SECONDS) and ours.recv() == "there?"

    try:
        ask()
        yield child, ask
    finally:
        child.kill()
        child.join()


@pytest.mark.parametrize("number", SIGNALS)
def test_a_forked_child_is_ended_by_its_own_signals(number: signal.Signals) -> None:
    """And its parent is not asked."""
    with Preemption() as preemption, forked_child(None) as (child, _):
        os.kill(child.pid, number)
        child.join()
        assert child.exitcode == -number
        assert preemption.asked is None


def test_a_loader_passes_over_what_asks_its_rank() -> None:
    """A scheduler may signal all processes. It lives on until torch ends it."""
    with Preemption(), forked_child(spare_loader) as (child, ask):
        for number in SIGNALS:
            os.kill(child.pid, number)
            ask()
        child.terminate()
        child.join()
        assert child.exitcode == -signal.SIGTERM


def test_what_was_asked_before_a_rank_listened(attempt: Attempt) -> None:
    attempt.ask_to_stop("SIGUSR1")
    with Preemption() as preemption:
        assert preemption.asked == "SIGUSR1"


def test_a_rank_says_that_it_listens(attempt: Attempt) -> None:
    with Preemption():
        assert attempt.listeners() == [os.getpid()]
        assert Attempt(attempt.folder, 0).listeners() == []
    assert attempt.listeners() == []


def test_the_launcher_hands_a_signal_on_once(attempt: Attempt) -> None:
    """Also to ranks that are gone meanwhile."""
    (attempt.path / "listening-0").write_text(str(ended_pid()))
    heard = multiprocessing.get_context("fork").Queue()
    with Forwarding(lambda: attempt) as forwarding:
        rank = _listening_rank(attempt, heard.put)
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGUSR1)
        assert heard.get(timeout=LIMIT_SECONDS) == "SIGUSR1"
        rank.join()
        os.kill(os.getpid(), signal.SIGTERM)
    assert (forwarding.asked, attempt.asked_to_stop(), forwarding.overdue) == ("SIGUSR1", "SIGUSR1", False)


def _listening_rank(attempt: Attempt, put: Callable[[str | None], None]) -> multiprocessing.Process:
    def listen() -> None:
        with Preemption() as preemption:
            wait_for(lambda: preemption.asked is not None)
            put(preemption.asked)

    rank = multiprocessing.get_context("fork").Process(target=listen, daemon=True)
    rank.start()
    wait_for(lambda: len(attempt.listeners()) == 2)
    return rank  # type: ignore[return-value]  # a process, of the fork context


def test_a_rank_is_lost_when_it_is_gone_without_having_finished(attempt: Attempt) -> None:
    assert not attempt.lost_ranks()
    attempt.started({0: os.getpid()})
    assert not attempt.lost_ranks()
    attempt.started({0: os.getpid(), 1: ended_pid()})
    assert attempt.lost_ranks() == [1]
    attempt.finish(1)
    assert not attempt.lost_ranks()
