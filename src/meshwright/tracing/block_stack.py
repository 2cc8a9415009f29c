"""The blocks that a model repeats: alike ones in a list, perhaps after others, such as a mixture's dense layers."""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.facts.model import ModelFacts


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
