"""Which operators are divided, how, and why the others are not."""

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh

import operator_programs as programs
from meshwright.assemble.world import World, fake_world
from meshwright.errors import Refused
from meshwright.strategies.operator.split import Operator, OperatorPlan, plan_operators, split_operators


def plan(model: nn.Module, ranks: int = 4, *read: str) -> dict[str, Operator]:
    planned = plan_operators(model, ranks, frozenset(read))
    return {operator.name: operator for operator in planned.operators}


def beside_a_linear(module: nn.Module) -> nn.Module:
    """So that something divides whatever becomes of the module."""
    return nn.ModuleDict({"it": module, "other": nn.Linear(8, 8)})


@pytest.mark.parametrize(
    ("module", "kind", "along", "size"),
    [
        (nn.Linear(3, 8), "linear", "outputs", 8),
        (nn.Linear(8, 10), "linear", "inputs", 8),
        (programs.Conv1D(8, 3), "linear", "outputs", 8),
        (programs.Conv1D(10, 8), "linear", "inputs", 8),
        (nn.Conv2d(3, 8, 3), "convolution", "output channels", 8),
        (nn.Conv1d(8, 16, 3, groups=8), "convolution", "groups", 8),
        (nn.ConvTranspose3d(3, 8, 3), "transposed convolution", "output channels", 8),
        (nn.Embedding(12, 8), "embedding", "entries", 12),
        (nn.Embedding(13, 8), "embedding", "features", 8),
        (nn.MultiheadAttention(24, 8), "attention", "heads", 8),
    ],
)
def test_what_is_divided(module: nn.Module, kind: str, along: str, size: int) -> None:
    assert plan(module)[""] == Operator(name="", kind=kind, along=along, size=size, parts=4)


class OwnLinear(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(input)


class Standardised(nn.Conv2d):
    def _conv_forward(self, input, weight, bias):  # type: ignore[no-untyped-def]
        return super()._conv_forward(input, weight / weight.std(), bias)


class OwnAttention(nn.MultiheadAttention):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x, x, x)[0]


def with_a_forward_of_its_own(module: nn.Module) -> nn.Module:
    module.forward = lambda x: x  # type: ignore[method-assign]
    return module


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
@pytest.mark.parametrize(
    ("module", "why"),
    [
        (nn.Linear(9, 10), "its 10 outputs and 9 inputs do not divide by 4"),
        (nn.Conv2d(8, 10, 3), "its 10 output channels do not divide by 4"),
        (nn.Conv2d(12, 12, 3, groups=6), "its 6 groups do not divide by 4"),
        (nn.MultiheadAttention(24, 6), "its 6 heads do not divide by 4"),
        (OwnLinear(8, 8), "its forward is not nn.Linear's"),
        (OwnAttention(8, 4), "its forward is not nn.MultiheadAttention's"),
        (Standardised(8, 8, 3), "its _conv_forward is not nn.Conv2d's"),
        (with_a_forward_of_its_own(nn.Linear(8, 8)), "its forward is not nn.Linear's"),
        (nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)), "its parameters are parametrized"),
        (nn.utils.weight_norm(nn.Linear(8, 8)), "its weight is computed from other parameters"),
        (nn.Embedding(8, 8, max_norm=1.0), "its max_norm changes the weight while it is read"),
        (nn.Embedding(8, 8, scale_grad_by_freq=True), "its scale_grad_by_freq counts entries over all ranks"),
        (nn.Embedding(8, 8, sparse=True), "its gradient is sparse"),
        (nn.MultiheadAttention(8, 4, add_bias_kv=True), "it appends its own keys and values"),
        (nn.LSTM(8, 8), "no rule divides such a module"),
    ],
)
def test_what_stays_whole(module: nn.Module, why: str) -> None:
    rows = plan(beside_a_linear(module))
    assert (rows["it"].why, rows["it"].parts) == (why, 1)
    assert rows["other"].parts == 4
    assert list(rows) == ["it", "other"], "what is inside of an operator is part of it"


def test_a_lora_in_the_place_of_out_proj() -> None:
    attention = nn.MultiheadAttention(8, 4)
    attention.out_proj = OwnLinear(8, 8)  # type: ignore[assignment]
    assert plan(beside_a_linear(attention))["it"].why == "its out_proj's forward is not nn.Linear's"


def test_read_elsewhere() -> None:
    rows = plan(programs.Tied(), 4, "mix.weight", "token.weight")
    assert rows["mix"].why == "its weight is also read outside of its forward"
    assert rows["token"].why == rows["head"].why == rows["mix"].why, "by every name of a tied parameter"
    with pytest.raises(Refused, match=r"out_proj\.weight is also read outside"):
        plan(nn.MultiheadAttention(8, 4), 4, "out_proj.weight")


def test_ties_are_cut_alike() -> None:
    assert [row.along for row in plan(programs.Tied()).values()] == ["entries", "features", "outputs", "outputs"]
    odd = plan(programs.Tied(words=23))
    assert [row.along for row in odd.values()] == ["features", "features", "outputs", "inputs"]
    transposed = nn.ModuleDict({"up": nn.Linear(8, 6), "down": programs.Conv1D(8, 6)})
    transposed["down"].weight = transposed["up"].weight
    assert [row.along for row in plan(transposed).values()] == ["inputs", "outputs"]


def test_ties_that_cannot_be_cut_alike_stay_whole() -> None:
    """A bias that one of the two needs cut and the other whole."""
    model = nn.ModuleDict({"a": nn.Linear(8, 6), "b": nn.Linear(9, 8), "other": nn.Linear(8, 8)})
    model["a"].bias = model["b"].bias
    rows = plan(model)
    assert rows["a"].why == "it shares a parameter with b, which divides differently"
    assert rows["b"].why == "it shares a parameter with a, which divides differently"
    assert rows["other"].parts == 4


def test_a_tie_to_what_stays_whole() -> None:
    model = nn.ModuleDict({"own": OwnLinear(8, 8), "tied": nn.Linear(8, 8), "other": nn.Linear(8, 8)})
    model["own"].weight = model["tied"].weight
    assert plan(model)["tied"].why == "it shares a parameter with own, which stays whole"
    norm = nn.ModuleDict({"norm": nn.LayerNorm(8), "tied": nn.Linear(8, 8), "other": nn.Linear(8, 8)})
    norm["tied"].bias = norm["norm"].bias
    assert plan(norm)["tied"].why == "it shares a parameter with norm, which stays whole"
    assert "norm" not in plan(norm), "it is no operator"


def test_small_operators_stay_whole_together() -> None:
    deep = nn.Sequential(*(nn.Linear(64, 64) for _ in range(200)), nn.Linear(64, 4))
    rows = plan(deep)
    assert all(rows[str(n)].parts == 4 for n in range(200)), "each of them is half a percent"
    assert "less than 1% of the parameters" in rows["200"].why


def test_a_convolution_is_never_small() -> None:
    assert plan(nn.Sequential(nn.Conv2d(1, 4, 3), nn.Linear(64, 4), nn.Linear(512, 512)))["0"].parts == 4


def test_the_model_itself_may_hold_parameters() -> None:
    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.place, self.mix = nn.Parameter(torch.zeros(8, 8)), nn.Linear(8, 8)

    assert str(plan(Positions())[""]) == "the model: Positions, whole: no rule divides such a module"


def test_nothing_to_divide() -> None:
    with pytest.raises(Refused) as refused:
        plan(nn.Sequential(nn.Linear(9, 10), nn.Linear(10, 9)))
    assert str(refused.value) == (
        "op=4 divides linear, convolution, embedding and attention operators over 4 ranks, but can divide none here "
        "(0: linear, whole: its 10 outputs and 9 inputs do not divide by 4; "
        "1: linear, whole: its 9 outputs and 10 inputs do not divide by 4); "
        "op=2 or op=3 or op=5 or op=9 would divide some."
    )
    with pytest.raises(Refused, match=r"the model has none\); choose another strategy"):
        plan(nn.LayerNorm(8))


def test_a_plan_is_a_value() -> None:
    model = programs.cnn().to("meta")
    assert plan_operators(model, 2) == plan_operators(model, 2)
    assert str(plan_operators(model, 4)).splitlines()[-1] == "7: linear, 32 inputs in 4 parts"
    two = plan_operators(beside_a_linear(nn.Linear(9, 9)).to("meta"), 2)
    assert [operator.name for operator in two.whole] == ["it"]
    assert [operator.name for operator in two.divided] == ["other"]


@pytest.fixture
def world() -> Iterator[World]:
    made = fake_world(4, torch.device("cpu"), rank=1)
    yield made
    made.leave()


def split(model: nn.Module, planned: OperatorPlan | None = None) -> dict[str, tuple[int, int]]:
    mesh = init_device_mesh("cpu", (4,))
    cuts = split_operators(model, planned or plan_operators(model, 4), mesh)
    return {name: (cut.dim, cut.pieces) for name, cut in cuts.items()}


def test_how_parameters_are_cut(world: World) -> None:
    attention = nn.MultiheadAttention(8, 4, device="meta")
    assert split(attention) == {"in_proj_weight": (0, 3), "in_proj_bias": (0, 3), "out_proj.weight": (1, 1)}
    assert attention.in_proj_weight.shape == (6, 8) and attention.out_proj.weight.shape == (8, 2)
    assert attention.out_proj.bias.shape == (8,)
    transposed = nn.ConvTranspose2d(4, 8, 3, device="meta")
    assert split(transposed) == {"weight": (1, 1), "bias": (0, 1)}
    assert transposed.weight.shape == (4, 2, 3, 3)


def test_ties_and_frozen_parameters_stay(world: World) -> None:
    with torch.device("meta"):
        model = programs.Tied()
    model.mix.weight.requires_grad_(False)
    names = {"token.weight", "head.weight", "head.bias", "place.weight", "mix.weight", "mix.bias"}
    assert set(split(model)) == names
    assert model.head.weight is model.token.weight and model.token.weight.shape == (6, 8)
    assert not model.mix.weight.requires_grad and model.mix.bias.requires_grad


def test_names_and_classes_stay_the_users(world: World) -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    before = dict(model.named_parameters()).keys()
    split(model)
    assert dict(model.named_parameters()).keys() == before
    assert all(isinstance(module, nn.Linear) and type(module).__name__ == "Linear" for module in model)
    assert type(model[0]) is type(model[1]), "so that torch.compile compiles once"
    assert model[0].out_features == 8


def test_a_module_under_two_names(world: World) -> None:
    linear = nn.Linear(8, 8, device="meta")
    assert set(split(nn.ModuleDict({"a": linear, "b": linear}))) == {"a.weight", "a.bias", "b.weight", "b.bias"}
    assert linear.weight.shape == (2, 8)


@pytest.mark.parametrize("make", list(programs.INPUTS))
def test_runs_on_fake_tensors_in_a_fake_world(world: World, make: type[nn.Module]) -> None:
    with torch.device("meta"):
        model = make()
    mesh = init_device_mesh("cpu", (4,))
    split_operators(model, plan_operators(model, 4), mesh)
    whole = make()(programs.INPUTS[make]())
    with FakeTensorMode(allow_non_fake_inputs=True):
        out = model.to_empty(device="cpu")(programs.INPUTS[make]())
        F.mse_loss(out, torch.zeros_like(out)).backward()
    assert out.shape == whole.shape
    assert all(p.grad is not None and p.grad.shape == p.shape for p in model.parameters())
