"""Wrap a module's `forward` without wrapping the module, so that parameter names do not change; and remove hooks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

from meshwright.torch_private.modules import is_compiled, wrap_compiled_call

Around = Callable[[nn.Module, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]


def wrap_forward(module: nn.Module, around: Around) -> None:
    """Make `module(...)` run `around(module, forward, args, kwargs)` from now on.

    The module's class is replaced by a subclass. An attribute on the instance is not enough: DataParallel's copies of
    the module would call the original's.
    """
    own = module.__dict__.pop("forward", None)
    cls = type(module)
    if own is not None:
        cls = _subclass(cls, _unbound(own))
    module.__class__ = _wrapped(cls, around)  # type: ignore[arg-type]  # classes are hashable


def wrap_call(module: nn.Module, around: Around) -> None:
    """Like `wrap_forward`, but outside what was compiled, if the module is compiled."""
    if not is_compiled(module):
        wrap_forward(module, around)
        return

    def wrap(compiled: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: around(module, compiled, args, kwargs)

    wrap_compiled_call(module, wrap)


@contextmanager
def replaced_forwards(modules: Mapping[str, nn.Module], call: Callable[..., Any]) -> Iterator[None]:
    """While active, a module runs `call(name, forward, *args, **kwargs)`. It is set on the instance."""
    before = {name: vars(module).get("forward") for name, module in modules.items()}
    for name, module in modules.items():
        module.forward = functools.partial(call, name, module.forward)
    try:
        yield
    finally:
        for name, module in modules.items():
            vars(module).pop("forward") if before[name] is None else vars(module).update(forward=before[name])


@contextmanager
def removing(hooks: list[Any]) -> Iterator[None]:
    """Remove the hooks when the context ends."""
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@functools.lru_cache(maxsize=256)  # bounded: it keeps the closures of the wrappers alive
def _wrapped(cls: Any, around: Around) -> type[nn.Module]:
    """One class for all modules that are wrapped the same way: torch.compile compiles it once, not once per block."""
    inner = cls.forward

    @functools.wraps(inner)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return around(self, functools.partial(inner, self), args, kwargs)

    return _subclass(cls, forward)


def _subclass(cls: type[nn.Module], forward: Callable[..., Any]) -> type[nn.Module]:
    names = {"forward": forward, "__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    return type(cls.__name__, (cls,), names)


def _unbound(bound: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(bound)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return bound(*args, **kwargs)

    return forward
