from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from meshwright.torch_private.modes import (
    TorchDispatchMode,
    below_all_modes,
    function_modes,
    in_transform,
    only_mode,
    outside_of_modes,
    without_innermost_mode,
    without_tensor_classes,
    without_torch_function,
)


class Operators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


class Functions(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


class Counted(torch.Tensor):
    calls = 0

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        Counted.calls += 1
        return super().__torch_function__(func, types, args, kwargs or {})


def test_a_mode_sees_operators() -> None:
    x = torch.ones(2)
    with Operators() as mode:
        x.exp()
        with outside_of_modes():
            x.sin()
    assert mode.seen == [torch.ops.aten.exp.default]


def test_active_function_modes_are_listed() -> None:
    assert function_modes() == []
    with Functions() as outer, Functions() as inner:
        assert function_modes() == [outer, inner]


def test_the_innermost_mode_rests() -> None:
    x = torch.ones(2)
    with Functions() as outer, Functions() as inner:
        with without_innermost_mode():
            x.exp()
        assert function_modes() == [outer, inner]
    assert torch.Tensor.exp in outer.seen and torch.Tensor.exp not in inner.seen


def test_nobody_sees_torch_functions() -> None:
    x = torch.ones(2).as_subclass(Counted)
    calls = Counted.calls
    with Functions() as mode, without_torch_function():
        x.exp()
    assert torch.Tensor.exp not in mode.seen and Counted.calls == calls


def test_modes_see_what_classes_do_not() -> None:
    x = torch.ones(2).as_subclass(Counted)
    calls = Counted.calls
    with Functions() as mode, without_tensor_classes():
        x.exp()
    assert torch.Tensor.exp in mode.seen and Counted.calls == calls


class Named(TorchFunctionMode):
    def __init__(self, name: str, seen: list[str]) -> None:
        super().__init__()
        self.name, self.seen = name, seen

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(self.name)
        return func(*args, **(kwargs or {}))


def test_a_mode_goes_below_the_others() -> None:
    seen: list[str] = []
    with Named("outer", seen), Named("inner", seen):
        with below_all_modes(Named("below", seen)):
            torch.ones(1).sin()
        assert seen[-3:] == ["inner", "outer", "below"]
        seen.clear()
        torch.ones(1).sin()
    assert "below" not in seen and "outer" in seen


def test_a_mode_stays_below_others_or_alone() -> None:
    seen: list[str] = []
    low, outer, inner = (Named(name, seen) for name in ("low", "outer", "inner"))
    with low, outer, inner:
        with below_all_modes(Named("between", seen), but=lambda mode: mode is low):
            torch.ones(1).sin()
        assert seen[-4:] == ["inner", "outer", "between", "low"]
        seen.clear()
        with only_mode(outer):
            torch.ones(1).sin()
        assert set(seen) == {"outer"} and function_modes() == [low, outer, inner]


def test_a_transform_is_known_while_it_runs() -> None:
    inside = []
    torch.vmap(lambda x: inside.append(in_transform()) or x)(torch.ones(2))  # type: ignore[func-returns-value]
    torch.func.grad(lambda x: inside.append(in_transform()) or x.sum())(torch.ones(2))  # type: ignore[func-returns-value]
    assert inside == [True, True]
    assert not in_transform()
