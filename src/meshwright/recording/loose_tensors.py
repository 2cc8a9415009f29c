"""Find the tensors of a model that are neither parameters nor buffers, and keep those that are aliases up to date.

They are in plain attributes of modules: directly, in lists, tuples and dicts, in objects, in modules that are not
registered, or in a function's closure. A `TensorPlace` is a path of names, so it is also valid in a copy of the model.

An alias is a second reference to a parameter, or a view of one, as `nn.LSTM` keeps in `_flat_weights`. Strategies
replace parameters by shards, casts or stand-ins. So a module with aliases re-reads each parameter from its owner before
every `forward`. If the model has assigned another tensor to the attribute, that tensor is kept.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

from meshwright.errors import Refused
from meshwright.recording.dtensor import is_dtensor
from meshwright.recording.wrap_forward import wrap_forward
from meshwright.torch_private.modules import REGISTERED

DEPTH = 8
"""How deeply containers and objects may be nested."""
ALIASES = "_meshwright_aliases"
"""The module attribute that stores its `Alias` objects."""
_APART = (*REGISTERED, ALIASES)
_CONTAINERS = (dict, OrderedDict, list, tuple, set)
_ATOMS = (type(None), bool, int, float, complex, str, bytes, type, ModuleType, torch.dtype, torch.device, torch.Size)


@dataclass(frozen=True)
class Step:
    """One step into an object: an item of a container, a closure variable of a function, or an attribute."""

    kind: str
    key: Any

    def take(self, holder: Any) -> Any:
        if self.kind == "item":
            return holder[self.key]
        if self.kind == "cell":
            return holder.__closure__[self.key].cell_contents
        own = getattr(holder, "__dict__", {})
        return own[self.key] if self.key in own else getattr(holder, self.key)

    def put(self, holder: Any, value: Any) -> None:
        if self.kind == "item":
            holder[self.key] = value
        elif self.kind == "cell":
            holder.__closure__[self.key].cell_contents = value
        elif self.key in getattr(holder, "__dict__", {}):
            # Not setattr: a frozen object refuses it, and a module would register the tensor as a parameter.
            holder.__dict__[self.key] = value
        else:
            object.__setattr__(holder, self.key, value)

    def __str__(self) -> str:
        return f".{self.key}" if self.kind == "attribute" else f"[{self.key!r}]"


Path = tuple[Step, ...]


@dataclass(frozen=True)
class TensorPlace:
    """Where a tensor is: a module's name in the model, and the steps from that module."""

    module: str
    path: Path

    def take(self, model: nn.Module) -> Any:
        return take(model.get_submodule(self.module), self.path)

    def put(self, model: nn.Module, value: Any) -> None:
        put(model.get_submodule(self.module), self.path, value)

    def __str__(self) -> str:
        return f"{self.module}{''.join(map(str, self.path))}".lstrip(".")


def take(holder: Any, path: Path) -> Any:
    """The value at the end of a path."""
    for step in path:
        holder = step.take(holder)
    return holder


def put(holder: Any, path: Path, value: Any) -> None:
    """Put a value at the end of a path. A tuple on the way is rebuilt."""
    *before, last = path
    inner = take(holder, tuple(before))
    if not isinstance(inner, tuple):
        last.put(inner, value)
        return
    items = [value if index == last.key else item for index, item in enumerate(inner)]
    rebuilt = type(inner)(*items) if hasattr(inner, "_fields") else type(inner)(items)
    put(holder, tuple(before), rebuilt)


def loose_tensors(model: nn.Module) -> Iterator[tuple[TensorPlace, torch.Tensor]]:
    """Every tensor that is neither a parameter nor a buffer, with each of its places."""
    seen: dict[int, Any] = {id(module): module for module in model.modules()}
    for name, module in model.named_modules():
        for attribute, value in list(vars(module).items()):
            if attribute not in _APART and not _is_bare(value):
                for path, tensor in _within(value, (Step("attribute", attribute),), seen):
                    yield TensorPlace(name, path), tensor


def _is_bare(value: Any) -> bool:
    """Whether a value can hold no tensor: a number, a name, an empty container such as a module's unused hooks."""
    return isinstance(value, _ATOMS) or (type(value) in _CONTAINERS and not value)


def _within(value: Any, path: Path, seen: dict[int, Any]) -> Iterator[tuple[Path, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield path, value
        return
    if id(value) in seen or len(path) > DEPTH:
        return
    if not isinstance(value, tuple):  # Python may share one tuple object between many places
        seen[id(value)] = value
    for step, inner in _contents(value):
        if not _is_bare(inner):
            yield from _within(inner, (*path, step), seen)


def _contents(value: Any) -> Iterator[tuple[Step, Any]]:
    if isinstance(value, dict):
        yield from ((Step("item", key), item) for key, item in list(value.items()))
    elif isinstance(value, list | tuple):
        yield from ((Step("item", index), item) for index, item in enumerate(value))
    elif isinstance(value, FunctionType):
        yield from _closed_over(value)
        if value.__defaults__:
            yield Step("attribute", "__defaults__"), value.__defaults__
    elif isinstance(value, MethodType):
        yield Step("attribute", "__self__"), value.__self__
    elif isinstance(value, partial):
        yield Step("attribute", "func"), value.func
        yield Step("attribute", "keywords"), value.keywords
    if isinstance(value, torch.Generator):
        return
    yield from ((Step("attribute", name), item) for name, item in list(getattr(value, "__dict__", {}).items()))
    yield from ((Step("attribute", name), item) for name, item in slots_of(value))


def _closed_over(function: FunctionType) -> Iterator[tuple[Step, Any]]:
    for index, cell in enumerate(function.__closure__ or ()):
        try:
            yield Step("cell", index), cell.cell_contents
        except ValueError:  # a variable that was never set
            continue


def slots_of(value: Any) -> Iterator[tuple[str, Any]]:
    """Names and values of the attributes that a class declares in `__slots__`."""
    for cls in type(value).__mro__:
        names = vars(cls).get("__slots__", ())
        for name in (names,) if isinstance(names, str) else names:
            if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                yield name, getattr(value, name)


@dataclass(frozen=True)
class View:
    """Which elements of a tensor a view covers."""

    whole: tuple[int, ...]
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    """In elements, from the first element of the tensor."""
    differentiable: bool

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        base = tensor if self.differentiable else tensor.detach()
        return base.as_strided(self.size, self.stride, tensor.storage_offset() + self.offset)


@dataclass
class Alias:
    """A second reference to a parameter or buffer, or to a view of one."""

    name: str
    """How messages name the reference."""
    holder: nn.Module
    path: tuple[Step, ...]
    owner: nn.Module
    attribute: str
    view: View | None
    last: torch.Tensor
    """The tensor that was last put there. If another one is found, the model has assigned it."""

    def refresh(self) -> None:
        if take(self.holder, self.path) is self.last:
            self.set(getattr(self.owner, self.attribute))

    def restore(self) -> None:
        """Point at the registered parameter again, and so release what was computed for one pass."""
        registered = self.owner._parameters.get(self.attribute)
        if registered is not None and self.view is None and take(self.holder, self.path) is self.last:
            self.set(registered)

    def set(self, tensor: torch.Tensor) -> None:
        new = tensor if self.view is None else self._view_of(tensor, self.view)
        if new is not self.last:
            put(self.holder, self.path, new)
            self.last = new

    def _view_of(self, tensor: torch.Tensor, view: View) -> torch.Tensor:
        if is_dtensor(tensor) or tuple(tensor.shape) != view.whole:
            raise Refused(
                f"The model keeps {self.name}, a view of its {self.attribute}, but under this strategy a rank holds "
                "a part of that; make the view in forward, or use a strategy that keeps parameters whole (ddp, zero1)."
            )
        return view.of(tensor)


def keep_aliases(model: nn.Module, found: list[tuple[TensorPlace, str, View | None]]) -> None:
    """Make these places follow the parameters and buffers with these names from now on."""
    if not found:
        return
    kept: dict[int, list[Alias]] = {}
    for place, name, view in found:
        holder, (owner, _, attribute) = model.get_submodule(place.module), name.rpartition(".")
        alias = Alias(
            str(place), holder, place.path, model.get_submodule(owner), attribute, view, take(holder, place.path)
        )
        kept.setdefault(id(holder), []).append(alias)
    for own in kept.values():
        if (holder := own[0].holder) is not model:
            vars(holder)[ALIASES] = own
            wrap_forward(holder, _refreshed)
    # A module that is never called, such as a ModuleList, is refreshed with the model.
    vars(model)[ALIASES] = [alias for own in kept.values() for alias in own]
    wrap_forward(model, _refreshed_and_restored)


def refresh_aliases(model: nn.Module) -> None:
    """Point all aliases at the current parameters and buffers."""
    for alias in vars(model).get(ALIASES, ()):
        alias.refresh()


def _refreshed(module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    refresh_aliases(module)
    return forward(*args, **kwargs)


def _refreshed_and_restored(module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    try:
        return _refreshed(module, forward, args, kwargs)
    finally:
        for alias in vars(module)[ALIASES]:
            alias.restore()
