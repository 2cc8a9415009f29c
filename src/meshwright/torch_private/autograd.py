"""Autograd's engine and its graph (PyTorch 2.11 to 2.13)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import cache
from typing import Any
from unittest.mock import patch

import torch
from torch.autograd import DeviceType
from torch.autograd.function import BackwardCFunction
from torch.autograd.variable import Variable
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils.checkpoint import _StopRecomputationError as StopRecomputation

__all__ = ["BackwardCFunction", "DeviceType", "StopRecomputation"]


def run_engine(*args: Any, **kwargs: Any) -> Any:
    """Run a backward pass below `Tensor.backward`, where function modes do not intercept it."""
    return Variable._execution_engine.run_backward(*args, **kwargs)


def has_accumulation_hooks(tensor: torch.Tensor) -> bool:
    """Whether `register_post_accumulate_grad_hook` was called on a tensor."""
    return bool(tensor._post_accumulate_grad_hooks)


def engine_wrapped(wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> AbstractContextManager[Any]:
    """Context in which `Tensor.backward`, `autograd.backward` and `autograd.grad` run the engine by `wrap(run)`."""
    name = "_engine_run_backward"
    return patch.object(torch.autograd, name, wrap(getattr(torch.autograd, name)))


def engine_inside(mode: AbstractContextManager[Any]) -> AbstractContextManager[Any]:
    """For a function mode that handles a backward pass, in which it is off: run the engine with it on again."""

    def wrap(run: Callable[..., Any]) -> Callable[..., Any]:
        def run_inside(*args: Any, **kwargs: Any) -> Any:
            with mode:
                return run(*args, **kwargs)

        return run_inside

    return engine_wrapped(wrap)


def wrap_engine(wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Like `engine_wrapped`, but from now on."""
    torch.autograd._engine_run_backward = wrap(torch.autograd._engine_run_backward)


SET_GRAD_ENABLED = torch._C._set_grad_enabled
"""How function modes see `no_grad` and its relatives."""

backward_id: Callable[[], int] = torch._C._current_graph_task_id
"""The id of the backward pass that this thread runs, or -1."""


def running_node() -> int | None:
    """A number for the function whose backward runs now, if any."""
    node = torch._C._current_autograd_node()
    return None if node is None else node._sequence_nr()


def called_by_engine(depth: int = 2) -> bool:
    """Whether a dispatch mode's handler, `depth` frames above this function, was called by autograd's engine itself.

    PyTorch's wrappers around handlers are passed over.
    """
    frame = sys._getframe(depth)
    while frame.f_back is not None:
        frame = frame.f_back
        if not frame.f_code.co_filename.endswith(_WRAPPERS):
            return frame.f_code in _CALLERS
    return True  # a thread of the engine's own


_WRAPPERS = ("torch/_compile.py", "torch/_dynamo/eval_frame.py")
_CALLERS = {torch.autograd.graph._engine_run_backward.__code__, run_engine.__code__}


def is_held_once(tensor: torch.Tensor) -> bool:
    """Whether nobody else holds a gradient that the engine adds to, as a dispatch mode's handler sees its argument.

    The engine then adds to it in place, but never to a fake tensor. Call `uses_of_one` before, outside of backward.
    """
    own = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata) == 2  # the tensor's, and this one
    return own and tensor._use_count() == uses_of_one()  # type: ignore[attr-defined]


@cache
def uses_of_one() -> int:
    """The references to a gradient that only the engine holds, those of the call to a handler included."""
    found: list[int] = []

    class See(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten.add.Tensor:
                found.append(args[0]._use_count())
            return func(*args, **(kwargs or {}))

    with _disable_current_modes(), torch.inference_mode(False), torch.enable_grad():
        x = torch.ones(1, requires_grad=True)
        twice = (x.sin(), x.cos())
        with See():
            torch.autograd.grad(twice, x, (torch.ones(1), torch.ones(1)))
    return found[0]


at_end_of_backward: Callable[[Callable[[], None]], None] = Variable._execution_engine.queue_callback
"""Call a function when the backward pass that this thread runs has ended. A function that was called so may add others,
which come after those that are there."""


def own_functions_wrapped(told: Callable[[str], None]) -> AbstractContextManager[Any]:
    """Context in which `told(name)` is called before each `torch.autograd.Function.apply`."""
    plain = torch.autograd.Function.__dict__["apply"].__func__

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        told(cls.__name__)
        return plain(cls, *args, **kwargs)

    return patch.object(torch.autograd.Function, "apply", classmethod(apply))


def own_functions_given(convert: Callable[[tuple[Any, ...]], tuple[Any, ...]]) -> AbstractContextManager[Any]:
    """Context in which `torch.autograd.Function.apply` gets `convert(args)`."""
    plain = torch.autograd.Function.__dict__["apply"].__func__

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        return plain(cls, *convert(args), **kwargs)

    return patch.object(torch.autograd.Function, "apply", classmethod(apply))


def hooks_wrapped(told: Callable[[], None]) -> AbstractContextManager[Any]:
    """Context in which `told()` is called before hooks on saved tensors become active, as checkpointing has them."""
    hooks = torch.autograd.graph.saved_tensors_hooks
    plain = hooks.__enter__

    def enter(self: Any) -> Any:
        told()
        return plain(self)

    return patch.object(hooks, "__enter__", enter)


def direct_apply(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """`function.apply` without its support for functorch's transforms, which takes as long as a small kernel's launch.

    The function must not define `setup_context`. `own_functions_wrapped` does not see it.
    """
    apply: Callable[..., Any] = super(torch.autograd.Function, function).apply  # type: ignore[misc]
    return apply


def saves_by_hooks(known: Any = None) -> bool:
    """Whether hooks other than a `known` one handle the tensors that autograd saves now, as where it checkpoints."""
    active = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return active is not None and active[0] is not known


def wanted_by_backward(node: Any) -> list[bool]:
    """Whether the backward pass that runs now wants the gradient of each tensor that a function got.

    `ctx.needs_input_grad` says whether any pass may want it. A pipeline's pass for inputs alone wants no weight's. Of
    leaves, `torch.autograd.grad` does not tell.
    """
    return [below is not None and _is_wanted(below) for below, _ in node.next_functions]


def _is_wanted(node: Any) -> bool:
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:
        return True


Hooks = tuple[Callable[..., Any], Callable[..., Any]]


def run_unhooked(hooks: Hooks, func: Any, args: Any, kwargs: Any) -> Any:
    """Run a function without the innermost hooks on saved tensors if they are these, which saves calling them."""
    active = torch._C._autograd._top_saved_tensors_default_hooks(False)
    if active is None or active[0] is not hooks[0]:
        return func(*args, **kwargs)
    torch._C._autograd._pop_saved_tensors_default_hooks()
    try:
        return func(*args, **kwargs)
    finally:
        torch._C._autograd._push_saved_tensors_default_hooks(*hooks)


_COMPILED = "CompiledFunctionBackward"


def without_modes_in_backward(results: Sequence[torch.Tensor]) -> None:
    """Let the compiled graph that made these tensors run backward without function modes.

    Its code calls torch functions one after another, and a mode that is active in backward would look at each.
    """
    node = _compiled_node(results)
    if node is None:
        return
    active: list[Any] = []

    def begin(gradients: Any) -> None:
        active.append(torch._C.DisableTorchFunction())
        active[-1].__enter__()

    def end(*gradients: Any) -> None:
        active.pop().__exit__(None, None, None)

    node.register_prehook(begin)
    node.register_hook(end)


def _compiled_node(results: Sequence[torch.Tensor]) -> Any:
    """The node of a compiled graph: that of its results, or the one before it if a result is a view."""
    for result in results:
        node = result.grad_fn
        for found in (node, *(below for below, _ in node.next_functions)) if node is not None else ():
            if type(found).__name__ == _COMPILED:
                return found
    return None
