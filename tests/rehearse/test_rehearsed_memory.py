"""A rehearsed rank holds what a rank of the real run holds."""

from functools import cache
from pathlib import Path

import pytest
import torch

from meshwright.describe.model import describe
from meshwright.facts.model import ModelFacts
from meshwright.facts.rehearsal import Rehearsal
from meshwright.facts.strategy import Strategy
from meshwright.jobs.load import load_job
from meshwright.rehearse.process import rehearse_apart
from meshwright.rehearse.task import RehearsalTask
from rank_pool import RankPool
from rehearse_programs import counted

pytestmark = pytest.mark.slow
GPT = str(Path(__file__).parents[2] / "examples" / "gpt.py")
STRATEGIES = ["ddp", "zero1", "fsdp", "tp=2", "pp=2"]
BATCH, WORLD = 8, 4


@cache
def facts() -> ModelFacts:
    return describe(load_job(GPT))


def rehearsed(text: str, rank: int = 0, world: int = WORLD) -> Rehearsal:
    task = RehearsalTask(
        job=GPT,
        facts=facts(),
        strategy=Strategy.parse(text).resolve(world),
        world=world,
        rank=rank,
        global_batch=BATCH,
        steps=1,
    )
    return rehearse_apart(task, timeout=240)


def test_the_peak_is_that_of_real_ranks(four_ranks: RankPool) -> None:
    real = four_ranks(counted, GPT, facts(), STRATEGIES, BATCH)
    found = {strategy: rehearsed(strategy) for strategy in STRATEGIES}
    assert {strategy: one.status for strategy, one in found.items()} == dict.fromkeys(STRATEGIES, "ok")
    for index, strategy in enumerate(STRATEGIES):
        assert found[strategy].peak == pytest.approx(real[0][index]["peak"], rel=0.02), strategy
    last = rehearsed("pp=2", rank=WORLD - 1)
    assert last.peak == pytest.approx(real[WORLD - 1][STRATEGIES.index("pp=2")]["peak"], rel=0.02)


def test_states_are_counted_exactly() -> None:
    """Under ddp a rank holds whole parameters, as many bytes of gradients, and twice as many of AdamW's moments."""
    model = load_job(GPT).model()
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    found = rehearsed("ddp")
    assert found.memory["parameters"] == size + sum(b.numel() * b.element_size() for b in model.buffers())
    assert found.memory["optimizer"] == pytest.approx(2 * size, rel=0.001)  # and a step counter of each parameter
    assert found.seconds and found.seconds > 0


def test_the_count_is_that_of_the_allocator() -> None:
    """PyTorch's profiler sees every allocation of the CPU's allocator, also those that no operator shows."""
    found = rehearsed("single", world=1)
    assert found.peak == pytest.approx(plain_peak(), rel=0.02)


def plain_peak() -> int:
    """Bytes at the peak of a second step in plain PyTorch."""
    from torch.profiler import ProfilerActivity, profile

    job = load_job(GPT)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        model = job.model()
        optimizer = job.optimizer(_named(model))
        batch = job.sample(BATCH)
        for _ in range(2):
            total, weight = job.loss(model(*job.inputs(batch)), batch)
            (total / weight).backward()
            if job.max_norm is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), job.max_norm)
            optimizer.step()
            optimizer.zero_grad()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most


def _named(model: torch.nn.Module) -> object:
    from meshwright.facts.job import NamedParameters

    return NamedParameters(model.named_parameters())
