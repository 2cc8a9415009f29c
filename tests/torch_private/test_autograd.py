from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from meshwright.torch_private.autograd import (
    SET_GRAD_ENABLED,
    BackwardCFunction,
    DeviceType,
    Hooks,
    StopRecomputation,
    at_end_of_backward,
    backward_id,
    called_by_engine,
    direct_apply,
    engine_inside,
    engine_wrapped,
    has_accumulation_hooks,
    hooks_wrapped,
    is_held_once,
    own_functions_given,
    own_functions_wrapped,
    run_engine,
    run_unhooked,
    running_node,
    saves_by_hooks,
    uses_of_one,
    wanted_by_backward,
    without_modes_in_backward,
    wrap_engine,
)


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0] * 2


def test_the_engine_runs() -> None:
    x = torch.ones(2, requires_grad=True)
    y = (x * 3).sum()
    run_engine((y,), (torch.ones(()),), False, False, (), allow_unreachable=True, accumulate_grad=True)
    assert x.grad is not None and x.grad.tolist() == [3, 3]


@pytest.mark.parametrize(
    "backward",
    [lambda y, x: y.backward(), lambda y, x: torch.autograd.backward(y), lambda y, x: torch.autograd.grad(y, x)],
)
def test_the_engine_is_wrapped(backward: Callable[..., Any]) -> None:
    calls = []

    def wrap(run: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: (calls.append(1), run(*args, **kwargs))[1]

    x = torch.ones(2, requires_grad=True)
    with engine_wrapped(wrap), engine_wrapped(wrap):
        backward((x * 3).sum(), x)
    assert len(calls) == 2
    backward((x * 3).sum(), x)
    assert len(calls) == 2


def test_a_mode_is_on_while_the_engine_runs() -> None:
    seen = []

    class Mode(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            with engine_inside(self) if func is torch.Tensor.backward else nullcontext():
                return func(*args, **(kwargs or {}))

    x = torch.ones(2, requires_grad=True)
    with Mode():
        checkpoint(torch.sin, x, use_reentrant=False).sum().backward()
    assert torch.sin in seen[seen.index(torch.Tensor.backward) :]


def test_the_engine_is_wrapped_for_good(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.autograd, "_engine_run_backward", torch.autograd._engine_run_backward)
    calls = []

    def wrap(run: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: (calls.append(1), run(*args, **kwargs))[1]

    wrap_engine(wrap)
    x = torch.ones(2, requires_grad=True)
    x.sum().backward()
    assert calls == [1] and x.grad is not None


def test_a_backward_pass_has_a_number() -> None:
    x = torch.ones(2, requires_grad=True)
    seen = []
    x.register_hook(lambda gradient: seen.append(backward_id()))
    x.sum().backward()
    assert seen[0] != -1 and backward_id() == -1


def test_a_function_is_called_at_the_end_of_a_backward_pass() -> None:
    """One that is added by another comes after all that were there; an error reaches the caller of `backward`."""
    x, y = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    seen: list[str] = []
    x.register_hook(lambda _: at_end_of_backward(lambda: at_end_of_backward(lambda: seen.append("late"))))
    x.register_hook(lambda _: at_end_of_backward(lambda: seen.append("end")))
    y.register_post_accumulate_grad_hook(lambda _: seen.append("gradient"))
    (x * y).sum().backward()
    assert seen == ["gradient", "end", "late"]

    def fail() -> None:
        raise ValueError("at the end")

    y.register_hook(lambda _: at_end_of_backward(fail))
    with pytest.raises(ValueError, match="at the end"):
        y.sum().backward()


def test_an_author_s_function_is_told_apart() -> None:
    x = torch.ones(2, requires_grad=True)
    assert isinstance(Double.apply(x).grad_fn, BackwardCFunction)
    assert not isinstance((x * 2).grad_fn, BackwardCFunction)


def test_a_profile_says_where_a_kernel_ran() -> None:
    with torch.profiler.profile() as profile:
        torch.ones(2) * 2
    assert {event.device_type() for event in profile.profiler.kineto_results.events()} <= {
        DeviceType.CPU,
        DeviceType.CUDA,
    }


def test_functions_of_an_author_are_told() -> None:
    x, seen = torch.ones(2, requires_grad=True), list[str]()
    with own_functions_wrapped(seen.append):
        assert Double.apply(x).tolist() == [2, 2]
        assert direct_apply(Double)(x).tolist() == [2, 2]
    Double.apply(x).sum().backward()
    assert seen == ["Double"] and x.grad is not None and x.grad.tolist() == [2, 2]


def test_functions_of_an_author_are_given_other_arguments() -> None:
    x = torch.ones(2, requires_grad=True)
    with own_functions_given(lambda args: tuple(arg * 3 for arg in args)):
        assert Double.apply(x).tolist() == [6, 6]
        assert direct_apply(Double)(x).tolist() == [2, 2]
    assert Double.apply(x).tolist() == [2, 2]


def test_hooks_on_saved_tensors_are_told() -> None:
    x, seen = torch.ones(2, requires_grad=True), list[bool]()

    def run(x: torch.Tensor) -> torch.Tensor:
        seen.append(saves_by_hooks())
        return x.sin()

    with hooks_wrapped(lambda: seen.append(True)):
        checkpoint(run, x, use_reentrant=False)
    assert seen == [True, True] and not saves_by_hooks()


def test_a_mode_sees_no_grad() -> None:
    class Seen(torch.overrides.TorchFunctionMode):
        functions: list[Any] = []  # noqa: RUF012

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.functions.append(func)
            return func(*args, **(kwargs or {}))

    with Seen() as mode, torch.no_grad():
        pass
    assert SET_GRAD_ENABLED in mode.functions


def test_a_function_runs_without_hooks_on_saved_tensors() -> None:
    seen: list[str] = []

    def hooks(name: str) -> Hooks:
        def pack(tensor: torch.Tensor) -> torch.Tensor:
            seen.append(name)
            return tensor.detach()

        return pack, lambda tensor: tensor

    own, other = hooks("own"), hooks("other")
    x = torch.ones(2, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(*own):
        run_unhooked(own, torch.exp, (x,), {})
        assert seen == []
        torch.exp(x)
        assert seen == ["own"]
        with torch.autograd.graph.saved_tensors_hooks(*other):
            run_unhooked(own, torch.exp, (x,), {})
        assert seen == ["own", "other"]
    run_unhooked(own, torch.exp, (x,), {})
    assert seen == ["own", "other"]


def test_a_function_knows_which_gradients_a_pass_wants() -> None:
    wanted: list[list[bool]] = []

    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, factor: float, y: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x, y)
            return x * y * factor

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
            wanted.append(wanted_by_backward(ctx))
            x, y = ctx.saved_tensors
            return gradients[0] * y, None, gradients[0] * x

    x, y = (torch.ones(2, requires_grad=True) for _ in range(2))
    result = Product.apply(x * 2, 1.0, y * 2).sum()
    torch.autograd.grad(result, x, retain_graph=True)
    torch.autograd.grad(result, y, retain_graph=True)
    result.backward()
    assert wanted == [[True, False], [False, True], [True, True]]
    (found,) = torch.autograd.grad(Product.apply(x, 3.0, y).sum(), x)
    assert wanted[-1][0] and found.tolist() == [1, 1]


def test_checkpointing_stops_its_second_run_by_an_error() -> None:
    seen: list[type[BaseException]] = []

    def watched(x: torch.Tensor) -> torch.Tensor:
        try:
            return (x.sin() * 2).exp() + 1
        except Exception as error:
            seen.append(type(error))
            raise

    x = torch.ones(2, requires_grad=True)
    result: torch.Tensor = checkpoint(watched, x, use_reentrant=False)
    result.sum().backward()
    assert seen == [StopRecomputation]


class Seen(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("shape", [(4,), (2, 2)])
def test_no_mode_sees_the_backward_of_a_compiled_graph(shape: tuple[int, ...]) -> None:
    def run(x: torch.Tensor) -> tuple[torch.Tensor]:
        return ((x.sin() * 2).view(shape),)

    compiled = torch.compile(run, backend="aot_eager", dynamic=False)
    seen = {}
    for quiet in (False, True):
        x = torch.ones(4, requires_grad=True)
        (y,) = compiled(x)
        if quiet:
            without_modes_in_backward((y,))
        z, one = y.sum(), torch.ones(())
        with Seen() as mode:
            run_engine((z,), (one,), False, False, (), allow_unreachable=True, accumulate_grad=True)
        seen[quiet] = mode.names
        assert x.grad is not None and torch.allclose(x.grad, 2 * torch.ones(4).cos())
    assert seen[False] and not seen[True]


def test_modes_are_back_after_the_backward_of_a_compiled_graph() -> None:
    compiled = torch.compile(lambda x: (x.sin(),), backend="aot_eager", dynamic=False)
    x = torch.ones(4, requires_grad=True)
    doubled = Double.apply(x)
    (y,) = compiled(doubled)
    without_modes_in_backward((y,))
    with Seen() as mode:
        run_engine((y.sum(),), (torch.ones(()),), False, False, (), allow_unreachable=True, accumulate_grad=True)
    assert "mul" in mode.names or "__mul__" in mode.names


def test_accumulation_hooks_are_seen() -> None:
    one, other = (torch.ones(2, requires_grad=True) for _ in range(2))
    one.register_post_accumulate_grad_hook(lambda tensor: None)
    assert has_accumulation_hooks(one)
    assert not has_accumulation_hooks(other)


class Sums(TorchDispatchMode):
    """What is known of each addition that runs in backward."""

    def __init__(self) -> None:
        super().__init__()
        uses_of_one()
        self.found: list[tuple[bool, bool]] = []
        self.nodes: set[int | None] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.add.Tensor and backward_id() != -1:
            self.found.append((called_by_engine(depth=1), is_held_once(args[0])))
            self.nodes.add(running_node())
        return func(*args, **(kwargs or {}))


class AddsItself(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 5

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0] * 2 + gradients[0] * 3


def test_sums_of_the_engine_are_told_from_those_in_python() -> None:
    with FakeTensorMode(), Sums() as sums:
        w = torch.ones(4, requires_grad=True) * 2
        (w.sin() + w.cos()).sum().backward()
        v = w.detach().requires_grad_() * 1
        run_engine(
            ((v.sin() + v.cos()).sum(),),
            (torch.ones(()),),
            False,
            False,
            (),
            allow_unreachable=True,
            accumulate_grad=True,
        )
        assert sums.found == [(True, True)] * 2
        AddsItself.apply(torch.ones(4, requires_grad=True) * 2).sum().backward()
    assert [by_engine for by_engine, _ in sums.found] == [True, True, False]
    assert running_node() is None and None not in sums.nodes and len(sums.nodes) == 3


def test_a_gradient_that_two_functions_wait_for_is_held_twice() -> None:
    with FakeTensorMode(), Sums() as sums:
        w = torch.ones(4, requires_grad=True) * 2
        other, cosine = w * 3, w.cos()
        ((w + other) * cosine).sum().backward()
    assert (True, False) in sums.found
