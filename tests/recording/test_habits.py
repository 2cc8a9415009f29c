"""Whatever a builder does, a recorded and filled model is the one that the builder gives plainly."""

import copy
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, skip_init, spectral_norm, weight_norm

from meshwright.errors import JobError, Refused
from meshwright.recording.blueprint import Blueprint, build_plainly, record
from meshwright.recording.filling import ComputedTensor
from meshwright.recording.loose_tensors import loose_tensors
from minimal import CPU

SEED = 5
X = torch.linspace(-1, 1, 12).reshape(3, 4)
Build = Callable[[], nn.Module]


class Habit(nn.Module):
    """A linear layer, and what `fill` adds to it."""

    def __init__(self, fill: Callable[[Any], None], use: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        fill(self)
        self.use = use
        self.last = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.use(self, self.layer(x)))


def everything(model: nn.Module) -> dict[str, Tensor]:
    """Parameters, buffers and loose tensors by name."""
    named = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    return named | {str(place): tensor for place, tensor in loose_tensors(model)}


def outcome(model: nn.Module, x: Tensor = X, steps: int = 2) -> list[Tensor]:
    """Outputs, gradients and parameters of a few steps."""
    found: list[Tensor] = []
    for _ in range(steps):
        torch.manual_seed(1)
        output = model(x)
        output = output[0] if isinstance(output, tuple) else output
        output.square().mean().backward()
        found.append(output.detach())
        for parameter in model.parameters():
            if parameter.grad is not None:
                found.append(parameter.grad.clone())
                with torch.no_grad():
                    parameter -= 0.1 * parameter.grad
                parameter.grad = None
    return [*found, *(p.detach().clone() for p in model.parameters())]


def assert_same(build: Build, *, recorded: bool = True, runs: bool = True) -> Blueprint:
    plain, blueprint = build_plainly(build, SEED), record(build, SEED)
    assert bool(blueprint.doubt) != recorded, blueprint.doubt
    assert all(parameter.is_meta for parameter in blueprint.model.parameters())
    blueprint.fill(CPU)
    expected, got = everything(plain), everything(blueprint.model)
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        found = got[name].detach()
        assert torch.equal(found, value) and found.dtype == value.dtype, name
        assert type(got[name]) is ComputedTensor or got[name].requires_grad == value.requires_grad, name
        assert isinstance(got[name], nn.Parameter) == isinstance(value, nn.Parameter), name
    if runs:
        for one, other in zip(outcome(blueprint.model), outcome(plain), strict=True):
            assert torch.equal(one, other)
    return blueprint


def parameter_in_a_list(m: Any) -> None:
    m.listed = [m.layer.weight, (m.layer.bias, {"again": m.layer.weight})]


@dataclass(frozen=True)
class Box:
    scale: Tensor
    inner: Any = None


def tensors_in_objects(m: Any) -> None:
    m.box = Box(torch.rand(4), {"shift": [torch.rand(4)]})


def tensors_in_functions(m: Any) -> None:
    scale, shift, rate = torch.rand(4), torch.rand(4), torch.rand(4)
    m.scaled = lambda x, rate=rate: x * scale * rate
    m.shifted = partial(torch.add, other=shift)


def hidden_module(m: Any) -> None:
    m.hidden = [nn.Linear(4, 4)]


def view_of_a_parameter(m: Any) -> None:
    m.row = m.layer.weight[1]
    m.raw = m.layer.weight.data


def shared_memory(m: Any) -> None:
    m.twin = nn.Parameter(m.layer.weight.data)
    m.register_buffer("shown", m.layer.bias.data[1:3])


def a_target(m: Any) -> None:
    m.target = copy.deepcopy(m.layer).requires_grad_(False)
    m.register_buffer("norm", m.layer.weight.detach().norm())


def gradient_hooks(m: Any) -> None:
    mask = torch.tensor([1.0, 0.0, 1.0, 0.0])
    m.layer.weight.register_hook(lambda gradient: gradient * mask)
    m.layer.bias.register_post_accumulate_grad_hook(lambda parameter: setattr(parameter, "grad", parameter.grad * 2))
    m.register_forward_hook(lambda module, args, output: output * 2)


def buffers(m: Any) -> None:
    m.register_buffer("places", torch.arange(4.0), persistent=False)
    m.other = nn.Module()
    m.other.register_buffer("places", m.places, persistent=False)
    m.alias = m.places


def partly_loaded(m: Any) -> None:
    table = numpy.arange(16, dtype=numpy.float32).reshape(4, 4)
    m.layer.weight.data.copy_(torch.from_numpy(table))
    table[:] = 7
    m.register_buffer("after", torch.from_numpy(table) + 0)
    m.last_drawn = torch.rand(4, generator=torch.Generator().manual_seed(3))


def given_data(m: Any) -> None:
    m.layer.weight.data = torch.from_numpy(numpy.eye(4, dtype=numpy.float32))
    m.layer.weight.data.mul_(2)


def skipped(m: Any) -> None:
    m.inner = skip_init(nn.Linear, 4, 4)
    nn.init.normal_(m.inner.weight)
    nn.init.zeros_(m.inner.bias)


def made_on_meta(m: Any) -> None:
    with torch.device("meta"):
        m.inner = nn.Linear(4, 4)
    assert m.inner.weight.is_meta and m.inner.weight.device.type == "meta"
    nn.init.normal_(m.inner.weight)
    m.inner.to_empty(device="cpu")
    assert not m.inner.weight.is_meta
    nn.init.normal_(m.inner.weight)
    nn.init.zeros_(m.inner.bias)


def assigned(m: Any) -> None:
    with torch.device("meta"):
        m.inner = nn.Linear(4, 4)
    m.inner.load_state_dict({"weight": torch.eye(4), "bias": torch.ones(4)}, assign=True)


HABITS: list[tuple[Callable[[Any], None], Callable[[Any, Tensor], Tensor]]] = [
    (parameter_in_a_list, lambda m, x: nn.functional.linear(x, m.listed[0], m.listed[1][0]) @ m.listed[1][1]["again"]),
    (tensors_in_objects, lambda m, x: x * m.box.scale + m.box.inner["shift"][0]),
    (tensors_in_functions, lambda m, x: m.shifted(m.scaled(x))),
    (hidden_module, lambda m, x: m.hidden[0](x)),
    (view_of_a_parameter, lambda m, x: x * m.row @ m.raw),
    (shared_memory, lambda m, x: x @ m.twin + m.shown.sum()),
    (a_target, lambda m, x: m.target(x) * m.norm),
    (gradient_hooks, lambda m, x: x),
    (buffers, lambda m, x: x * m.alias + m.other.places),
    (partly_loaded, lambda m, x: x @ m.after * m.last_drawn),
    (given_data, lambda m, x: x),
    (skipped, lambda m, x: m.inner(x)),
    (made_on_meta, lambda m, x: m.inner(x)),
    (assigned, lambda m, x: m.inner(x)),
]


@pytest.mark.parametrize(("fill", "use"), HABITS, ids=[fill.__name__ for fill, _ in HABITS])
def test_by_hand(fill: Callable[[Any], None], use: Callable[[Any, Tensor], Tensor]) -> None:
    assert_same(lambda: Habit(fill, use))


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers(kind: Any) -> None:
    model = assert_same(lambda: kind(4, 4, num_layers=2, bidirectional=True)).model
    names = model._flat_weights_names
    assert all(alias is getattr(model, name) for alias, name in zip(model._flat_weights, names, strict=True))


@pytest.mark.parametrize(
    "normed",
    [
        *(weight_norm, spectral_norm, parametrizations.weight_norm, parametrizations.spectral_norm),
        parametrizations.orthogonal,
    ],
    ids=["weight_norm", "spectral_norm", "parametrized_weight", "parametrized_spectral", "orthogonal"],
)
def test_normed_weights(normed: Callable[[nn.Module], nn.Module]) -> None:
    assert_same(lambda: nn.Sequential(normed(nn.Linear(4, 4)), nn.Tanh(), nn.Linear(4, 4)))


def looks_at_values() -> nn.Module:
    layer = nn.Linear(4, 4)
    layer.scale = float(layer.weight.detach().numpy().max())  # type: ignore[assignment]
    return layer


def leaves_memory_empty() -> nn.Module:
    layer = nn.Linear(4, 4)
    layer.register_buffer("table", torch.empty(3, 3))
    layer.table.numpy()[:] = 1  # type: ignore[operator,union-attr]
    return layer


def changes_data() -> nn.Module:
    data = torch.tensor([1.0, 2.0, 3.0, 4.0])
    layer = nn.Linear(4, 4)
    layer.bias = nn.Parameter(data.normal_())
    return layer


def changes_what_it_gave() -> nn.Module:
    layer, data = nn.Linear(4, 4), torch.tensor([1.0, 2.0, 3.0, 4.0])
    layer.bias.data = data
    data.mul_(2)
    return layer


def called_once() -> nn.Module:
    model = nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 4))
    model(torch.zeros(1, 4))
    return model


@pytest.mark.parametrize(
    "build", [looks_at_values, leaves_memory_empty, changes_data, called_once, changes_what_it_gave]
)
def test_what_cannot_be_recorded_is_built_for_real(build: Build) -> None:
    assert_same(build, recorded=False)


def test_uninitialised_memory_is_not_trusted() -> None:
    """Each rank would find something else there."""

    def build() -> nn.Module:
        layer = nn.Linear(4, 4)
        layer.weight = nn.Parameter(torch.empty(4, 4).clone())
        return layer

    assert "weight" in record(build, SEED).doubt


def test_data_that_changes_unseen_is_not_trusted() -> None:
    def build() -> nn.Module:
        table, layer = numpy.zeros((200, 200), dtype=numpy.float32), nn.Linear(200, 200)
        layer.weight.data.copy_(torch.from_numpy(table))
        table[:] = 7
        return layer

    assert record(build, SEED).doubt
    assert_same(build, recorded=False, runs=False)


def test_files(tmp_path: Path) -> None:
    def build() -> nn.Module:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        model[0].load_state_dict(torch.load(tmp_path / "a.pt"))
        model[1].load_state_dict(torch.load(tmp_path / "a.pt", mmap=True), assign=True)
        return model

    torch.save(nn.Linear(4, 4).state_dict(), tmp_path / "a.pt")
    assert_same(build)


def mapped_bytes(path: Path) -> int:
    """How much of a file that is mapped into this process has been read."""
    found, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split(" ", 1)[0]:
            inside = line.endswith(str(path))
        elif inside and line.startswith("Rss:"):
            found += int(line.split()[1]) * 1024
    return found


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="Linux says what was read of a mapped file")
def test_a_rank_reads_its_own_part_of_a_file(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    rows, path = 8192, tmp_path / "model.safetensors"
    whole = torch.arange(rows * 2048, dtype=torch.float32).reshape(rows, 2048)
    safetensors.save_file({"weight": whole}, path)

    def build() -> nn.Module:
        with torch.device("meta"):
            layer = nn.Linear(2048, rows, bias=False)
        layer.load_state_dict(safetensors.load_file(path), assign=True)
        return layer

    blueprint = record(build, SEED)
    blueprint.model.weight = nn.Parameter(torch.empty(rows // 8, 2048, device="meta"))
    blueprint.fill(CPU, lambda name, value: value[rows // 8 : rows // 4])
    assert not blueprint.doubt
    assert torch.equal(blueprint.model.weight, whole[rows // 8 : rows // 4])
    assert whole.nbytes // 8 <= mapped_bytes(path) < whole.nbytes // 2  # pages around what is looked at come along


def test_a_real_model_is_copied() -> None:
    made = nn.Linear(4, 4)
    assert_same(lambda: nn.Sequential(copy.deepcopy(made), copy.deepcopy(made)))


def test_numbers_from_anywhere() -> None:
    """One set of weights: those of the build that is filled in."""
    blueprint = record(lambda: Habit(lambda m: m.layer.bias.data.fill_(os.urandom(1)[0]), lambda m, x: x), SEED)
    blueprint.fill(CPU)
    assert len(set(blueprint.model.layer.bias.tolist())) == 1


def test_what_was_computed_from_parameters_may_not_be_used() -> None:
    """Plainly it trains on what weights were before the first step, or ends in an error of autograd's."""
    blueprint = record(lambda: Habit(lambda m: setattr(m, "twice", m.layer.weight * 2), lambda m, x: x @ m.twice), SEED)
    blueprint.fill(CPU)
    with pytest.raises(JobError, match=r"uses twice, .*Compute it in forward"):
        blueprint.model(X)


def test_memory_that_a_strategy_would_separate_is_refused() -> None:
    blueprint = record(lambda: Habit(shared_memory, lambda m, x: x), SEED)
    blueprint.model.layer.weight = nn.Parameter(torch.empty(2, 4, device="meta"))
    with pytest.raises(Refused, match=r"layer.weight and twin|twin and layer.weight"):
        blueprint.fill(CPU, lambda name, value: value[:2] if name == "layer.weight" else value)


def test_hooks_on_a_part_are_refused() -> None:
    blueprint = record(lambda: Habit(gradient_hooks, lambda m, x: x), SEED)
    blueprint.model.layer.weight = nn.Parameter(torch.empty(2, 4, device="meta"))
    with pytest.raises(Refused, match=r"gradient hook on layer\.weight"):
        blueprint.fill(CPU, lambda name, value: value[:2] if name == "layer.weight" else value)


def test_what_an_author_put_on_a_parameter_stays() -> None:
    def build() -> nn.Module:
        layer = nn.Linear(4, 4)
        layer.bias.no_decay = True  # type: ignore[attr-defined]
        return layer

    blueprint = record(build, SEED)
    blueprint.fill(CPU)
    assert blueprint.model.bias.no_decay


def test_a_builder_whose_real_build_fails_says_its_own_error() -> None:
    def build() -> nn.Module:
        raise ValueError("no such size")

    with pytest.raises(JobError, match=r"^The job's model cannot be built: ValueError: no such size\.$"):
        record(build, SEED)


def test_a_model_left_on_the_meta_device_is_refused() -> None:
    with pytest.raises(JobError, match="left weight, bias on the meta device"):
        record(lambda: nn.Linear(2, 2, device="meta"), SEED)
