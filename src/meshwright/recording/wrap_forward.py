"""Put something around a module's `forward` without wrapping the module, so that names stay the user's."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

Around = Callable[[nn.Module, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]


def wrap_forward(module: nn.Module, around: Around) -> None:
    """From now on `module(...)` runs `around(module, forward, args, kwargs)`.

    The module gets a subclass of its own class. An attribute on the instance would not do: DataParallel's copies
    of the module would go on to call the original.
    """
    own = module.__dict__.pop("forward", None)
    cls = type(module)
    if own is not None:
        cls = _subclass(cls, _unbound(own))
    module.__class__ = _wrapped(cls, around)  # type: ignore[arg-type]  # classes are hashable


@contextmanager
def replaced_forwards(modules: Mapping[str, nn.Module], call: Callable[..., Any]) -> Iterator[None]:
    """While active, a module runs `call(name, forward, *args, **kwargs)`. Here an attribute on the instance will do."""
    before = {name: vars(module).get("forward") for name, module in modules.items()}
    for name, module in modules.items():
        module.forward = functools.partial(call, name, module.forward)
    try:
        yield
    finally:
        for name, module in modules.items():
            vars(module).pop("forward") if before[name] is None else vars(module).update(forward=before[name])


@functools.lru_cache(maxsize=256)  # bounded: it keeps what the wrappers close over
def _wrapped(cls: Any, around: Around) -> type[nn.Module]:
    """One class for all modules that are wrapped alike: torch.compile compiles them once, not once per block."""
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
