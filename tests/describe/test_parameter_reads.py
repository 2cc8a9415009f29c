"""Parameters that somebody else than the module that holds them reads, or asks for their shape, are found."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import minimal
from meshwright.describe.model import describe

Forward = Callable[[Any, Tensor], Tensor]


class Block(minimal.Block):
    """With a forward that each test chooses, and a parameter of its own beside those of its children."""

    chosen: Forward

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gain * type(self).chosen(self, x)


def model_of(forward: Forward, change: Callable[[Any], Any] = lambda block: None) -> Callable[[], nn.Module]:
    chosen = type("Chosen", (Block,), {"chosen": forward})

    def build() -> nn.Module:
        model = minimal.Blocks()
        model.blocks = nn.ModuleList(chosen() for _ in range(2))
        for block in model.blocks:
            change(block)
        return model

    return build


def plainly(block: Any, x: Tensor) -> Tensor:
    return block.down(F.gelu(block.up(block.norm(x))))  # type: ignore[no-any-return]


READS: dict[str, Forward] = {
    "shape": lambda block, x: plainly(block, x) * block.up.weight.shape[0],
    "size": lambda block, x: plainly(block, x) * block.up.weight.size(0),
    "numel": lambda block, x: plainly(block, x) * torch.numel(block.up.weight),
    "len": lambda block, x: plainly(block, x) * len(block.up.weight),
    "transposed shape": lambda block, x: plainly(block, x) * block.up.weight.T.shape[1],
    "value": lambda block, x: plainly(block, x) * block.up.weight.detach().norm(),
    "function": lambda block, x: block.down(F.linear(block.norm(x), block.up.weight, block.up.bias)),
    "by its name": lambda block, x: plainly(block, x) * block.get_parameter("up.weight").shape[0],
    "among others": lambda block, x: plainly(block, x) * torch.stack([block.up.weight, block.up.weight]).mean(),
}


@pytest.mark.parametrize("name", READS)
def test_a_childs_weight_that_its_parent_reads(name: str) -> None:
    facts = describe(minimal.make_job(model=model_of(READS[name])))
    found = {"blocks.0.up.weight", "blocks.1.up.weight"}
    assert set(facts.read_elsewhere) - {"blocks.0.up.bias", "blocks.1.up.bias"} == found, "in every block alike"
    assert facts.tensor_plan is not None
    roles = {row.module: row.role for row in facts.tensor_plan.rows}
    assert roles["blocks.0.up"] == roles["blocks.1.up"] == "whole"


def test_a_hook_is_not_the_layer() -> None:
    def hook(block: Any) -> None:
        block.up.register_forward_hook(lambda module, args, output: output * module.weight.shape[0] ** -0.5)

    facts = describe(minimal.make_job(model=model_of(plainly, hook)))
    assert facts.read_elsewhere == ("blocks.0.up.weight", "blocks.1.up.weight")


def test_a_loss_over_the_shape_of_a_weight() -> None:
    built = []

    def build() -> nn.Module:
        built.append(minimal.Blocks())
        return built[-1]

    def loss(output: Tensor, batch: Any) -> tuple[Tensor, int]:
        return (output - batch["y"]).square().sum() / built[-1].leave.weight.numel(), len(batch["y"])

    assert describe(minimal.make_job(model=build, loss=loss)).read_elsewhere == ("leave.weight",)


class Scaled(nn.Linear):
    """Reads what is its own."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.weight.shape[0] ** -0.5


@pytest.mark.parametrize(
    "forward",
    [
        plainly,
        lambda block, x: plainly(block, x.to(block.up.weight.dtype).to(block.up.weight.device)),
        lambda block, x: plainly(block, x) * block.up.out_features * block.up.weight.ndim,
    ],
)
def test_what_a_part_answers_alike_is_no_read(forward: Forward) -> None:
    def change(block: Any) -> None:
        block.up = Scaled(minimal.WIDTH, 2 * minimal.WIDTH)

    facts = describe(minimal.make_job(model=model_of(forward, change)))
    assert facts.read_elsewhere == ()
    assert facts.tensor_plan is not None and facts.tensor_plan.divided
    assert describe(minimal.make_job(model=lambda: nn.TransformerEncoderLayer(4, 2, 8, 0.0))).read_elsewhere == ()
