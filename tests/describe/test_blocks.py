"""Blocks are what repeats, outermost first; where nothing does, large layers."""

import pytest
import torch
from torch import Tensor, nn

from meshwright.describe.blocks import find_blocks
from meshwright.errors import JobError
from minimal import WIDTH, Block, Blocks


def conv(channels: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels))


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first, self.second = conv(channels), conv(channels)


class TinyResNet(nn.Module):
    """Stages are Sequentials of blocks; blocks hold Sequentials themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = conv(3)
        self.layer1 = nn.Sequential(Residual(3), Residual(3))
        self.layer2 = nn.Sequential(Residual(3), Residual(3))
        self.head = nn.Linear(3, 10)


class TiedGPT(Blocks):
    """The head shares its weight with a layer outside of the blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.leave.weight = self.enter.weight


@pytest.mark.parametrize(
    ("build", "blocks"),
    [
        (Blocks, ("blocks.0", "blocks.1")),
        (TiedGPT, ("blocks.0", "blocks.1")),
        (TinyResNet, ("layer1.0", "layer1.1", "layer2.0", "layer2.1")),
        (lambda: nn.Sequential(Block(), nn.ReLU(), Block()), ("0", "2")),
        (
            lambda: nn.ModuleDict({"encoder": Blocks(), "head": nn.Linear(2, 2)}),
            ("encoder.blocks.0", "encoder.blocks.1"),
        ),
        (
            lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, batch_first=True), 2),
            ("layers.0", "layers.1"),
        ),
    ],
)
def test_what_repeats(build: type[nn.Module], blocks: tuple[str, ...]) -> None:
    assert find_blocks(build()) == blocks


def test_both_towers_of_a_model() -> None:
    model = nn.Transformer(4, 2, 2, 2, 8, batch_first=True)
    expected = [f"{side}.layers.{index}" for side in ("encoder", "decoder") for index in range(2)]
    assert find_blocks(model) == tuple(expected)


def test_hugging_face_gpt2() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_embd=8, n_layer=3, n_head=2, vocab_size=16, n_positions=8)
    model = transformers.GPT2LMHeadModel(config)
    assert find_blocks(model) == ("transformer.h.0", "transformer.h.1", "transformer.h.2")


def test_nothing_repeats() -> None:
    """Layers with a tenth of all parameters or more; the small norm stays with the rest."""
    model = nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.Linear(32, 16), nn.Linear(16, 1))
    assert find_blocks(model) == ("0", "2")


def test_large_layers_that_are_tied_are_no_blocks() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 16))
    model[1].weight = model[0].weight
    assert find_blocks(model) == ("2",)


def test_a_repeated_module_that_is_one_object() -> None:
    """As in ALBERT: the same layer is called again and again, so it is one block."""
    shared = Block()
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ModuleList([shared, shared, shared]))
    found = find_blocks(model)
    assert len(found) == len({id(model.get_submodule(name)) for name in found})


def test_two_shared_blocks_in_turn() -> None:
    first, second = Block(), Block()
    model = nn.ModuleDict({"layers": nn.ModuleList([first, second, first, second])})
    assert find_blocks(model) == ("layers.0", "layers.1")


def test_blocks_that_two_parents_share() -> None:
    shared = [Block(), Block()]
    model = nn.ModuleDict({"encoder": nn.ModuleList(shared), "decoder": nn.ModuleList(shared)})
    assert find_blocks(model) == ("encoder.0", "encoder.1")


def test_a_block_that_shares_a_parameter_with_its_neighbour_is_none() -> None:
    model = Blocks()
    model.blocks.append(Block())
    model.blocks[2].up.weight = model.blocks[1].up.weight
    assert find_blocks(model) == ("blocks.0",)


def test_hint() -> None:
    model = Blocks()
    assert find_blocks(model, hint=["enter", "blocks.1"]) == ("enter", "blocks.1")
    assert find_blocks(model, hint=[]) == ()


@pytest.mark.parametrize("name", ["blocks.7", "bloks", ""])
def test_unknown_hint(name: str) -> None:
    with pytest.raises(JobError) as caught:
        find_blocks(Blocks(), hint=["enter", name])
    assert repr(name) in str(caught.value)
    assert "enter" in str(caught.value)
    assert "blocks.0" in str(caught.value)


def test_hint_that_shares_a_parameter() -> None:
    with pytest.raises(JobError, match=r"'enter'.*shares a parameter"):
        find_blocks(TiedGPT(), hint=["blocks.0", "enter"])


@pytest.mark.parametrize("hint", [["blocks.0", "blocks.0.up"], ["blocks.0.up", "blocks.0"], ["blocks.0", "blocks.0"]])
def test_hint_that_overlaps_itself(hint: list[str]) -> None:
    """A parameter would belong to two blocks at once."""
    with pytest.raises(JobError, match=r"blocks\.0"):
        find_blocks(Blocks(), hint=hint)


def test_hint_of_a_list_of_modules() -> None:
    """A ModuleList is never called, so nothing would gather its parameters."""
    with pytest.raises(JobError, match="'blocks'"):
        find_blocks(Blocks(), hint=["blocks"])


def test_blocks_never_overlap() -> None:
    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = Blocks(), Blocks()

        def forward(self, x: Tensor) -> Tensor:
            return self.left(x) + self.right(torch.flip(x, [0]))

    found = find_blocks(Nested())
    assert found == ("left", "right")
