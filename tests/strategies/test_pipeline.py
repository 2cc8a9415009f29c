"""How many stages and micro-batches a pipeline has, and what it refuses."""

from dataclasses import replace

import pytest

from meshwright import schedules
from meshwright.errors import Refused
from meshwright.facts.model import ModelFacts, ParameterFacts
from meshwright.facts.strategy import Strategy
from meshwright.strategies.pipeline.sizes import (
    BUSY,
    count_micro_batches,
    count_stages,
    is_pipelined,
    refuse_pipeline,
)

WEIGHT = ParameterFacts(names=("weight",), shape=(4,), itemsize=4)
FACTS = ModelFacts(parameters=(WEIGHT,), blocks=(), weight_per_sample=1.0)
BATCH_NORM = replace(FACTS, batch_norms=("stem.norm", "other"))


def resolved(text: str, ranks: int | None = None) -> Strategy:
    strategy = Strategy.parse(text)
    return strategy.resolve(ranks or strategy.model_ranks)


@pytest.mark.parametrize(
    ("text", "ranks", "stages", "name"),
    [
        ("pp=4:gpipe", 4, 4, "gpipe"),
        ("pp=4", 4, 4, "1f1b"),
        ("pp=2:interleaved", 2, 4, "interleaved"),
        ("pp=2:zb", 2, 2, "zb"),
        ("pp=3:zbv", 3, 6, "zbv"),
        ("pp=2:dualpipev,fsdp=2", 2, 4, "dualpipev"),
        ("layers=3", 3, 3, "layers"),
    ],
)
def test_stages(text: str, ranks: int, stages: int, name: str) -> None:
    strategy = Strategy.parse(text)
    assert is_pipelined(strategy)
    assert (strategy.stage_ranks, count_stages(strategy), strategy.schedule) == (ranks, stages, name)


@pytest.mark.parametrize("text", ["ddp", "fsdp,tp=2", "op=2", "single"])
def test_no_pipeline(text: str) -> None:
    assert not is_pipelined(Strategy.parse(text))


@pytest.mark.parametrize(
    ("text", "ranks", "batch", "count"),
    [
        ("pp=2:1f1b", 2, 64, 8),  # four for each rank
        ("pp=4:1f1b", 4, 64, 16),
        ("pp=4:1f1b", 4, 8, 8),
        ("pp=4:1f1b", 4, 12, 12),
        ("pp=4:1f1b", 4, 18, 9),  # 16 would leave a remainder
        ("pp=2:1f1b,ddp", 4, 16, 8),
        ("pp=2:1f1b,ddp", 4, 15, 8),  # the fuller data rank's eight
        ("pp=2:1f1b", 2, 7, 7),
        ("pp=2:1f1b", 2, 13, 8),  # no divisor within reach: some are left for a second round
        ("pp=2:gpipe", 2, 13, 8),  # one micro-batch would divide, too, and keep a rank waiting
        ("pp=4:gpipe", 4, 34, 16),  # two would keep two ranks waiting
        ("pp=4:gpipe", 4, 3, 3),
        ("pp=2:zbv", 2, 11, 8),
        ("pp=2:dualpipev", 2, 8, 8),
        ("layers=4", 4, 64, 1),
        ("pp=2:1f1b,mb=4", 2, 64, 16),
        ("pp=2:1f1b,mb=3", 2, 16, 6),
        ("pp=2:1f1b,ddp,mb=2", 4, 16, 4),
        ("layers=2,mb=4", 2, 16, 4),
    ],
)
def test_micro_batches(text: str, ranks: int, batch: int, count: int) -> None:
    assert count_micro_batches(resolved(text, ranks), batch) == count


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "zb", "zbv", "dualpipev"])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_the_schedule_can_run_what_is_chosen(name: str, ranks: int) -> None:
    for batch in range(2 * ranks, 60):
        count = count_micro_batches(resolved(f"pp={ranks}:{name}"), batch)
        assert schedules.refuse(name, ranks, count) is None
        assert ranks <= count <= min(batch, BUSY * ranks), (batch, count)


@pytest.mark.parametrize(
    ("text", "ranks", "batch", "says"),
    [
        ("pp=4:1f1b", 4, 3, "needs at least 4 micro-batches, but a data rank has 3 samples of a global batch of 3"),
        ("pp=4:1f1b,ddp", 8, 6, "use a global batch of 8 or more, or pp:gpipe"),
        ("pp=2:dualpipev", 2, 3, "use a global batch of 4 or more"),
        ("pp=4:1f1b,mb=8", 4, 16, "mb=8 cuts a data rank's 16 samples into 2 micro-batches: 1f1b on 4 ranks"),
        ("pp=4:1f1b,mb=8", 4, 16, "use 4"),
        ("pp=2:dualpipev,mb=4", 2, 8, "mb=4 cuts a data rank's 8 samples into 2"),
    ],
)
def test_too_few_micro_batches(text: str, ranks: int, batch: int, says: str) -> None:
    with pytest.raises(Refused) as caught:
        count_micro_batches(resolved(text, ranks), batch)
    assert says in str(caught.value) and str(caught.value).endswith(".")


def test_the_advice_can_be_taken() -> None:
    assert count_micro_batches(resolved("pp=4:1f1b,ddp", 8), 8) == 4
    assert count_micro_batches(resolved("pp=4:gpipe"), 3) == 3
    assert count_micro_batches(resolved("pp=4:1f1b,mb=4"), 16) == 4


def test_batch_norm_is_refused_where_batches_are_cut() -> None:
    message = refuse_pipeline(resolved("pp=2:gpipe"), BATCH_NORM, 8)
    assert message is not None
    assert "BatchNorm (stem.norm)" in message and "pp=2:gpipe cuts every batch into 8" in message
    assert "layers=2" in message and "GroupNorm" in message
    assert refuse_pipeline(resolved("layers=2,mb=2"), BATCH_NORM, 8) is not None


@pytest.mark.parametrize("text", ["layers=2", "layers=2,mb=8", "pp=2:gpipe,mb=8"])
def test_batch_norm_may_be_in_a_pipeline_of_whole_batches(text: str) -> None:
    assert refuse_pipeline(resolved(text), BATCH_NORM, 8) is None


def test_what_is_not_built() -> None:
    message = refuse_pipeline(resolved("pp=2:1f1b,fsdp,offload=params", 4), FACTS, 8)
    assert message is not None and "use offload=optimizer" in message
    assert refuse_pipeline(resolved("pp=2:1f1b,fsdp,offload=optimizer", 4), FACTS, 8) is None
