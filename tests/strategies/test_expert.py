"""Experts are found by structure, proved by values, and divided; and what cannot be is refused by name."""

from functools import cache

import pytest
import torch
from torch import Tensor, nn

import architecture_jobs
import mixture_jobs
import tiny_jobs
from meshwright.assemble.axes import mesh_sizes
from meshwright.assemble.check import check
from meshwright.describe.experts import read_call
from meshwright.describe.model import describe
from meshwright.errors import Refused
from meshwright.facts.model import ExpertFacts, ModelFacts
from meshwright.facts.strategy import Strategy
from meshwright.recording.blueprint import model_to_read
from meshwright.runtime.place import place_for
from meshwright.strategies import inner_axis
from meshwright.strategies.expert.exchange import spread
from meshwright.strategies.expert.proof import prove

EXPERTS, WIDTH = 4, 8


@cache
def facts(name: str) -> ModelFacts:
    return describe(mixture_jobs.MIXTURES[name])


def mixture(**changes: object) -> ExpertFacts:
    fields = {"experts": EXPERTS, "parameters": ("experts.weight",), "chosen": 2, "width": WIDTH, "weighted": True}
    return ExpertFacts(module="experts", **{**fields, **changes})  # type: ignore[arg-type]


class Plain(nn.Module):
    """One matrix per expert."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = EXPERTS
        self.weight = nn.Parameter(torch.empty(EXPERTS, WIDTH, WIDTH, device="meta"))

    def forward(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        every = torch.einsum("td,edf->tef", x, self.weight)
        return (every.gather(1, index[..., None].expand(-1, -1, WIDTH)) * weights[..., None]).sum(1)


class Counted(Plain):
    """Reads the number of its experts."""

    def forward(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        return super().forward(x, index, weights) if self.num_experts == len(self.weight) else x


class Normalised(Plain):
    """A token's result depends on the other tokens."""

    def forward(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        return super().forward(x - x.mean(0), index, weights)


class Dropping(Plain):
    """Drops tokens beyond a capacity."""

    def forward(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        first = torch.nn.functional.one_hot(index, EXPERTS).sum(1).cumsum(0) <= 3
        return super().forward(x, index, weights * first.gather(1, index))


class Mixed(Plain):
    """A token's result is no sum over its experts."""

    def forward(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        return super().forward(x, index, weights).tanh()


def test_a_module_of_experts_is_proved() -> None:
    proof = prove(Plain(), mixture(), 2)
    assert not proof.failed and proof.counters == {"num_experts": 2}
    assert not prove(Counted(), mixture(), 4).failed


@pytest.mark.parametrize("kind", [Normalised, Dropping, Mixed])
def test_a_module_that_is_more_than_its_experts_is_not(kind: type[nn.Module]) -> None:
    assert "if each rank computes the rows of its own experts" in prove(kind(), mixture(), 2).failed


def test_a_large_module_is_proved_in_small() -> None:
    wide = Plain()
    wide.weight = nn.Parameter(torch.empty(EXPERTS, 1 << 14, 1 << 14, device="meta"))
    narrow = prove(wide, mixture(width=1 << 14), 2)
    assert "cannot be run so" in narrow.failed  # its forward knows its width, and no attribute does


def test_what_is_not_proved_is_said() -> None:
    assert "has 4 experts, which 3 do not divide" in prove(Plain(), mixture(), 3).failed
    counting = Plain()
    counting.register_buffer("seen", torch.zeros(EXPERTS, device="meta"))
    assert "has buffers" in prove(counting, mixture(), 2).failed


def test_the_arguments_of_a_call_are_known_by_their_shapes() -> None:
    x, index, weights = torch.randn(5, 8), torch.zeros(5, 2, dtype=torch.int64), torch.rand(5, 2)
    call = read_call((x, index), {"weights": weights})
    assert call is not None and call.keys == (0, 1, "weights") and call.chosen == 2
    assert read_call((x, weights), {}) is read_call((x, index), {}) is read_call((x, index, weights, 3), {}) is None
    one = read_call((x, index[:, 0]), {})
    assert one is not None and one.chosen == 1 and one.weights is None


def test_experts_are_found_by_structure() -> None:
    stacked, listed = facts("stacked by hand").experts, facts("list by hand").experts
    assert [one.module for one in stacked] == ["blocks.0.mixture.experts", "blocks.1.mixture.experts"]
    assert all(one.stacked and one.chosen == 2 and one.experts == 4 for one in stacked)
    assert [one.caller for one in listed] == ["blocks.0.mixture", "blocks.1.mixture"]
    assert all(not one.stacked and len(one.parameters) == 16 for one in listed)
    assert stacked[0].rows == listed[0].rows == 2 * architecture_jobs.LENGTH
    assert ModelFacts.from_json(facts("list by hand").to_json()) == facts("list by hand")


def test_a_plain_transformer_has_none() -> None:
    plain = describe(tiny_jobs.transformer)
    assert plain.experts == ()
    with pytest.raises(Refused, match="ep=2 divides experts, and none were found"):
        check(tiny_jobs.transformer, plain, Strategy.parse("ep=2"), place_for("cpu", 2))


@pytest.mark.parametrize(
    ("text", "ranks", "cause"),
    [
        ("ep=3", 3, "has 4 experts, which 3 ranks cannot divide"),
        ("zero2,ep=2", 4, "zero2 sums all gradients over the same ranks; use ep=2 with ddp, fsdp"),
        ("hsdp=2x2,ep=2", 8, "hsdp sums all gradients over the same ranks"),
        ("fsdp,ep=2,offload=optimizer", 4, "offload=optimizer is not built for ep=2"),
        ("ep=2,bf16,compile", 2, "compile is not built for ep"),
        ("ep=2,tp=2", 4, "divides only experts that are stacked weights"),
    ],
)
def test_what_it_does_not_go_with_is_refused_by_name(text: str, ranks: int, cause: str) -> None:
    name = "list by hand"
    with pytest.raises(Refused, match=cause):
        check(mixture_jobs.MIXTURES[name], facts(name), Strategy.parse(text), place_for("cpu", ranks))


def test_its_ranks_are_data_ranks() -> None:
    alone, both = Strategy.parse("ep=4").resolve(4), Strategy.parse("fsdp,ep=2,tp=2").resolve(8)
    assert str(alone) == "ddp=1,ep=4" and alone.data_ranks == 4 and alone.inner_ranks == 1
    assert str(both) == "fsdp=2,tp=2,ep=2" and both.data_ranks == both.shards == 4 and both.inner_ranks == 2
    assert mesh_sizes(both) == {"data": 2, "expert": 2, "tensor": 2}


def test_the_plan_of_a_mixture_names_what_changes() -> None:
    job = mixture_jobs.MIXTURES["stacked by hand"]
    plan = inner_axis(Strategy.parse("ep=2").axes[0]).plan(model_to_read(job.model), facts("stacked by hand"), 2)
    assert not plan.failed and plan.counters.keys() == {one.module for one in plan.mixtures}


def test_balanced_routing_spreads_rows() -> None:
    assert spread(10, 4) == [3, 3, 2, 2] and sum(spread(7, 8)) == 7
