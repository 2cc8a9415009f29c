"""A model on the meta device is filled with the weights that its builder would have given it."""

import copy

import pytest
import torch
from torch import Tensor, nn

from meshwright.errors import JobError, NotBuiltYet
from meshwright.recording.blueprint import adopt, record
from minimal import CPU, Block

SEED = 3


class Tied(nn.Module):
    """Ties, buffers of both kinds, a constant and a plain attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(7, 4)
        self.block = Block()
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.token.weight
        self.register_buffer("mask", torch.ones(4, 4).tril())
        self.register_buffer("places", torch.arange(4), persistent=False)
        self.register_buffer("table", torch.tensor([1.0, 2.0]))
        self.angles = torch.linspace(0, 1, 3) + torch.rand(3)


def plain() -> Tied:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        return Tied()


def named(model: nn.Module) -> dict[str, Tensor]:
    found = dict(model.named_parameters(remove_duplicate=False))
    return found | dict(model.named_buffers(remove_duplicate=False))


def assert_same(model: nn.Module, expected: nn.Module) -> None:
    got, wanted = named(model), named(expected)
    assert list(got) == list(wanted)
    for name, value in wanted.items():
        assert torch.equal(got[name], value), name
        assert (type(got[name]), got[name].requires_grad) == (type(value), value.requires_grad), name


def test_fill_gives_what_the_builder_would_have() -> None:
    blueprint = record(Tied, SEED)
    assert all(parameter.is_meta for parameter in blueprint.model.parameters())
    blueprint.fill(CPU)
    assert_same(blueprint.model, plain())
    assert blueprint.model.state_dict().keys() == plain().state_dict().keys()
    assert torch.equal(blueprint.model.angles, plain().angles)


def test_ties_stay_ties() -> None:
    blueprint = record(Tied, SEED)
    model = blueprint.model
    assert model.head.weight is model.token.weight
    blueprint.fill(CPU)
    assert model.head.weight is model.token.weight


def test_frozen_stays_frozen() -> None:
    blueprint = record(lambda: nn.Linear(2, 2).requires_grad_(False), SEED)
    blueprint.fill(CPU)
    assert not any(parameter.requires_grad for parameter in blueprint.model.parameters())


def test_parameters_that_a_strategy_replaces_are_filled_by_name() -> None:
    blueprint = record(Tied, SEED)
    blueprint.model.block.up.weight = nn.Parameter(torch.empty(8, 4, device="meta", dtype=torch.bfloat16))
    blueprint.fill(CPU)
    assert torch.equal(blueprint.model.block.up.weight, plain().block.up.weight.bfloat16())


def test_digest_tells_weights_apart() -> None:
    assert record(Tied, SEED).fill(CPU) == record(Tied, SEED).fill(CPU)
    assert record(Tied, SEED).fill(CPU) != record(Tied, SEED + 1).fill(CPU)


def test_digest_sees_what_is_not_from_torch() -> None:
    """A builder that draws from somewhere else differs from rank to rank; the digest is how that is found."""
    values = iter([1.0, 2.0])
    first, second = (record(lambda: _with(next(values)), SEED).fill(CPU) for _ in range(2))
    assert first != second


def _with(value: float) -> nn.Module:
    layer = nn.Linear(2, 2)
    nn.init.constant_(layer.bias, value)
    return layer


def test_adopt_keeps_the_values() -> None:
    model = plain()
    expected = copy.deepcopy(model)
    blueprint = adopt(model)
    blueprint.fill(CPU)
    assert blueprint.model is model
    assert_same(model, expected)
    assert model.head.weight is model.token.weight
    assert torch.equal(model.angles, expected.angles)


def test_a_model_that_was_never_built_is_refused() -> None:
    with pytest.raises(JobError, match=r"initial value of .*weight.* is unknown"):
        adopt(nn.Linear(2, 2, device="meta")).fill(CPU)


def test_a_builder_that_raises() -> None:
    def build() -> nn.Module:
        raise ValueError("no such size")

    with pytest.raises(JobError, match=r"ValueError: no such size"):
        record(build, SEED)


def test_an_error_of_our_own_passes_through() -> None:
    def build() -> nn.Module:
        raise NotBuiltYet("not this one")

    with pytest.raises(NotBuiltYet):
        record(build, SEED)


@pytest.mark.parametrize(("made", "name"), [(None, "NoneType"), ([], "list"), (nn.Linear, "type")])
def test_a_builder_that_gives_no_module(made: object, name: str) -> None:
    with pytest.raises(JobError, match=rf"nn\.Module, but it returned {name}"):
        record(lambda: made, SEED)  # type: ignore[arg-type, return-value]


def test_a_lazy_layer_is_refused() -> None:
    """Its shape is known only after a first call."""
    with pytest.raises(JobError):
        record(lambda: nn.LazyLinear(3), SEED)
