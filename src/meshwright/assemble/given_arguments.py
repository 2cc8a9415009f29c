"""Arguments of a block as they were when it first ran, for running it again in backward.

A block may change an object that it is given: attention appends its keys and values to a cache, a layer appends its
output to a list. Run again on the changed object, it would compute something else.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, MutableMapping, MutableSequence
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from meshwright.recording.loose_tensors import slots_of

UNCHANGING = (
    *(torch.Tensor, nn.Module, torch.dtype, torch.device, torch.Size),
    *(bool, int, float, complex, str, bytes, type(None), type, FunctionType, MethodType),
)


def on_given_arguments(forward: Callable[..., Any], args: Any, kwargs: Any) -> Callable[..., Any]:
    """`forward`, which from its second call on gets copies of the objects among these arguments. Tensors are shared."""
    held = {place: value for place, value in [*enumerate(args), *kwargs.items()] if not _never_changes(value)}
    if not held:
        return forward
    given, has_run = _copied(held), False

    def run(*args: Any, **kwargs: Any) -> Any:
        nonlocal has_run
        if has_run:
            now = _copied(given)  # a graph that is kept runs more than once
            args = tuple([now.get(place, value) for place, value in enumerate(args)])
            kwargs = {name: now.get(name, value) for name, value in kwargs.items()}
        has_run = True
        return forward(*args, **kwargs)

    return run


def _never_changes(value: Any) -> bool:
    return isinstance(value, UNCHANGING) or (type(value) is tuple and all(map(_never_changes, value)))


def _copied(values: dict[Any, Any]) -> dict[Any, Any]:
    """Copies of objects; one that cannot be copied is given as it is."""
    found = {}
    for place, value in values.items():
        try:
            found[place] = _copy(value, {})
        except Exception:
            found[place] = value
    return found


def _copy(value: Any, made: dict[int, Any]) -> Any:
    """A copy whose containers and objects are new, and whose tensors and modules are the same."""
    if _never_changes(value):
        return value
    if id(value) in made:
        return made[id(value)]
    if type(value) is tuple:
        return tuple([_copy(each, made) for each in value])
    new = made[id(value)] = copy.copy(value)
    if isinstance(value, MutableMapping):
        for key, each in value.items():
            new[key] = _copy(each, made)
    elif isinstance(value, MutableSequence):
        new[:] = [_copy(each, made) for each in value]
    for name, each in [*getattr(value, "__dict__", {}).items(), *slots_of(value)]:
        object.__setattr__(new, name, _copy(each, made))
    return new
