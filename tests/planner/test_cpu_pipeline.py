"""Pipelines of CPU ranks: what they idle, and what messages over a slow link add."""

from dataclasses import replace

import pytest

from meshwright.facts.catalogue import hardware_of_device
from meshwright.facts.links import ring_bytes, ring_steps
from meshwright.planner.collectives import RankGroup, seconds
from meshwright.planner.cpu_pipeline import idle_seconds
from meshwright.planner.site import Site
from meshwright.planner.stage_pass import Pass
from meshwright.planner.stage_work import StageWork
from meshwright.planner.step_layout import StepLayout

CPU = hardware_of_device("cpu")
NEAR_S, FAR_S = 0.01, 0.5
"""Seconds of a message within a node, and between nodes."""


def idle(schedule: str, ranks: int, micro_batches: int, *, per_node: int, data: int = 1) -> tuple[float, float]:
    """Of stages that take a second forward and two backward."""
    layout = StepLayout(
        stage_ranks=ranks, schedule=schedule, data=data, micro_batch=1, micro_batches=micro_batches, precision="fp32"
    )
    site = Site(
        hardware=CPU,
        per_node=per_node,
        step_layout=layout,
        collective=lambda kind, size, group: FAR_S if group.nodes > 1 else NEAR_S,
    )
    stage = StageWork(units=(), elements=0, trainable=0, inside=0, output=1.0)
    passes = [(Pass(compute=1.0, sent={}, host=0.0), Pass(compute=2.0, sent={}, host=0.0))] * ranks
    return idle_seconds(site, [stage] * ranks, passes)


def test_without_messages_the_others_work_once() -> None:
    assert idle("1f1b", 2, 8, per_node=2)[0] == pytest.approx(3.0)
    assert idle("1f1b", 4, 8, per_node=4)[0] == pytest.approx(9.0)


def test_each_round_trip_delays_the_next_micro_batch() -> None:
    """Two stages have two micro-batches in flight, so every second one waits for a message in each direction."""
    few, many = (idle("1f1b", 2, count, per_node=1)[1] for count in (4, 12))
    assert many - few == pytest.approx(8 * FAR_S)
    assert idle("1f1b", 2, 12, per_node=2)[1] < 0.05 * many


def test_only_the_message_that_leaves_the_node_is_slow() -> None:
    one_node = idle("1f1b", 4, 4, per_node=4)[1]
    two_nodes = idle("1f1b", 4, 4, per_node=2)[1]
    four_nodes = idle("1f1b", 4, 4, per_node=1)[1]
    assert one_node < two_nodes < four_nodes


def test_a_link_that_is_slower_than_the_stages_sets_the_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "FAR_S", 100.0)
    assert idle("1f1b", 2, 8, per_node=1)[1] >= 8 * 100.0 - 30.0


def test_gloo_has_rings_only() -> None:
    group, size = RankGroup(4, 2, 2, 2), 64e6
    measured = dict.fromkeys(("within.bandwidth", "between.bandwidth"), "measured here")
    slow = replace(CPU, between=replace(CPU.between, bandwidth=1e8, latency=1e-3), sources=measured)
    ring = ring_steps("all_reduce", 4) * 1e-3 + ring_bytes("all_reduce", size, 4) / 1e8
    assert seconds("all_reduce", size, group, slow) == pytest.approx(ring)
