"""Validate strategies, whether they were read from text, built in Python or changed with `replace`."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from itertools import combinations
from typing import TYPE_CHECKING, get_args

from meshwright.errors import ContradictoryTerms, StrategyError
from meshwright.facts import grammar
from meshwright.facts.data_axis import DATA_AXES, find_traits
from meshwright.facts.model_axis import MODEL_AXES, conflict
from meshwright.facts.precision import FORMATS

if TYPE_CHECKING:
    from meshwright.facts.strategy import Strategy

_WORDS = {
    "precision": tuple(FORMATS),
    "recompute": get_args(grammar.Recompute),
    "offload": get_args(grammar.Offload),
    "sync": get_args(grammar.Sync),
    "reduce": get_args(grammar.Reduce),
    "loss": get_args(grammar.Loss),
    "engine": get_args(grammar.Engine),
}
_OPTIONAL_SIZES = ("data_size", "hsdp_replicas", "micro_batch")


def check(strategy: Strategy) -> None:
    """Raise an error for the first rule that a strategy breaks."""
    _check_words(strategy)
    _check_sizes(strategy)
    _check_data_axis(strategy)
    _check_folder(strategy)
    for first, second, why in clashes(strategy):
        raise ContradictoryTerms(f"Strategy terms {first!r} and {second!r} exclude each other: {why}.")


def clashes(strategy: Strategy) -> Iterator[tuple[str, str, str]]:
    """Yield each pair of terms that exclude each other, and why."""
    terms = [term for term in strategy.axes if term.size > 1]
    axes = [f"{term.word}={term.size}" for term in terms]
    if strategy.auto:
        named = [strategy.data, *axes] if strategy.data else axes
        yield from (("auto", axis, "auto lets the planner choose every axis") for axis in named)
    if strategy.data and strategy.traits.one_process:
        why = f"{strategy.data} keeps the whole model in one process; name ddp or fsdp, or no data axis"
        yield from ((strategy.data, axis, why) for axis in axes)
    for first, second in combinations(terms, 2):
        if why := conflict(first.traits, second.traits):
            yield f"{first.word}={first.size}", f"{second.word}={second.size}", why
    if strategy.pure and not strategy.number_format.is_low:
        why = "pure leaves out the fp32 master weights, and fp32 has no others; name bf16 or fp16"
        yield strategy.precision, "pure", why
    if strategy.autocast and not strategy.number_format.autocasts:
        yield strategy.precision, "autocast", "autocast lowers operators to bf16 or fp16; name one of them"
    if strategy.autocast and strategy.pure:
        yield "autocast", "pure", "autocast casts fp32 parameters, and pure has none; keep one of them"
    if strategy.sync == "last":
        if "gradients" not in strategy.traits.shards:
            yield strategy.data or "no data axis", "sync=last", "gradients that are not sharded are always reduced once"
        if strategy.engine == "deepspeed":
            yield "engine=deepspeed", "sync=last", "DeepSpeed reduces sharded gradients after each micro-batch"
    if strategy.reduce != "fp32":
        yield from _reduce_clashes(strategy)
    if strategy.loss == "pieced":
        yield from _pieced_clashes(strategy)
    if strategy.variant and strategy.variant not in find_traits(strategy.data).variants:
        owners = " and ".join(word for word, traits in DATA_AXES.items() if strategy.variant in traits.variants)
        yield strategy.data or "no data axis", strategy.variant, f"only {owners} has this suffix"


def _reduce_clashes(strategy: Strategy) -> Iterator[tuple[str, str, str]]:
    term, data = f"reduce={strategy.reduce}", strategy.data or "no data axis"
    if strategy.auto:
        yield "auto", term, "the planner does not choose how gradients are rounded; name the axes"
    if strategy.precision != strategy.reduce:
        why = f"gradients are rounded to {strategy.reduce} only if the model computes in it; name {strategy.reduce}"
        yield strategy.precision, term, why
    if strategy.pure:
        yield f"{strategy.precision}:pure", term, f"pure always sums gradients in {strategy.precision}"
    if strategy.traits.one_process:
        yield data, term, "one process sums no gradients over ranks"
    if strategy.data_size == 1 and strategy.batch_splits == 1:
        yield f"{data}=1", term, "one rank sums no gradients over ranks"
    if strategy.traits.gathers and not strategy.reduces_each:
        # FSDP2 has one dtype for both sums.
        cause = "sync=last" if strategy.sync == "last" else f"{data}:{strategy.variant}"
        why = f"FSDP2 would also add up whole gradients of micro-batches in {strategy.reduce}; use ddp, zero1 or zero2"
        yield cause, term, why


def _pieced_clashes(strategy: Strategy) -> Iterator[tuple[str, str, str]]:
    term = "loss=pieced"
    if strategy.engine == "deepspeed":
        yield "engine=deepspeed", term, "DeepSpeed runs the model and its loss itself"
    if strategy.autocast:
        why = f"autocast chooses the dtype of each product as it runs; use {strategy.precision}"
        yield f"{strategy.precision}:autocast", term, why
    if strategy.traits.many_devices:
        yield strategy.data or "", term, "DataParallel gathers the outputs of all devices; use ddp"
    for axis in strategy.axes:
        if axis.size > 1 and not axis.traits.pieces_loss:
            yield f"{axis.word}={axis.size}", term, f"{axis.word} needs the whole result of the output layer"


def _check_words(strategy: Strategy) -> None:
    for field, valid in _WORDS.items():
        _check_word(strategy, field, valid)
    if strategy.data is not None:
        _check_word(strategy, "data", DATA_AXES)
    for term in strategy.axes:
        grammar.pick(term.word, MODEL_AXES, term=str(term), what="axis")
        if term.suffix:
            grammar.pick(term.suffix, term.traits.suffixes, term=str(term), what=term.traits.suffix_name)
    if strategy.variant:
        _check_word(strategy, "variant", [suffix for traits in DATA_AXES.values() for suffix in traits.variants])


def _check_word(strategy: Strategy, field: str, valid: Collection[str]) -> None:
    word = getattr(strategy, field)
    if word not in valid:
        grammar.pick(str(word), valid, term=f"{field}={word}", what="value")


def _check_sizes(strategy: Strategy) -> None:
    sizes = {field: number for field in _OPTIONAL_SIZES if (number := getattr(strategy, field)) is not None}
    for field, number in [*sizes.items(), *((term.word, term.size) for term in strategy.axes)]:
        # A bool is an int in Python, but a size of True is a mistake.
        text = str(number) if type(number) is int else None
        if text is None or number < 1:
            grammar.count(text, term=f"{field}={number}", example=f"{field}=2")


def _check_data_axis(strategy: Strategy) -> None:
    traits = strategy.traits
    if not traits.sized and strategy.data_size is not None:
        found = strategy.data or "no data axis"
        raise StrategyError(f"data_size={strategy.data_size} was given with {found}; name a data axis, as in ddp=2.")
    if traits.hybrid != (strategy.hsdp_replicas is not None):
        raise StrategyError("hsdp needs hsdp_replicas, and only hsdp takes them; in text, hsdp=2x4.")
    if traits.hybrid and (strategy.data_size is None or strategy.data_size % (strategy.hsdp_replicas or 1)):
        raise StrategyError("hsdp needs a data_size that is a multiple of hsdp_replicas; in text, hsdp=2x4.")


def _check_folder(strategy: Strategy) -> None:
    if (strategy.offload == "nvme") != bool(strategy.nvme):
        raise StrategyError(
            "offload=nvme needs a folder, and only offload=nvme takes one; in text, offload=nvme:/scratch."
        )
    if "," in strategy.nvme or strategy.nvme != strategy.nvme.strip():
        raise StrategyError(
            f"The folder {strategy.nvme!r} of offload=nvme contains a comma or an outer space, which a strategy's text "
            "cannot express; choose another folder."
        )
