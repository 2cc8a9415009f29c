import itertools
import json
import pickle
from functools import cache
from typing import Any

import pytest

from meshwright.errors import ContradictoryTerms, Refused, StrategyError, UnknownTerm
from meshwright.facts.grammar import table
from meshwright.facts.strategy import AxisTerm, Strategy

DATA: list[dict[str, Any]] = [
    {},
    {"data": "ddp"},
    {"data": "ddp", "data_size": 4},
    {"data": "zero1"},
    {"data": "zero2", "data_size": 2},
    {"data": "fsdp"},
    {"data": "fsdp", "data_size": 8},
    {"data": "fsdp", "variant": "grad-op"},
    {"data": "fsdp", "data_size": 3, "variant": "no-shard"},
    {"data": "hsdp", "data_size": 8, "hsdp_replicas": 2},
]
LONE_DATA: list[dict[str, Any]] = [{"data": "single"}, {"data": "dp"}, {"data": "dp", "data_size": 4}, {"auto": True}]
MODEL: list[dict[str, Any]] = [
    {},
    {"axes": (AxisTerm("tp", 2),)},
    {"axes": (AxisTerm("op", 4),)},
    {"axes": (AxisTerm("tp", 2), AxisTerm("layers", 2))},
    {"axes": (AxisTerm("layers", 3),)},
    *({"axes": (AxisTerm("pp", 4, name),)} for name in ("gpipe", "1f1b", "interleaved", "zb", "zbv", "dualpipev")),
    {"axes": (AxisTerm("pp", 2), AxisTerm("tp", 2))},
]
PRECISION: list[dict[str, Any]] = [
    {},
    {"precision": "bf16"},
    {"precision": "fp16", "pure": True},
    {"precision": "bf16", "autocast": True},
    {"precision": "fp8"},
]
RECOMPUTE: list[dict[str, Any]] = [{}, {"recompute": "selective"}, {"recompute": "full"}]
OFFLOAD: list[dict[str, Any]] = [
    {},
    {"offload": "optimizer"},
    {"offload": "params"},
    {"offload": "nvme", "nvme": "/Fast Disk/a=b:c"},
]
REST: list[dict[str, Any]] = [
    {},
    {"micro_batch": 1, "graphs": True},
    {"compile": True, "engine": "deepspeed", "micro_batch": 16},
]


@cache
def every_strategy() -> list[Strategy]:
    axes = [*itertools.product(DATA, MODEL), *((data, {}) for data in LONE_DATA)]
    policies = itertools.product(PRECISION, RECOMPUTE, OFFLOAD, REST)
    synced = [{"data": word, "sync": "last", "micro_batch": 2} for word in ("zero2", "fsdp")]
    once = [Strategy(**merged(data, *p)) for data, *p in itertools.product(synced, PRECISION, RECOMPUTE, OFFLOAD)]
    rounded = [{"data": word, "precision": "bf16", "reduce": "bf16"} for word in ("ddp", "zero1", "zero2", "fsdp")]
    low = [Strategy(**merged(*parts)) for parts in itertools.product(rounded, RECOMPUTE, OFFLOAD, REST)]
    pieced = [Strategy(data=word, loss="pieced", precision="bf16") for word in ("single", "ddp", "zero1", "fsdp")]
    experts = [Strategy.parse(f"{data},ep=4{rest}") for data in ("ddp", "fsdp") for rest in ("", ",tp=2", ",pp=2:1f1b")]
    tokens = [Strategy.parse(f"{data},cp=4{rest}") for data in ("ddp", "fsdp") for rest in ("", ",tp=2", ",pp=2:1f1b")]
    every = (Strategy(**merged(*a, *p)) for a, p in itertools.product(axes, policies))
    return [*every, *once, *low, *pieced, *experts, *tokens]


def merged(*parts: dict[str, Any]) -> dict[str, Any]:
    return {field: value for part in parts for field, value in part.items()}


@pytest.mark.parametrize("every", [7, pytest.param(1, marks=pytest.mark.thorough)])
def test_text_round_trip(every: int) -> None:
    """Of every seventh, and of all."""
    strategies = every_strategy()[::every]
    assert len(strategies) * every > 10_000
    assert [s for s in strategies if Strategy.parse(str(s)) != s] == []


def test_different_strategies_have_different_texts() -> None:
    strategies = every_strategy()
    assert len({str(s) for s in strategies}) == len(set(strategies)) == len(strategies)


def test_json_and_pickle_round_trip() -> None:
    for strategy in every_strategy()[::97]:
        assert Strategy.from_json(json.loads(json.dumps(strategy.to_json()))) == strategy
        assert pickle.loads(pickle.dumps(strategy)) == strategy


def test_every_row_prints_something() -> None:
    for row in table():
        assert any(row.show(strategy) for strategy in every_strategy()), row.forms


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("bf16,tp=2,fsdp", "fsdp,tp=2,bf16"),
        (" fsdp , tp=2 ", "fsdp,tp=2"),
        ("zero3", "fsdp"),
        ("zero3=4", "fsdp=4"),
        ("fsdp=4:grad-op", "fsdp=4:grad-op"),
        ("pp=2", "pp=2:1f1b"),
        ("pp=1:gpipe,ddp", "ddp"),
        ("ddp,fp32,ac=none,engine=torch,tp=1", "ddp"),
        ("fp32", "fp32"),
        ("ac=none", "fp32"),
        ("bf16", "bf16"),
        ("bf16,auto", "auto,bf16"),
        ("mb=04,compile,fsdp", "fsdp,mb=4,compile"),
        ("sync=last,fsdp,mb=2", "fsdp,mb=2,sync=last"),
        ("ddp,sync=each", "ddp"),
        ("fsdp,sync=last,pp=2:1f1b", "fsdp,pp=2:1f1b,sync=last"),
        ("reduce=bf16,mb=2,zero2,bf16,sync=last", "zero2,bf16,mb=2,sync=last,reduce=bf16"),
        ("compile,reduce=bf16,bf16:autocast", "bf16:autocast,reduce=bf16,compile"),
        ("fsdp,bf16,reduce=fp32", "fsdp,bf16"),
        ("offload=nvme:/Data,zero2,engine=deepspeed", "zero2,offload=nvme:/Data,engine=deepspeed"),
    ],
)
def test_canonical_text(text: str, canonical: str) -> None:
    assert str(Strategy.parse(text)) == canonical


def test_parse_sets_the_fields() -> None:
    strategy = Strategy.parse("hsdp=2x4,tp=2,pp=5:zb,bf16:pure,ac=full,offload=params,mb=7,compile,engine=deepspeed")
    assert strategy == Strategy(
        data="hsdp",
        data_size=8,
        hsdp_replicas=2,
        axes=(AxisTerm("tp", 2), AxisTerm("pp", 5, "zb")),
        precision="bf16",
        pure=True,
        recompute="full",
        offload="params",
        micro_batch=7,
        compile=True,
        engine="deepspeed",
    )
    assert Strategy.parse("fp32") == Strategy()


def test_axes_are_normalised() -> None:
    assert Strategy(axes=(AxisTerm("pp", 2),)).schedule == "1f1b"
    one_stage = Strategy(axes=(AxisTerm("pp", 1, "zb"), AxisTerm("tp", 2)))
    assert one_stage == Strategy(axes=(AxisTerm("tp", 2),)) and one_stage.schedule == ""
    assert Strategy.parse("single,tp=1") == Strategy(data="single")
    assert Strategy.parse("tp=2,op=1") == Strategy(axes=(AxisTerm("tp", 2),))
    strategy = Strategy.parse("pp=2:zb,tp=4")
    assert [term.word for term in strategy.axes] == ["tp", "pp"]
    assert (strategy.stage_ranks, strategy.inner_ranks, strategy.model_ranks) == (2, 4, 8)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("", ["Empty strategy term", "fsdp"]),
        ("fsdp,,tp=2", ["Empty strategy term"]),
        ("fsdpp", ["Unknown strategy term 'fsdpp'; did you mean 'fsdp'?"]),
        ("dpp", ["'dpp'", "did you mean 'ddp'?"]),
        ("fdsp", ["'fdsp'", "did you mean 'fsdp'?"]),
        ("FSDP", ["'FSDP'", "did you mean 'fsdp'?"]),
        ("ddp,tpp=4", ["'tpp=4'", "did you mean 'tp=4'?"]),
        ("tp2", ["'tp2'", "did you mean 'tp=N'?"]),
        ("bf61", ["'bf61'", "did you mean 'bf16'?"]),
        ("quux", ["'quux'. Valid: auto, single"]),
        ("tp=0", ["'tp=0'", "at least 1", "tp=2"]),
        ("tp=-1", ["'tp=-1'", "at least 1"]),
        ("tp=two", ["'tp=two'", "whole number"]),
        ("tp=²", ["whole number"]),
        ("tp", ["'tp'", "tp=2"]),
        ("tp=2:zb", ["'tp=2:zb'", "'zb'", "write 'tp=2'"]),
        ("fsdp=", ["'fsdp='", "fsdp=4"]),
        ("hsdp", ["'hsdp'", "hsdp=2x4"]),
        ("hsdp=2", ["'hsdp=2'", "hsdp=2x4"]),
        ("hsdp=2x0", ["'hsdp=2x0'", "at least 1"]),
        ("hsdp=2x2x2", ["'hsdp=2x2x2'", "hsdp=2x4"]),
        ("hsdp=2x2:grad-op", ["'grad-op'", "write 'hsdp=2x2'"]),
        ("single=2", ["'single=2'", "takes no value"]),
        ("ddp:grad-op", ["'ddp:grad-op'", "takes no suffix"]),
        ("fsdp:full-shard", ["'fsdp:full-shard'", "grad-op, no-shard", "fsdp alone shards everything"]),
        ("pp=2:gpip", ["'gpip'", "did you mean 'gpipe'?", "1f1b, interleaved, zb, zbv, dualpipev"]),
        ("pp:zb", ["'pp:zb'", "pp=4:1f1b"]),
        ("bf16:pur", ["'pur'", "did you mean 'pure'?"]),
        ("bf16:autocats", ["'autocats'", "did you mean 'autocast'?"]),
        ("bf16=2", ["'bf16=2'", "takes no value"]),
        ("ac=ful", ["'ful'", "did you mean 'full'?"]),
        ("ac", ["no value", "none, selective, full"]),
        ("offload=nvme", ["needs a folder", "offload=nvme:/scratch"]),
        ("offload=params:x", ["takes no suffix"]),
        ("offload=param", ["did you mean 'params'?"]),
        ("engine=deep", ["torch, deepspeed"]),
        ("compile=1", ["write 'compile'"]),
        ("mb=1.5", ["'mb=1.5'", "whole number"]),
    ],
)
def test_unknown_terms(text: str, parts: list[str]) -> None:
    with pytest.raises(UnknownTerm) as caught:
        Strategy.parse(text)
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("text", "first", "second"),
    [
        ("ddp,fsdp", "'ddp'", "'fsdp'"),
        ("fsdp,zero3", "'fsdp'", "'zero3'"),
        ("tp=2,bf16,tp=2", "'tp=2'", "repeat"),
        ("tp=2,tp=4", "'tp=2'", "'tp=4'"),
        ("bf16,fp16", "'bf16'", "'fp16'"),
        ("ac=full,ac=none", "'ac=full'", "'ac=none'"),
        ("single,tp=2", "'single'", "'tp=2'"),
        ("dp,op=2", "'dp'", "'op=2'"),
        ("tp=2,op=2", "'tp=2'", "'op=2'"),
        ("single,pp=2", "'single'", "'pp=2'"),
        ("dp,layers=2", "'dp'", "'layers=2'"),
        ("pp=2,layers=3", "'pp=2'", "'layers=3'"),
        ("fp32:pure", "'fp32'", "'pure'"),
        ("fp32:autocast", "'fp32'", "'autocast'"),
        ("fp8:autocast", "'fp8'", "'autocast'"),
        ("auto,fsdp", "'auto'", "'fsdp'"),
        ("auto,tp=2", "'auto'", "'tp=2'"),
        ("ddp,sync=last", "ddp", "sync=last"),
        ("fsdp:no-shard,sync=last", "fsdp", "reduced once"),
        ("zero2,sync=last,engine=deepspeed", "engine=deepspeed", "sync=last"),
        ("ddp,reduce=bf16", "'fp32'", "name bf16"),
        ("ddp,fp16,reduce=bf16", "'fp16'", "name bf16"),
        ("zero2,bf16:pure,reduce=bf16", "'bf16:pure'", "always sums gradients in bf16"),
        ("single,bf16,reduce=bf16", "'single'", "one process"),
        ("dp=2,bf16,reduce=bf16", "'dp'", "one process"),
        ("ddp=1,bf16,reduce=bf16", "'ddp=1'", "one rank"),
        ("auto,bf16,reduce=bf16", "'auto'", "name the axes"),
        ("fsdp,bf16,sync=last,reduce=bf16", "'sync=last'", "use ddp, zero1 or zero2"),
        ("fsdp,bf16,pp=2,sync=last,reduce=bf16", "'sync=last'", "use ddp, zero1 or zero2"),
        ("fsdp:no-shard,bf16,reduce=bf16", "'fsdp:no-shard'", "use ddp, zero1 or zero2"),
        ("dp,loss=pieced", "'dp'", "use ddp"),
        ("op=2,loss=pieced", "'op=2'", "whole result"),
        ("bf16:autocast,loss=pieced", "'bf16:autocast'", "use bf16"),
        ("zero1,engine=deepspeed,loss=pieced", "'engine=deepspeed'", "itself"),
    ],
)
def test_contradictory_terms(text: str, first: str, second: str) -> None:
    with pytest.raises(ContradictoryTerms) as caught:
        Strategy.parse(text)
    assert first in str(caught.value)
    assert second in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "part"),
    [
        ({"data": "zero3"}, "did you mean 'zero"),
        ({"precision": "bf61"}, "did you mean 'bf16'?"),
        ({"axes": (AxisTerm("tp", 0),)}, "tp=0"),
        ({"axes": (AxisTerm("tp", True),)}, "whole number"),
        ({"axes": (AxisTerm("pp", "2"),)}, "whole number"),  # type: ignore[arg-type]
        ({"axes": (AxisTerm("tpp", 2),)}, "did you mean 'tp'?"),
        ({"axes": (AxisTerm("pp", 2, "1f2b"),)}, "did you mean '1f1b'?"),
        ({"micro_batch": -1}, "micro_batch=-1"),
        ({"data_size": 2}, "no data axis"),
        ({"data": "single", "data_size": 2}, "single"),
        ({"data": "hsdp", "data_size": 8}, "hsdp_replicas"),
        ({"data": "hsdp", "data_size": 8, "hsdp_replicas": 3}, "multiple"),
        ({"data": "fsdp", "hsdp_replicas": 2}, "only hsdp"),
        ({"data": "ddp", "variant": "grad-op"}, "only fsdp"),
        ({"offload": "nvme"}, "folder"),
        ({"nvme": "/a"}, "folder"),
        ({"offload": "nvme", "nvme": "/a,b"}, "comma"),
        ({"offload": "nvme", "nvme": "/a "}, "space"),
    ],
)
def test_a_strategy_built_in_python_is_checked_too(fields: dict[str, Any], part: str) -> None:
    with pytest.raises(StrategyError) as caught:
        Strategy(**fields)
    assert part in str(caught.value)


@pytest.mark.parametrize(
    ("text", "ranks", "resolved"),
    [
        ("fsdp", 8, "fsdp=8"),
        ("fsdp,tp=2,bf16", 8, "fsdp=4,tp=2,bf16"),
        ("fsdp:grad-op,pp=2", 4, "fsdp=2:grad-op,pp=2:1f1b"),
        ("fsdp=4,tp=2", 8, "fsdp=4,tp=2"),
        ("tp=2", 4, "ddp=2,tp=2"),
        ("tp=4", 4, "tp=4"),
        ("op=2,pp=2", 8, "ddp=2,op=2,pp=2:1f1b"),
        ("bf16", 4, "ddp=4,bf16"),
        ("bf16", 1, "single,bf16"),
        ("fp32", 1, "single"),
        ("single", 1, "single"),
        ("fsdp", 1, "fsdp=1"),
        ("dp", 4, "dp=4"),
        ("hsdp=2x3", 6, "hsdp=2x3"),
    ],
)
def test_resolve(text: str, ranks: int, resolved: str) -> None:
    found = Strategy.parse(text).resolve(ranks)
    assert str(found) == resolved
    assert found.resolve(ranks) == found
    assert found.data_ranks * found.model_ranks == ranks
    assert found.replicas * found.shards == found.data_ranks


@pytest.mark.parametrize(
    ("text", "ranks", "message"),
    [
        ("hsdp=2x3", 4, "hsdp=2x3 needs 6 ranks, but 4 were given; hsdp=2x2, hsdp=1x4 or hsdp=4x1 would fit."),
        ("fsdp=3,tp=2", 8, "fsdp=3,tp=2 needs 6 ranks, but 8 were given; fsdp=4 would fit."),
        ("fsdp=3:grad-op", 4, "fsdp=4:grad-op would fit."),
        ("fsdp=4,tp=3", 8, "fsdp=4,tp=3 needs 12 ranks, but 8 were given; tp=2 would fit."),
        ("tp=3", 4, "tp=3 needs a multiple of 3 ranks, but 4 were given; tp=2 or tp=4 would fit."),
        ("tp=4", 6, "tp=3, tp=2 or tp=6 would fit."),
        ("pp=4", 1, "pp=4:1f1b needs a multiple of 4 ranks, but 1 was given; pp=1 would fit."),
        ("tp=3,layers=3", 4, "give it a multiple of 9 ranks, or change more than one size."),
        ("single", 4, "single runs on 1 rank, but 4 were given; ddp is the simplest strategy for 4."),
        ("ddp", 0, "at least 1"),
        ("auto,bf16", 4, "let the planner choose"),
    ],
)
def test_resolve_refuses_and_says_what_fits(text: str, ranks: int, message: str) -> None:
    with pytest.raises(Refused) as caught:
        Strategy.parse(text).resolve(ranks)
    assert message in str(caught.value)


def test_resolve_fills_the_ranks_or_refuses() -> None:
    strategies = [strategy for strategy in every_strategy()[::31] if not strategy.auto]
    for strategy, ranks in itertools.product(strategies, (1, 2, 4, 6, 8, 12)):
        try:
            found = strategy.resolve(ranks)
        except Refused as refusal:
            assert str(strategy) in str(refusal)
            fixed = strategy.data_size or strategy.data == "single" or strategy.reduce != "fp32"
            assert fixed or ranks % strategy.model_ranks
        else:
            assert found.data_ranks * found.model_ranks == ranks


@pytest.mark.parametrize(
    ("text", "replicas", "shards"),
    [
        ("single", 1, 1),
        ("tp=4", 1, 1),
        ("dp=4", 4, 1),
        ("ddp=4", 4, 1),
        ("zero1=4", 1, 4),
        ("zero2=4", 1, 4),
        ("fsdp=4", 1, 4),
        ("fsdp=4:grad-op", 1, 4),
        ("fsdp=4:no-shard", 4, 1),
        ("hsdp=2x3", 2, 3),
    ],
)
def test_replicas_and_shards(text: str, replicas: int, shards: int) -> None:
    strategy = Strategy.parse(text)
    assert (strategy.replicas, strategy.shards) == (replicas, shards)


def test_data_ranks_before_resolve_is_an_error() -> None:
    with pytest.raises(ValueError, match="resolve"):
        _ = Strategy.parse("fsdp").data_ranks


@pytest.mark.parametrize(("text", "ranks"), [("ddp,bf16,reduce=bf16", 1), ("tp=2,bf16,reduce=bf16", 2)])
def test_one_data_rank_has_nothing_to_reduce(text: str, ranks: int) -> None:
    with pytest.raises(Refused, match=r"one data rank.*drop reduce=bf16"):
        Strategy.parse(text).resolve(ranks)
    assert Strategy.parse(text).resolve(2 * ranks).reduce == "bf16"
