"""What FSDP gathers together: found by size, or chosen by class, name and least size."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshwright.describe.model import describe
from meshwright.errors import JobError
from meshwright.facts.model import ModelFacts
from minimal import WIDTH, Block, make_job

BLOCK = sum(parameter.numel() for parameter in Block().parameters())


class Language(nn.Module):
    """Blocks between an embedding and a head; the head may be tied, read as a function, or small."""

    def __init__(self, *, vocabulary: int = 64, tied: bool = False, reads: bool = False) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, vocabulary, bias=False)
        self.reads = reads
        if tied:
            self.head.weight = self.token.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens)
        for layer in self.layers:
            x = layer(x)
        x = self.norm(x)
        if self.reads:
            return self.head(x) + x @ self.token.weight.t()
        return self.head(x)


def facts_of(units: Any = None, **options: Any) -> ModelFacts:
    job = make_job(
        model=lambda: Language(**options),
        inputs=lambda batch: (batch["tokens"],),
        loss=lambda output, batch: (output.logsumexp(-1).sum(), len(batch["tokens"])),
        sample=lambda count: {"tokens": torch.arange(count * 5).reshape(count, 5) % 64},
        units=units,
    )
    return describe(job)


LAYERS = ("layers.0", "layers.1", "layers.2")


def test_large_embeddings_and_heads_are_units() -> None:
    facts = facts_of()
    assert WIDTH * 64 >= BLOCK
    assert facts.shard_units == ("token", *LAYERS, "head")
    assert facts.blocks == LAYERS
    assert facts.read_outside == ()


@pytest.mark.parametrize(
    "options", [{"vocabulary": 8}, {"tied": True}], ids=["small ones stay around", "tied ones cannot be alone"]
)
def test_otherwise_the_blocks_are(options: dict[str, Any]) -> None:
    assert facts_of(**options).shard_units == LAYERS


def test_a_weight_that_others_read_stays_around() -> None:
    facts = facts_of(reads=True)
    assert facts.shard_units == (*LAYERS, "head")
    assert facts.read_outside == ()


@pytest.mark.parametrize(
    ("units", "found"),
    [
        (["Block"], LAYERS),
        (["layers.*"], LAYERS),
        (["layers.[01]", "head"], ("layers.0", "layers.1", "head")),
        (["layers.*.up", "Embedding"], ("token", "layers.0.up", "layers.1.up", "layers.2.up")),
        (["Block", "layers.*.up"], tuple(n for layer in LAYERS for n in (layer, f"{layer}.up"))),
        (1000, ()),
        (BLOCK, ("token", *LAYERS, "head")),
        (30, ("token", *(f"{layer}.{part}" for layer in LAYERS for part in ("up", "down")), "head")),
    ],
)
def test_chosen_units(units: Any, found: tuple[str, ...]) -> None:
    facts = facts_of(units)
    assert facts.shard_units == found
    assert facts.blocks == LAYERS


@pytest.mark.parametrize(
    ("units", "sentence"),
    [
        (["Blok"], "'Blok', which is no class and no name of a module in the model; its classes are Embedding"),
        (["layers"], r"never called; write 'layers\.\*'"),
        ([3], "must be a list of classes or names"),
        ("Block", "must be a list of classes or names"),
        (0, "must be a list of classes or names of modules, or a number"),
    ],
)
def test_wrong_choices(units: Any, sentence: str) -> None:
    with pytest.raises(JobError, match=sentence):
        facts_of(units)


def test_a_tied_module_cannot_be_chosen() -> None:
    with pytest.raises(JobError, match="shares a parameter"):
        facts_of(["head"], tied=True)


def test_a_chosen_module_must_be_called() -> None:
    class Around(Language):
        def forward(self, tokens: Tensor) -> Tensor:
            return nn.functional.linear(self.layers[0](self.token(tokens)), self.head.weight)

    job = make_job(
        model=Around,
        inputs=lambda batch: (batch["tokens"],),
        loss=lambda output, batch: (output.sum(), len(batch["tokens"])),
        sample=lambda count: {"tokens": torch.zeros(count, 5, dtype=torch.long)},
        units=["head"],
    )
    with pytest.raises(JobError, match="head, which the model's forward does not call"):
        describe(job)
