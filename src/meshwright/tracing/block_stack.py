"""The blocks that a model repeats: alike ones in a list, perhaps after others, such as a mixture's dense layers.

Blocks with equal parameters may still differ: three of four attend to a window, and the fourth to all tokens. The
attributes of their modules tell, apart from numbers, and so does the number of blocks after which their kinds recur.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from torch import nn

from meshwright.facts.job import Job
from meshwright.facts.model import ModelFacts
from meshwright.recording.blueprint import record
from meshwright.torch_private.modules import REGISTERED

_DIGITS = re.compile(r"\d+")


@dataclass(frozen=True)
class BlockStack:
    """A list of blocks that ends with alike ones."""

    name: str
    """The name of the list in the model."""
    blocks: int
    """How many are alike."""
    before: int = 0
    """Other blocks of the list, before those."""


def find_repeated_blocks(facts: ModelFacts) -> BlockStack | None:
    """The list of blocks that a model repeats; None if its last ones differ, or if blocks are not in one list."""
    lists = {name.rpartition(".")[0] for name in facts.blocks}
    if len(lists) != 1 or facts.unseen:
        return None
    name = lists.pop()
    expected = [f"{name}.{index}" for index in range(len(facts.blocks))]
    if list(facts.blocks) != expected:
        return None
    contents = [_content_of(facts, block) for block in expected]
    before = max((place + 1 for place, content in enumerate(contents) if content != contents[-1]), default=0)
    alike = len(contents) - before
    return BlockStack(name, alike, before) if alike > 1 or not before else None


def _content_of(facts: ModelFacts, block: str) -> tuple[object, ...]:
    """What must be equal for two blocks to be alike."""
    start = f"{block}."
    parameters = [
        (tuple(n.removeprefix(start) for n in p.names), p.shape, p.itemsize, p.trainable, p.used)
        for p in facts.parameters
        if p.name.startswith(start)
    ]
    calls = [
        (call.flops, sum(name.startswith(start) for name in call.reads)) for call in facts.calls if call.name == block
    ]
    return tuple(parameters), tuple(calls)


def find_period(job: Job, stack: BlockStack) -> int | None:
    """After how many blocks their kinds recur, 1 if all are of one kind; None if they do not recur."""
    blocks = record(job.model, seed=0, values=False).model.get_submodule(stack.name)
    assert isinstance(blocks, nn.ModuleList | nn.Sequential)
    kinds = [_words_of(block) for block in blocks][stack.before :]
    periods = range(1, len(kinds) // 2 + 1)
    return next((period for period in periods if kinds[period:] == kinds[:-period]), None)


def whole_periods(sizes: tuple[int, int], period: int) -> tuple[int, int]:
    """Two numbers of blocks, at least `sizes`, and as far apart, that hold all kinds equally often."""
    small, large = sizes
    first = -(-small // period) * period
    return first, first - (small - large) // period * period


def _words_of(block: nn.Module) -> tuple[Any, ...]:
    """The attributes of a block's modules that say what it does: no numbers, such as its place or a rate."""
    return tuple(
        (name, key, _DIGITS.sub("", value) if isinstance(value, str) else value)
        if isinstance(value, str | bool | None)
        else (name, key, type(value))
        for name, module in block.named_modules()
        for key, value in vars(module).items()
        if key not in REGISTERED
    )
