"""What stages are made of: blocks, and the outermost modules with parameters around them."""

import torch
from torch import Tensor, nn

import pipeline_jobs
import pipeline_models
from meshwright.describe.blocks import find_units
from meshwright.describe.model import describe
from pipeline_models import Block


def names(model: nn.Module) -> set[str]:
    """As if all modules were called but lists, which cannot be."""
    return {name for name, module in model.named_modules() if not isinstance(module, nn.ModuleList | nn.ModuleDict)}


def test_blocks_and_what_is_around() -> None:
    model = pipeline_models.Tied()
    blocks = [f"blocks.{index}" for index in range(4)]
    assert find_units(model, blocks, names(model)) == ("token", *blocks, "norm", "head")


def test_modules_without_parameters_are_glue() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Sequential(nn.Tanh(), nn.Dropout()), nn.Linear(2, 2))
    assert find_units(model, [], names(model)) == ("0", "3")


def test_what_holds_blocks_is_looked_into() -> None:
    inner = nn.Module()
    inner.enter, inner.layers = nn.Linear(2, 2), nn.ModuleList([Block(), Block()])
    model = nn.Module()
    model.encoder, model.head = inner, nn.Linear(2, 2)
    found = find_units(model, ["encoder.layers.0", "encoder.layers.1"], names(model))
    assert found == ("encoder.enter", "encoder.layers.0", "encoder.layers.1", "head")


def test_an_outermost_module_is_one_unit() -> None:
    model = nn.Module()
    model.stem, model.head = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2))), nn.Linear(2, 2)
    assert find_units(model, [], names(model)) == ("stem", "head")


def test_what_is_never_called_is_looked_into() -> None:
    """Lists and dicts cannot be called; other modules may not be."""
    model = nn.Module()
    model.heads = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.ModuleList([nn.Linear(2, 2)])})
    model.holder = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    called = {"", "heads.a", "heads.b.0", "holder.1"}
    assert find_units(model, [], called) == ("heads.a", "heads.b.0", "holder.1")
    assert find_units(model, [], called | {"heads", "heads.b"}) == ("heads.a", "heads.b.0", "holder.1")


def test_a_name_that_begins_like_a_block() -> None:
    model = nn.Module()
    model.block, model.block1 = nn.Linear(2, 2), nn.Linear(2, 2)
    assert find_units(model, ["block1"], names(model)) == ("block", "block1")


def test_parameters_of_the_model_itself_belong_to_no_unit() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale, self.inner = nn.Parameter(torch.ones(2)), nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x) * self.scale

    model = Own()
    assert find_units(model, [], names(model)) == ("inner",)


def test_calls_are_in_the_order_of_the_forward_pass() -> None:
    facts = describe(pipeline_jobs.repeating)
    wanted = ["enter", "blocks.0", "blocks.1", "blocks.2", "blocks.0", "leave"]
    assert [call.name for call in facts.calls] == wanted
    assert all(call.flops > 0 for call in facts.calls)
    assert facts.calls[0].reads == ("enter.bias", "enter.weight")


def test_calls_survive_json() -> None:
    facts = describe(pipeline_jobs.tied)
    assert type(facts).from_json(facts.to_json()) == facts
