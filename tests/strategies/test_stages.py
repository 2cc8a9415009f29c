"""Where models are cut, what crosses the cuts and who holds which parameter; and what is refused, by name."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import combinations
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import awkward_pipeline_models
import pipeline_jobs
import pipeline_models
from meshwright.describe.calls import Flow, Value
from meshwright.describe.flow import Watcher
from meshwright.describe.model import describe
from meshwright.describe.observe import trace
from meshwright.errors import Refused
from meshwright.facts.job import Job
from meshwright.facts.model import CallFacts, ModelFacts, ParameterFacts
from meshwright.recording.blueprint import record
from meshwright.strategies.pipeline.stages import SENDS_INTEGERS, Stages, cut_stages, find_crossings, held_parameters


def made_up(flops: Sequence[float], sizes: Sequence[int] | None = None, outside: int = 0) -> ModelFacts:
    """One block a call, each with a parameter of its own; `outside` modules on either side that are no blocks."""
    sizes = sizes or [1] * len(flops)
    names = [f"block{index}" for index in range(len(flops))]
    calls = [CallFacts(name=n, flops=f, reads=(f"{n}.weight",)) for n, f in zip(names, flops, strict=True)]
    return ModelFacts(
        parameters=tuple(
            ParameterFacts(names=(f"{name}.weight",), shape=(size,), itemsize=4)
            for name, size in zip(names, sizes, strict=True)
        ),
        blocks=tuple(names[outside : len(names) - outside]),
        calls=tuple(calls),
    )


def test_calls_of_stages() -> None:
    stages = Stages((0, 2, 5), 7)
    assert len(stages) == 3
    assert [list(stages.calls_of(stage)) for stage in range(3)] == [[0, 1], [2, 3, 4], [5, 6]]
    assert [stages.is_last(stage) for stage in range(3)] == [False, False, True]


@pytest.mark.parametrize(
    ("flops", "count", "starts"),
    [
        ([1, 1, 1, 1], 2, (0, 2)),
        ([1, 1, 1, 1], 4, (0, 1, 2, 3)),
        ([9, 1, 1, 1], 2, (0, 1)),
        ([1, 1, 1, 9], 2, (0, 3)),
        ([1, 1, 1, 1, 1, 1], 3, (0, 2, 4)),
        ([5, 1, 1, 1, 1, 1], 3, (0, 1, 3)),
        ([1], 1, (0,)),
    ],
)
def test_cuts_are_balanced(flops: list[float], count: int, starts: tuple[int, ...]) -> None:
    assert cut_stages(made_up(flops), count).starts == starts


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5])
def test_no_cut_has_a_cheaper_dearest_stage(count: int) -> None:
    """Against all cuts there are: computation and parameters count alike."""
    flops, sizes = [5, 1, 4, 2, 8, 1, 3], [1, 9, 1, 7, 2, 2, 6]
    costs = [f / sum(flops) + s / sum(sizes) for f, s in zip(flops, sizes, strict=True)]

    def dearest(starts: Sequence[int]) -> float:
        ends = [*starts[1:], len(costs)]
        return max(sum(costs[start:end]) for start, end in zip(starts, ends, strict=True))

    best = min(dearest((0, *chosen)) for chosen in combinations(range(1, len(costs)), count - 1))
    assert dearest(cut_stages(made_up(flops, sizes), count).starts) == pytest.approx(best)


def test_large_parameters_weigh_as_much_as_computation() -> None:
    assert cut_stages(made_up([1] * 6, sizes=[100, 1, 1, 1, 1, 1]), 2).starts == (0, 1)


def test_stages_begin_with_blocks() -> None:
    """What is before the first block lies with it, however dear it is; as what is behind the last one."""
    facts = made_up([50, 1, 1, 1, 1, 50], outside=1)
    assert cut_stages(facts, 4).starts == (0, 2, 3, 4)
    assert cut_stages(facts, 2).starts == (0, 3)
    with pytest.raises(Refused, match=r"cut into 5 stages, because it has 4 blocks .*use at most 4 stages"):
        cut_stages(facts, 5)


def test_any_module_will_do_where_nothing_repeats() -> None:
    facts = replace(made_up([1, 1, 1]), blocks=())
    assert cut_stages(facts, 3).starts == (0, 1, 2)
    with pytest.raises(Refused, match=r"block0, block1, block2\).*use at most 3 stages.*Job\(stages=\[\.\.\.\]\)"):
        cut_stages(facts, 4)


def test_many_names_are_cut_short() -> None:
    with pytest.raises(Refused, match=r"block7, \.\.\."):
        cut_stages(made_up([1] * 10), 11)


def test_a_model_that_could_not_be_followed() -> None:
    with pytest.raises(Refused, match=r"cannot be cut into stages \(it looks at values\); use fsdp"):
        cut_stages(replace(made_up([1, 1]), calls=(), unseen="it looks at values"), 2)


@pytest.mark.parametrize(
    ("hint", "starts"),
    [
        (["block0", "block3"], (0, 3)),
        (["block3"], (0, 3)),
        (["block1", "block2"], (0, 1, 2)),
        (["block0", "block1", "block3"], (0, 1, 3)),
    ],
)
def test_a_hint_is_followed(hint: list[str], starts: tuple[int, ...]) -> None:
    """The first stage need not be named."""
    assert cut_stages(made_up([1, 1, 1, 9]), len(starts), hint).starts == starts


def test_a_hint_may_name_what_holds_the_first_call() -> None:
    facts = describe(pipeline_jobs.translating)
    names = [call.name for call in facts.calls]
    assert cut_stages(facts, 2, ["decoder"]).starts == (0, names.index("decoder.0"))


@pytest.mark.parametrize(
    ("hint", "says"),
    [
        (["nowhere"], "names 'nowhere', where no stage can begin; these can: block0, block1"),
        (["block"], "names 'block', where no stage can begin"),
        (["block0", "block1", "block2"], "first modules of 2 stages .* names block0, block1, block2"),
        (["block2", "block1"], "in the order of their calls"),
        (["block1", "block1"], "in the order of their calls"),
        ([], "first modules of 2 stages"),
    ],
)
def test_a_wrong_hint(hint: list[str], says: str) -> None:
    with pytest.raises(Refused, match=says):
        cut_stages(made_up([1, 1, 1]), 2, hint)


@cache
def traced(job: Job) -> tuple[nn.Module, Flow]:
    blueprint = record(job.model, 0)
    flow, reason = trace(job, blueprint, Watcher([call.name for call in describe(job).calls]))
    assert flow is not None, reason
    return blueprint.model, flow


def stages_at(flow: Flow, *names: str) -> Stages:
    """Stages that begin with the first calls of these."""
    called = [call.name for call in flow.calls]
    return Stages((0, *(called.index(name) for name in names)), len(called))


def crossing(job: Job, *names: str) -> list[list[str]]:
    """The names of the calls whose outputs cross each cut."""
    flow = traced(job)[1]
    values = find_crossings(flow, stages_at(flow, *names)).values
    return [[flow.calls[value.call].name for value in over] for over in values]


def test_a_trunk_sends_one_value() -> None:
    assert crossing(pipeline_jobs.trunk, "blocks.1", "blocks.3") == [[], ["blocks.0"], ["blocks.2"]]


def test_a_value_passes_through_stages_that_do_not_read_it() -> None:
    found = crossing(pipeline_jobs.skipping, "blocks.1", "blocks.2", "blocks.3")
    assert found == [[], ["blocks.0"], ["blocks.0", "blocks.1"], ["blocks.0", "blocks.2"]]


def test_an_encoders_output_goes_with_every_decoder_block() -> None:
    found = crossing(pipeline_jobs.translating, "encoder.1", "decoder.0", "decoder.1")
    assert found == [[], ["encoder.0"], ["encoder.1", "token"], ["encoder.1", "decoder.0"]]


def test_a_bias_that_the_first_block_makes_goes_with_all_later_ones() -> None:
    flow = traced(pipeline_jobs.biased)[1]
    crossings = find_crossings(flow, stages_at(flow, "blocks.1", "blocks.3"))
    trunk, bias = crossings.values[1]
    assert trunk == Value(1, 0)
    assert bias.call == 1 and bias.leaf > 0
    assert crossings.values[2] == (bias, Value(3, 0)), "not the last block's, which is the first one's handed on"


def test_what_glue_reads_is_read_by_the_stage_it_feeds() -> None:
    flow = traced(pipeline_jobs.glued)[1]
    parameters = find_crossings(flow, stages_at(flow, "blocks.1", "blocks.3")).parameters
    assert ["places" in names for names in parameters] == [True, False, False]
    assert ["token.weight" in names for names in parameters] == [True, False, True]
    assert ["gain" in names for names in parameters] == [False, True, True]
    assert ["blocks.2.up.weight" in names for names in parameters] == [False, True, False]


def held(job: Job, *names: str) -> list[frozenset[str]]:
    model, flow = traced(job)
    stages = stages_at(flow, *names)
    return held_parameters(model, flow, stages, find_crossings(flow, stages))


def test_a_tied_parameter_is_held_where_either_is_read() -> None:
    first, second, last = held(pipeline_jobs.tied, "blocks.1", "blocks.3")
    assert "token.weight" in first and "token.weight" in last and "token.weight" not in second
    assert not any("head.weight" in names for names in (first, second, last)), "it has one name"


def test_every_parameter_is_held_once_but_the_shared_ones() -> None:
    for job in (pipeline_jobs.trunk, pipeline_jobs.tied, pipeline_jobs.frozen, pipeline_jobs.repeating):
        parts = held(job, "blocks.1", "blocks.2")
        every = [name for part in parts for name in part]
        assert set(every) == {name for name, _ in traced(job)[0].named_parameters()}
        shared = {name for name in every if every.count(name) > 1}
        assert all(name in ("token.weight", "places") or name.startswith("blocks.0.") for name in shared)


def test_what_nobody_reads_lies_somewhere() -> None:
    """With its module where that is called; on the first stage where it never is."""

    class Idle(pipeline_models.Trunk):
        def __init__(self) -> None:
            super().__init__()
            self.blocks[3].spare = nn.Parameter(torch.ones(2))
            self.unused = nn.Linear(2, 2)

    first, last = held(replace(pipeline_jobs.trunk, model=Idle), "blocks.2")
    assert {"unused.weight", "unused.bias"} <= first and not any(name.startswith("unused") for name in last)
    assert "blocks.3.spare" in last - first


def refusal(job: Job, *names: str) -> str:
    with pytest.raises(Refused) as caught:
        crossing(job, *names)
    assert str(caught.value).endswith(".")
    return str(caught.value)


class Odd(pipeline_models.Trunk):
    """Its blocks return something beside their output, which the last call's input depends on."""

    def __init__(self, make: Any) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(OddBlock(make) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x, rest = self.enter(x), []
        for block in self.blocks:
            x, more = block(x)
            rest.append(more)
        return self.leave(x + self.use(rest[0]))

    def use(self, rest: Any) -> Any:
        return rest.float().mean() if torch.is_tensor(rest) else 0.0


class OddBlock(pipeline_models.Block):
    def __init__(self, make: Any) -> None:
        super().__init__()
        self.make = make

    def forward(self, x: Tensor) -> Any:
        y = super().forward(x)
        return y, self.make(y)


def odd(make: Any) -> Job:
    return replace(pipeline_jobs.trunk, model=lambda: Odd(make))


@pytest.mark.skipif(not SENDS_INTEGERS, reason="this PyTorch's pipelines send floating tensors only")
def test_whole_numbers_cross() -> None:
    job = odd(lambda y: y.argmax(-1))
    assert crossing(job, "blocks.2") == [[], ["blocks.0", "blocks.1"]]
    flow = traced(job)[1]
    assert Value(1, 1) in find_crossings(flow, stages_at(flow, "blocks.2")).values[1]


def test_a_strange_output_cannot_be_made_up() -> None:
    message = refusal(odd(lambda y: slice(3)), "blocks.2")
    assert message.startswith("blocks.0 returns") and "slice" in message and "cannot imitate" in message


def test_a_strange_output_of_the_last_stage_may_be() -> None:
    class Late(Odd):
        def __init__(self) -> None:
            super().__init__(lambda y: slice(3))
            for block in self.blocks[:2]:
                block.make = lambda y: None

    assert crossing(replace(pipeline_jobs.trunk, model=Late), "blocks.2") == [[], ["blocks.1"]]


def test_a_tensor_that_a_block_keeps_to_itself() -> None:
    class Remembering(pipeline_models.Trunk):
        def forward(self, x: Tensor) -> Tensor:
            x = self.enter(x)
            for block in self.blocks:
                x = block(x)
            return self.leave(x + self.blocks[1].seen)

    class RememberingBlock(pipeline_models.Block):
        def forward(self, x: Tensor) -> Tensor:
            self.seen = self.up(x)[..., : pipeline_models.WIDTH]
            return super().forward(x)

    def build() -> nn.Module:
        model = Remembering()
        model.blocks = nn.ModuleList(RememberingBlock() for _ in range(4))
        return model

    job = replace(pipeline_jobs.trunk, model=build)
    message = refusal(job, "blocks.2")
    assert "leave reads a tensor that blocks.1 keeps" in message
    assert crossing(job, "blocks.1") == [[], ["blocks.0"]], "they may lie on one stage"


def test_what_is_changed_in_place_is_sent_by_whoever_changed_it() -> None:
    assert crossing(pipeline_jobs.changing_first, "blocks.2") == [[], ["blocks.1"]]
    assert crossing(pipeline_jobs.changing_glue, "blocks.2") == [[], ["blocks.1"]]


def test_shapes_that_are_made_of_values() -> None:
    class Late(pipeline_models.Trunk):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            return y * (1 + 0 * len((y > 0).nonzero()))

    message = refusal(replace(pipeline_jobs.trunk, model=Late), "blocks.2")
    assert "shape depends on values after calling leave" in message and "use tp, op or a data strategy" in message


def test_values_that_somebody_looks_at_are_noted() -> None:
    class Listed(pipeline_models.Trunk):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x if x[0, 0].tolist()[0] > 0 else -x)

    looking = [pipeline_jobs.by_value, replace(pipeline_jobs.trunk, model=Listed)]
    assert [traced(job)[1].looked for job in (*looking, pipeline_jobs.trunk)] == [True, True, False]


def test_buffers_that_are_changed_between_calls() -> None:
    assert "changes average between the calls" in refusal(pipeline_jobs.averaging, "blocks.2")
    flow = traced(pipeline_jobs.averaging_blocks)[1]
    assert flow.moved == {"blocks.3.average": frozenset({4})}


def test_a_buffer_that_two_stages_change() -> None:
    class Sharing(awkward_pipeline_models.AveragingBlocks):
        def __init__(self) -> None:
            super().__init__()
            self.blocks[0] = self.Block()
            self.blocks[0]._buffers = self.blocks[3]._buffers

    job = replace(pipeline_jobs.trunk, model=Sharing)
    message = refusal(job, "blocks.2")
    assert "blocks.0" in message and "blocks.3" in message and "two stages" in message


@pytest.mark.parametrize("reentrant", [True, False])
def test_blocks_that_the_model_recomputes(reentrant: bool) -> None:
    class Recomputing(pipeline_models.Trunk):
        def forward(self, x: Tensor) -> Tensor:
            x = self.enter(x)
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=reentrant)
            return self.leave(x)

    job = replace(pipeline_jobs.trunk, model=Recomputing)
    if reentrant:
        assert "calls blocks.0 inside an autograd function" in refusal(job, "blocks.2")
    else:
        assert crossing(job, "blocks.2") == [[], ["blocks.1"]]


def test_no_complex_numbers_cross() -> None:
    message = refusal(odd(lambda y: torch.complex(y, y)), "blocks.2")
    assert "complex" in message and "view_as_real" in message


def test_a_batch_of_another_size_that_is_called_otherwise() -> None:
    _, flow = traced(pipeline_jobs.trunk)
    with pytest.raises(Refused, match="makes 6 calls"):
        find_crossings(flow, Stages((0, 2), len(flow.calls) - 1))
