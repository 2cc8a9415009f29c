"""A measured step as a timeline: what was waited for, and for whom."""

from __future__ import annotations

from typing import Any

import pytest

from meshwright.compare.timeline import measured_timeline
from meshwright.facts.strategy import Strategy
from meshwright.facts.timeline import IDLE, SEND, Timeline

STEPS = {
    0: [("0F0", 10.0, 11.0), ("0F1", 11.0, 12.0), ("0B0", 13.5, 14.5), ("0B1", 15.3, 16.3)],
    1: [("1F0", 11.2, 12.2), ("1B0", 12.2, 13.2), ("1F1", 13.2, 14.2), ("1B1", 14.2, 15.2)],
}
"""Two micro-batches over two stages, as the clock showed."""


@pytest.fixture(scope="module")
def timeline() -> Timeline:
    ranks: list[dict[str, Any]] = [
        {"place": {"pipeline": rank}, "steps": [(10.0, 16.3, 16.5, actions)]} for rank, actions in STEPS.items()
    ]
    return measured_timeline(Strategy.parse("pp=2:1f1b").resolve(2), ranks, [6.5])


def test_a_message_is_there_as_far_as_it_was_waited_for(timeline: Timeline) -> None:
    sent = [piece for piece in timeline.pieces if piece.kind == SEND]
    found = [(p.rank, p.to, p.stage, p.micro_batch, round(p.start, 6), round(p.end, 6)) for p in sent]
    assert found == [
        (0, 1, 0, 0, 1.0, 1.2),  # the second stage was free, and had nothing to do
        (1, 0, 1, 0, 3.2, 3.5),
        (1, 0, 1, 1, 5.2, 5.3),
    ]  # the first stage's second result came while the other computed


def test_messages_do_not_count_as_work(timeline: Timeline) -> None:
    idle = {rank: [p for p in timeline.of(rank) if p.kind == IDLE] for rank in (0, 1)}
    assert [(round(p.start, 6), round(p.end, 6)) for p in idle[1]] == [(0.0, 1.2), (5.2, 6.3)]
