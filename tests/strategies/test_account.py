"""What each strategy promises that a rank holds, against the formulas of the ZeRO paper."""

from dataclasses import replace
from math import prod

import pytest
from torch import nn
from torch.optim import SGD, AdamW

from meshwright.describe.model import describe
from meshwright.facts.data_axis import DATA_AXES
from meshwright.facts.model import ModelFacts, ParameterFacts
from meshwright.facts.strategy import Strategy
from meshwright.strategies import DATA_STRATEGIES, StateLayout
from minimal import make_job
from promised_states import promised_states

P = 64 * 32 + 32 * 64 + 64  # divides by 8 in every first dim
FACTS = ModelFacts(
    parameters=tuple(
        ParameterFacts(names=(name,), shape=shape, itemsize=4)
        for name, shape in [("up", (64, 32)), ("down", (32, 64)), ("bias", (64,))]
    ),
    blocks=(),
    optimizer_slots=2.0,
)

# Bytes of parameters, gradients and optimizer per parameter of the model, on n ranks.
FORMULAS = {
    "ddp": lambda n: (4, 4, 8),
    "zero1": lambda n: (4, 4, 8 / n),
    "zero2": lambda n: (4, 4 / n, 8 / n),
    "fsdp": lambda n: (4 / n, 4 / n, 8 / n),
    "fsdp:grad-op": lambda n: (4 / n, 4 / n, 8 / n),
    "fsdp:no-shard": lambda n: (4, 4, 8),
    # ZeRO rests in the small dtype, and its fp32 masters lie with the optimizer.
    "zero1,bf16": lambda n: (2, 4, 12 / n),
    "zero2,fp16": lambda n: (2, 4 / n, 12 / n),
    "ddp,bf16": lambda n: (4, 4, 8),
    "fsdp,bf16": lambda n: (4 / n, 4 / n, 8 / n),
    "ddp,bf16:pure": lambda n: (2, 2, 4),
    "zero1,bf16:autocast": lambda n: (4, 4, 8 / n),
    "fsdp,fp16:autocast": lambda n: (4 / n, 4 / n, 8 / n),
    "zero1,bf16:pure": lambda n: (2, 2, 4 / n),
    "zero2,bf16:pure": lambda n: (2, 2 / n, 4 / n),
    "fsdp,fp16:pure": lambda n: (2 / n, 2 / n, 4 / n),
}


def account(text: str, ranks: int, facts: ModelFacts = FACTS) -> tuple[int, ...]:
    strategy = Strategy.parse(text).resolve(ranks)
    memory = promised_states(facts, strategy)
    assert list(memory) == ["parameters", "gradients", "optimizer"]
    return tuple(memory.values())


def layout(text: str, ranks: int) -> StateLayout:
    strategy = Strategy.parse(text).resolve(ranks)
    return DATA_STRATEGIES[str(strategy.data)].layout(strategy)


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("text", FORMULAS)
def test_closed_form(text: str, ranks: int) -> None:
    assert account(text, ranks) == tuple(P * bytes_ for bytes_ in FORMULAS[text](ranks))


@pytest.mark.parametrize(("replicas", "shards"), [(2, 1), (1, 2), (2, 2), (2, 4), (4, 2), (1, 8)])
def test_hybrid_shards_over_its_shards_only(replicas: int, shards: int) -> None:
    assert account(f"hsdp={replicas}x{shards}", replicas * shards) == account("fsdp", shards)


def test_one_process() -> None:
    assert account("single", 1) == (4 * P, 4 * P, 8 * P)
    assert account("dp", 4) == account("single", 1)
    for text in FORMULAS:
        assert account(text, 1) == tuple(P * bytes_ for bytes_ in FORMULAS[text](1))


def test_the_fullest_rank_counts() -> None:
    """Rows that do not divide go to the first ranks: 5 rows on 4 ranks are 2 on the first."""
    odd = replace(FACTS, parameters=(ParameterFacts(names=("odd",), shape=(5, 3), itemsize=4),))
    assert account("fsdp", 4, odd) == (4 * 6, 4 * 6, 8 * 6)
    assert account("zero2", 8, odd) == (4 * 15, 4 * 3, 8 * 3)


def test_a_parameter_without_dims_is_on_every_rank() -> None:
    scalar = replace(FACTS, parameters=(ParameterFacts(names=("scale",), shape=(), itemsize=4),))
    assert account("zero2", 8, scalar) == account("fsdp", 8, scalar) == (4, 4, 8)


def test_what_fsdp_leaves_whole_is_on_every_rank() -> None:
    outside = replace(FACTS, read_outside=("up",))
    assert account("fsdp", 8, outside) == tuple(n * (64 * 32 + (P - 64 * 32) // 8) for n in (4, 4, 8))
    assert account("zero2", 8, outside) == account("zero2", 8)


def test_frozen_and_unused_parameters_have_no_gradient() -> None:
    up, down, bias = FACTS.parameters
    facts = replace(FACTS, parameters=(replace(up, trainable=False), replace(down, used=False), bias))
    assert account("ddp", 2, facts) == (4 * P, 4 * 64, 8 * 64)
    assert account("fsdp", 2, facts) == (2 * P, 2 * 64, 4 * 64)


@pytest.mark.parametrize(("optimizer", "slots"), [(AdamW, 2), (lambda p: SGD(p, lr=0.1, momentum=0.9), 1), (SGD, 0)])
def test_the_optimizer_of_a_job_counts(optimizer: object, slots: int) -> None:
    facts = describe(make_job(optimizer=optimizer, model=lambda: nn.Linear(4, 4)))
    assert account("zero1", 4, facts)[2] == 20 * 4 * slots / 4


def test_a_tied_weight_counts_once() -> None:
    tied = replace(FACTS, parameters=(replace(FACTS.parameters[0], names=("token", "head")),))
    assert account("ddp", 2, tied)[0] == 4 * 64 * 32


@pytest.mark.parametrize("itemsize", [1, 2, 8])
def test_parameters_that_are_not_fp32_have_their_own_size(itemsize: int) -> None:
    """A model may be built in another dtype, and fp32 casts nothing."""
    frozen = [replace(parameter, itemsize=itemsize, trainable=False) for parameter in FACTS.parameters]
    assert account("ddp", 2, replace(FACTS, parameters=tuple(frozen)))[0] == itemsize * P


@pytest.mark.parametrize(
    ("text", "parameters", "gradients", "optimizer"),
    [
        ("dp", 1, 1, 1),
        ("ddp", 1, 1, 1),
        ("zero1", 1, 1, 8),
        ("zero2", 1, 8, 8),
        ("fsdp", 8, 8, 8),
        ("fsdp:grad-op", 8, 8, 8),
        ("fsdp:no-shard", 1, 1, 1),
        ("hsdp=2x4", 4, 4, 4),
    ],
)
def test_layout(text: str, parameters: int, gradients: int, optimizer: int) -> None:
    found = layout(text, 8)
    assert (found.parameters, found.gradients, found.optimizer) == (parameters, gradients, optimizer)
    # Only ZeRO-1 and 2 keep a small copy beside sharded masters.
    assert layout(f"{text},bf16", 8).masters == text.startswith("zero")


def test_the_table_is_complete() -> None:
    assert list(DATA_STRATEGIES) == list(DATA_AXES)
    assert all(technique.summary for technique in DATA_STRATEGIES.values())
    assert len({technique.summary for technique in DATA_STRATEGIES.values()}) == len(DATA_STRATEGIES)


def test_mesh_axes_hold_all_ranks() -> None:
    for text in ("ddp", "zero1", "zero2", "fsdp", "fsdp:grad-op", "fsdp:no-shard", "hsdp=2x4"):
        strategy = Strategy.parse(text).resolve(8)
        assert prod(DATA_STRATEGIES[str(strategy.data)].axes(strategy).values()) == 8, text
    for text, ranks in (("single", 1), ("dp", 8)):
        strategy = Strategy.parse(text).resolve(ranks)
        assert DATA_STRATEGIES[text].axes(strategy) == {}
