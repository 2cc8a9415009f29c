"""What ranks tell of themselves, and who is found to hang."""

import threading
from pathlib import Path

import pytest
import torch

from meshwright.launch import heartbeat
from meshwright.launch.heartbeat import AT_LEAST, COMPILING, SAVING, STARTING, STEPPING, Beat, Heartbeat
from meshwright.launch.rank_reports import RankReport, judge
from meshwright.launch.stacks import CallStack, own_stack, read_stack

WAITING = CallStack(text="", frames=(("/x/torch/distributed/distributed_c10d.py", 1, "all_reduce"), ("job.py", 9, "f")))
IN_FORWARD = CallStack(text="", frames=((torch.nn.functional.__file__, 1, "linear"), ("/home/job.py", 9, "forward")))
NO_ANSWER = CallStack(text="", frames=())


def beat(doing: str = STEPPING, step: int = 3, longest: float = 2.0, at: float = 10.0) -> Beat:
    return Beat(doing=doing, step=step, longest=longest, at=at, thread=1)


def test_a_beat_is_read_as_it_was_written(tmp_path: Path) -> None:
    own = Heartbeat(tmp_path / "pulse")
    own.step(4)
    with own.doing(SAVING):
        assert Beat.read(tmp_path / "pulse") is not None
        assert Beat.read(tmp_path / "pulse").doing == SAVING  # type: ignore[union-attr]
    found = Beat.read(tmp_path / "pulse")
    assert found is not None and (found.doing, found.step) == (STEPPING, 4)
    assert found.thread == threading.main_thread().ident
    assert Beat.read(tmp_path / "nothing") is None


@pytest.mark.parametrize(
    ("found", "limit"),
    [
        (beat(), 122.0),
        (beat(step=0), 2.0 + AT_LEAST),
        (beat(STARTING), 2.0 + AT_LEAST),
        (beat(SAVING), 2.0 + AT_LEAST),
        (beat(COMPILING), 2.0 + AT_LEAST),
    ],
)
def test_patience(found: Beat, limit: float) -> None:
    assert found.limit(120.0) == limit


def test_compiling_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stands on callbacks that torch calls private."""
    own = Heartbeat()
    monkeypatch.setattr(Heartbeat, "own", own)
    own.step(1)
    seen = []
    begin = own.begin
    monkeypatch.setattr(own, "begin", lambda what: (seen.append(what), begin(what)))
    heartbeat.beat_while_compiling()
    torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))
    assert seen[:1] == [COMPILING] and seen[-1] == STEPPING


def blamed(*ranks: tuple[int, CallStack]) -> int:
    """The rank to blame, of ranks with these steps and stacks."""
    reports = [
        RankReport(rank=rank, host="here", doing=STEPPING, step=step, silent=9.0, late=True, stack=stack)
        for rank, (step, stack) in enumerate(ranks)
    ]
    found = judge(reports)
    assert found is not None
    return found.rank


@pytest.mark.parametrize("stuck", [IN_FORWARD, NO_ANSWER])
def test_the_rank_that_does_not_wait_is_behind(stuck: CallStack) -> None:
    assert blamed((3, WAITING), (3, stuck), (3, WAITING)) == 1


def test_where_all_wait_the_one_with_fewest_steps_is_behind() -> None:
    assert blamed((4, WAITING), (3, WAITING)) == 1


def test_the_line_is_the_user_s() -> None:
    assert IN_FORWARD.place == "it stands at job.py:9, in forward"
    assert "does not answer" in NO_ANSWER.place


def test_one_thread_s_stack_is_read_from_all_of_them() -> None:
    text = (
        'Thread 0x0000000000000002 (most recent call first):\n  File "other.py", line 1 in g\n\n'
        'Current thread 0x0000000000000001 (most recent call first):\n  File "job.py", line 7 in f\n'
    )
    assert read_stack(text, 1).frames == (("job.py", 7, "f"),)
    assert read_stack("", 1).frames == ()


def test_the_own_stack() -> None:
    frames = own_stack(threading.get_ident()).frames
    assert any(name == "test_the_own_stack" for _, _, name in frames)
