"""Blocks that cost the same: by what they print, by their switches, and by what they compute."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD

from meshwright import Job
from meshwright.describe.block_equality import cost_keys
from meshwright.describe.model import describe
from meshwright.tracing.costs import measure_costs


class Block(nn.Module):
    """A layer with attributes as authors set them."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, x: Tensor) -> Tensor:
        if getattr(self, "wide", False):
            return x + self.down(self.up(torch.cat((x, x, x), dim=1)).relu().exp().sigmoid())[:, : x.shape[1]]
        return x + self.down(self.up(x))


@pytest.mark.parametrize(
    ("attributes", "kinds"),
    [
        (lambda i: {"layer_idx": i}, 1),
        (lambda i: {"layer_idx": i % 6}, 1),  # two towers
        (lambda i: {"name": f"layer {i}"}, 1),
        (lambda i: {"layer_idx": i, "shifted": i % 2 == 1}, 2),
        (lambda i: {"layer_idx": i, "window": 128 if i % 4 else None}, 2),
        (lambda i: {"kind": "sliding" if i % 3 else "full"}, 2),
        (lambda i: {"layer_idx": i, "drop_path": i / 12}, 2),  # the first drops nothing
    ],
)
def test_switches_and_not_numbers_of_layers(attributes: Callable[[int], dict[str, Any]], kinds: int) -> None:
    keys = cost_keys([Block(**attributes(i)) for i in range(12)])
    assert len(set(keys)) == kinds


def test_blocks_that_do_more_by_a_switch_are_measured_apart() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Block(layer=i, wide=i % 2 == 1) for i in range(6))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)
            return x

    job = Job(
        model=Model,
        inputs=lambda batch: (batch,),
        loss=lambda output, batch: (F.mse_loss(output, batch, reduction="sum"), len(batch)),
        optimizer=lambda params: SGD(params, lr=0.1),
        sample=lambda n: torch.randn(n, 8, 16),
        global_batch=4,
    )
    facts = describe(job)
    assert len(facts.blocks) == 6
    costs = measure_costs(job, facts, "fp32")
    narrow, wide, *others = [unit for unit in costs.units if unit.is_block]
    assert wide.kept.each > 2 * narrow.kept.each
    assert [unit.like for unit in others] == [
        "layers.2",
        wide.name,
    ] * 2  # the first block needs no gradient of its input
