"""Programs of blocks whose authors keep state where few look for it: each change is noticed, in all three blocks."""

import functools
import os
import random
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import replayed_settings
from replayed_blocks import as_it_is, divide, replayed, run, states


class Settings:
    scale = 1.0

    def __init__(self) -> None:
        self.own = 1.0

    def apply(self, x: Tensor) -> Tensor:
        return x * self.own * self.scale

    def __call__(self, x: Tensor) -> Tensor:
        return x * self.own


class Inheriting(Settings):
    pass


class Table(dict[str, Any]):
    pass


class Layer(nn.Module):
    settings = Settings()
    factor = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.act = F.silu

    @staticmethod
    def bend(x: Tensor) -> Tensor:
        return x

    def shift(self, x: Tensor) -> Tensor:
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.shift(self.bend(x)) * self.settings.own * self.factor


class InheritingLayer(Layer):
    pass


FACTOR = 1.0
SETTINGS, INHERITING = Settings(), Inheriting()
BOUND = SETTINGS.apply
SEEN: set[int] = set()
SWITCH = {"on": False}
OWN_RANDOM = random.Random(5)


def scaled(x: Tensor, by: float = 1.0, settings: Settings = SETTINGS) -> Tensor:
    return x * by * settings.own


PARTIAL = functools.partial(scaled, by=1.0)


@functools.lru_cache
def cached() -> float:
    return FACTOR


def make_pair() -> tuple[Callable[[Tensor], Tensor], Callable[[float], None]]:
    factor = 1.0

    def apply(x: Tensor) -> Tensor:
        return x * factor

    def change(to: float) -> None:
        nonlocal factor
        factor = to

    return apply, change


FIRST, _ = make_pair()
SECOND, CHANGE_SECOND = make_pair()


def imports(block: Any, x: Tensor) -> Tensor:
    import replayed_settings as settings

    return x * settings.SCALE


def imports_a_name(block: Any, x: Tensor) -> Tensor:
    from replayed_settings import SCALE

    return x * SCALE


def missing(block: Any, x: Tensor) -> Tensor:
    try:
        return x * APPEARS_LATER  # type: ignore[name-defined]
    except NameError:
        return x


Habit = Callable[[Any, Tensor], Tensor]
Change = Callable[[Any, pytest.MonkeyPatch], object]
Prepare = Callable[[Any], Any]


def on_each(change: Callable[[Any, pytest.MonkeyPatch], object]) -> Change:
    return lambda model, patch: [change(block, patch) for block in model.blocks]


def held(kind: Callable[[], Any]) -> Callable[[Any], None]:
    """Give each block an object in `held`, past `nn.Module`, which would register a module."""
    return lambda block: vars(block).update(held=kind())


NONE: Prepare = lambda block: None  # noqa: E731
NOTICED: dict[str, tuple[Habit, Change, Prepare]] = {
    "torch's function": (
        lambda block, x: F.silu(x),
        lambda _, patch: patch.setattr(F, "silu", lambda x: x * 3),
        NONE,
    ),
    "torch's function in a layer": (
        lambda block, x: block.norm(x),
        lambda _, patch: patch.setattr(F, "layer_norm", lambda x, *args: x * 3),
        NONE,
    ),
    "a function's code": (
        lambda block, x: scaled(x),
        lambda _, patch: patch.setattr(scaled, "__code__", (lambda x, by=1.0, settings=None: x * 5).__code__),
        NONE,
    ),
    "a function's default": (
        lambda block, x: scaled(x),
        lambda _, patch: patch.setattr(scaled, "__defaults__", (5.0, SETTINGS)),
        NONE,
    ),
    "an object as a default": (
        lambda block, x: scaled(x),
        lambda _, patch: patch.setattr(SETTINGS, "own", 5.0),
        NONE,
    ),
    "an import": (imports, lambda _, patch: patch.setattr(replayed_settings, "SCALE", 5.0), NONE),
    "an imported name": (imports_a_name, lambda _, patch: patch.setattr(replayed_settings, "SCALE", 5.0), NONE),
    "a function of a module": (
        lambda block, x: x * replayed_settings.factor(),
        lambda _, patch: patch.setattr(replayed_settings, "SCALE", 5.0),
        NONE,
    ),
    "the second closure of a code": (
        lambda block, x: SECOND(FIRST(x)),
        lambda _, patch: CHANGE_SECOND(5.0),
        lambda block: CHANGE_SECOND(1.0),
    ),
    "a partial's keyword": (
        lambda block, x: PARTIAL(x),
        lambda _, patch: patch.setitem(PARTIAL.keywords, "by", 5.0),
        NONE,
    ),
    "a partial's object": (
        lambda block, x: block.held(x),
        on_each(lambda block, patch: setattr(block.held.args[0], "own", 5.0)),
        held(lambda: functools.partial(Settings.apply, Settings())),
    ),
    "an emptied cache": (
        lambda block, x: x * cached(),
        lambda _, patch: (patch.setitem(globals(), "FACTOR", 5.0), cached.cache_clear()),
        lambda block: cached.cache_clear(),
    ),
    "the object of a method": (
        lambda block, x: BOUND(x),
        lambda _, patch: patch.setattr(SETTINGS, "own", 5.0),
        NONE,
    ),
    "the object of a held method": (
        lambda block, x: block.held(x),
        on_each(lambda block, patch: setattr(block.held.__self__, "own", 5.0)),
        held(lambda: Settings().apply),
    ),
    "a method of an object": (
        lambda block, x: block.held(x),
        lambda _, patch: patch.setattr(Settings, "__call__", lambda self, x: x * 5),
        held(Settings),
    ),
    "a method that hides another": (
        lambda block, x: block.held(x),
        lambda _, patch: patch.setattr(Inheriting, "__call__", lambda self, x: x * 5),
        held(Inheriting),
    ),
    "a class attribute that hides another": (
        lambda block, x: x * INHERITING.scale,
        lambda _, patch: patch.setattr(Inheriting, "scale", 5.0),
        NONE,
    ),
    "a module's method that hides another": (
        lambda block, x: block.layer(x),
        lambda _, patch: patch.setattr(InheritingLayer, "shift", lambda self, x: x * 5),
        lambda block: setattr(block, "layer", InheritingLayer()),
    ),
    "a module's attribute that hides another": (
        lambda block, x: block.layer(x),
        lambda _, patch: patch.setattr(InheritingLayer, "factor", 5.0),
        lambda block: setattr(block, "layer", InheritingLayer()),
    ),
    "an object of a module's class": (
        lambda block, x: block.layer(x),
        lambda _, patch: patch.setattr(Layer.settings, "own", 5.0),
        lambda block: setattr(block, "layer", Layer()),
    ),
    "a static method": (
        lambda block, x: block.layer(x),
        lambda _, patch: patch.setattr(Layer, "bend", staticmethod(lambda x: x * 5)),
        lambda block: setattr(block, "layer", Layer()),
    ),
    "an attribute of a module in a list": (
        lambda block, x: x * block.held[0].factor,
        on_each(lambda block, patch: setattr(block.held[0], "factor", 5.0)),
        held(lambda: [Layer()]),
    ),
    "a parameter's attribute": (
        lambda block, x: x * getattr(block.gain, "mark", 1.0),
        on_each(lambda block, patch: setattr(block.gain, "mark", 5.0)),
        NONE,
    ),
    "a table with odd keys": (
        lambda block, x: x * block.held["a", 1].own,
        on_each(lambda block, patch: setattr(block.held["a", 1], "own", 5.0)),
        held(lambda: {("a", 1): Settings()}),
    ),
    "an attribute of a table": (
        lambda block, x: x * getattr(block.held, "factor", 1.0),
        on_each(lambda block, patch: setattr(block.held, "factor", 5.0)),
        held(lambda: Table(a=1)),
    ),
    "a number that becomes a bool": (
        lambda block, x: x * (5 if isinstance(block.held.own, bool) else 1),
        on_each(lambda block, patch: setattr(block.held, "own", True)),
        held(Settings),
    ),
    "the environment": (
        lambda block, x: x * float(os.getenv("SCALE_OF_A_BLOCK", "1")),
        lambda _, patch: patch.setenv("SCALE_OF_A_BLOCK", "5"),
        NONE,
    ),
    "a global that appears": (
        missing,
        lambda _, patch: patch.setitem(globals(), "APPEARS_LATER", 5.0),
        NONE,
    ),
}


def prepared(habit: Habit, prepare: Prepare, mesh: DeviceMesh) -> Any:
    model: Any = divide(habit, mesh)
    for block in model.blocks:
        prepare(block)
    return model


@pytest.mark.parametrize("name", NOTICED)
def test_hidden_state_that_changes_is_noticed(
    tensor_mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    habit, change, prepare = NOTICED[name]
    model, other = prepared(habit, prepare, tensor_mesh), prepared(habit, prepare, tensor_mesh)
    first = [run(model, tensor_mesh) for _ in range(3)][-1]
    assert replayed(model) >= 3, states(model)
    assert first.equals(as_it_is(other, tensor_mesh))
    change(model, monkeypatch)
    change(other, monkeypatch)
    for _ in range(3):
        found = run(model, tensor_mesh)
        assert found.equals(as_it_is(other, tensor_mesh))
    assert not found.equals(first)


def first_time(block: Any, x: Tensor) -> Tensor:
    if id(block) in SEEN:
        return x
    SEEN.add(id(block))
    return x * 2


def toggle(block: Any, x: Tensor) -> Tensor:
    SWITCH["on"] = not SWITCH["on"]
    return x * (2 if SWITCH["on"] else 1)


def seed(block: Any, x: Tensor) -> Tensor:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        return F.dropout(x, 0.5)


def run_hidden(block: Any, x: Tensor) -> Tensor:
    return block.held[0](x)  # type: ignore[no-any-return]


UNRECORDED: dict[str, tuple[Habit, str, Prepare]] = {
    "a switch": (toggle, "changes what it reads", NONE),
    "random numbers of its own": (lambda block, x: x * OWN_RANDOM.uniform(1, 2), "random numbers of Python", NONE),
    "a seed": (seed, "generator", NONE),
    "a module in a list": (run_hidden, "no part of it", held(lambda: [nn.Dropout(0.5)])),
    "globals()": (lambda block, x: x * globals()["FACTOR"], "globals", NONE),
    "sys.modules": (lambda block, x: x * sys.modules["replayed_settings"].SCALE, "sys.modules", NONE),
}


@pytest.mark.parametrize("name", UNRECORDED)
def test_what_hides_its_state_runs_as_it_is(tensor_mesh: DeviceMesh, name: str) -> None:
    habit, reason, prepare = UNRECORDED[name]
    model, other = prepared(habit, prepare, tensor_mesh), prepared(habit, prepare, tensor_mesh)
    passes = []
    for one, how in ((model, run), (other, as_it_is)):
        SWITCH["on"] = False
        OWN_RANDOM.seed(5)
        passes.append([how(one, tensor_mesh) for _ in range(3)])
    assert all(mine.equals(theirs) for mine, theirs in zip(*passes, strict=True))
    assert all(reason in state.reason for state in states(model)), states(model)
    assert replayed(model) == 0


def test_what_happens_the_first_time_only_is_not_repeated(tensor_mesh: DeviceMesh) -> None:
    model, other = divide(first_time, tensor_mesh), divide(first_time, tensor_mesh)
    for _ in range(4):
        assert run(model, tensor_mesh).equals(as_it_is(other, tensor_mesh))
    assert replayed(model) == 6
