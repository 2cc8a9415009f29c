"""Recompute cheap results one function at a time, when backward asks for them.

While a block runs, each call of a cheap torch function is noted: the function and its arguments. Where autograd would
save the result of such a call, or a view of it, it saves a handle. Backward exchanges the handle for the result: the
function runs again, after those that made its arguments, each at most once. All other tensors are kept: the block's
inputs, results of products, convolutions and attention, random results, and what was made unseen. No operator is
dispatched through Python and no second graph is built, unlike in PyTorch's selective checkpointing.

Tensors are known by their storage, because autograd often saves a view that no function returned.

Never wrong silently: a handle whose arguments were changed in place since raises an error, as autograd itself does.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode

from meshwright.assemble.cheap_functions import CHEAP, CHEAP_IN_PLACE, SAVED_RESULTS, UNCHANGING, stateless
from meshwright.errors import JobError
from meshwright.strategies.intercepted import changed_by
from meshwright.strategies.recorder import SELECTIVE as RECORDED_AS
from meshwright.torch_private.autograd import Hooks, run_unhooked
from meshwright.torch_private.fake_tensors import FakeTensor
from meshwright.torch_private.modes import below_all_modes, without_torch_function
from meshwright.torch_private.tensors import version_of

SMALLER = 4
"""A result that is this many times smaller than an argument is kept, because keeping the argument would cost more."""
_PLAIN = frozenset((Tensor, nn.Parameter, FakeTensor))
"""Classes of tensors that are known by their storage; other subclasses are kept as they are."""
_thread = threading.local()

View = tuple[torch.dtype, torch.Size, tuple[int, ...], Any]
"""A tensor's dtype, shape, strides and offset in its storage."""


def run_selectively(forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Run a block's forward; what is cheap to make again is not kept for backward."""
    if not torch.is_grad_enabled() or getattr(_thread, "noting", False):
        return forward(*args, **kwargs)
    region = _Region()
    _thread.noting = True
    try:
        with below_all_modes(region), saved_tensors_hooks(*region.hooks):
            return forward(*args, **kwargs)
    finally:
        _thread.noting = False
        region.end()


def is_recomputing() -> bool:
    """Whether this thread makes a result again."""
    return getattr(_thread, "recomputing", False)


class _Handle:
    """A tensor that backward or a noted call needs: the tensor itself, or the call that makes it."""

    __slots__ = ("call", "tensor", "version", "view")

    def __init__(
        self, tensor: Tensor | None, version: int, call: _Call | None = None, view: View | None = None
    ) -> None:
        self.tensor, self.version, self.call, self.view = tensor, version, call, view

    def get(self) -> Tensor:
        if self.call is not None:
            value = self.call.value()
            return value if self.view is None else _viewed(value, self.view)
        tensor = self.tensor
        assert tensor is not None
        if version_of(tensor) != self.version:
            raise JobError(
                "A tensor that backward needs was changed in place after the model had used it: one of shape "
                f"{tuple(tensor.shape)}, {self.version} changes when it was used and {version_of(tensor)} now. "
                "Under ac=selective, tensors must stay as they are until backward; change a copy, or drop ac."
            )
        return tensor

    def make_again(self, call: _Call) -> None:
        """Let go of the tensor, because it turned out to be the result of a call."""
        assert self.tensor is not None
        self.view, self.call, self.tensor = call.seen_as(_view_of(self.tensor)), call, None


class _Call:
    """A call of a cheap function, which can be run again."""

    __slots__ = ("_again", "_autocast", "_device", "_result", "storage", "version", "view")

    def __init__(self, func: Any, held: _Held, result: Tensor, storage: torch.UntypedStorage) -> None:
        self._again: tuple[Any, _Held] | None = (func, held)
        self._result: Tensor | None = None
        self._device = "cuda" if result.is_cuda else result.device.type
        self._autocast = _autocast_dtype(self._device)
        self.storage, self.version, self.view = weakref.ref(storage), version_of(result), _view_of(result)

    def seen_as(self, view: View) -> View | None:
        return None if view == self.view else view

    def value(self) -> Tensor:
        """The result. Calls that made its arguments run first, without recursion, because chains may be long."""
        stack = [self]
        while stack:
            waiting = [handle.call for handle in stack[-1].needs() if handle.call is not None and handle.call._again]
            if waiting:
                stack += waiting
            else:
                stack.pop()._run()
        assert self._result is not None
        return self._result

    def needs(self) -> Sequence[_Handle]:
        """Handles of the tensors among the arguments."""
        again = self._again
        return again[1].handles if again is not None else ()

    def _run(self) -> None:
        again = self._again
        if again is None:
            return
        func, held = again
        with _autocasting(self._device, self._autocast):
            result = func(*_exchanged(held.args), **_exchanged(held.kwargs))
        self._result = result if _view_of(result) == self.view else _laid_out(result, self.view)
        self._again = None  # frees the arguments; comes last, because another thread may wait for the result


class _Held:
    """Arguments of a call, with handles in place of tensors."""

    __slots__ = ("args", "handles", "kwargs")

    def __init__(self, handles: list[_Handle], args: Any, kwargs: Any) -> None:
        self.handles, self.args, self.kwargs = handles, args, kwargs


class _CannotHold(Exception):
    """A call cannot or need not be noted."""


class _Region(TorchFunctionMode):
    """Notes the cheap calls of one block's forward pass."""

    recorded_as = RECORDED_AS

    def __init__(self) -> None:
        super().__init__()
        self._calls: dict[int, _Call] = {}
        """By the identity of the result's storage."""
        self._noted: list[_Call] = []
        self.hooks: Hooks = (self.handle, _unpack)
        self._fresh: list[_Handle] | None = None
        """While a cheap function runs, handles of unknown tensors that autograd saves: its result may be one."""

    def end(self) -> None:
        """Forget all calls; handles hold those that are needed."""
        self._calls.clear()
        self._noted.clear()
        del self.hooks  # a reference to itself

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in UNCHANGING:
            return func(*args, **kwargs) if kwargs else func(*args)
        kwargs = kwargs or {}
        cheap = func in CHEAP
        if not cheap or "inplace" in kwargs or "out" in kwargs:
            changed = changed_by(func, args, kwargs)
            if changed is not None:
                return self._change(changed, func, args, kwargs)
        known = self._is_known(args) or (kwargs and self._is_known(kwargs.values()))
        if not cheap or not torch.is_grad_enabled():  # off inside of autograd functions, which may hide things
            return func(*args, **kwargs) if known else run_unhooked(self.hooks, func, args, kwargs)
        if known or func in SAVED_RESULTS:
            result, fresh = self._run(func, args, kwargs)
        else:
            result, fresh = run_unhooked(self.hooks, func, args, kwargs), []
        if type(result) not in _PLAIN or (storage := _storage_of(result)) is None:
            return result
        try:
            held = self._hold(*stateless(func, args, kwargs), storage, result.numel())
        except _CannotHold:
            return result
        self._note(func, held, result, storage, fresh)
        return result

    def _is_known(self, values: Iterable[Any]) -> bool:
        """Whether an argument may be the result of a noted call, so that autograd is to save a handle of it."""
        for value in values:
            kind = type(value)
            if kind in _PLAIN:
                if id(_storage_of(value)) in self._calls:
                    return True
            elif (kind is list or kind is tuple) and self._is_known(value):
                return True
        return False

    def handle(self, tensor: Tensor) -> _Handle:
        """What autograd saves in place of a tensor."""
        found = self._handle(tensor, _storage_of(tensor))
        if found.tensor is not None:
            if tensor.grad_fn is not None:
                found.tensor = tensor.detach()  # else a function that saves its result would refer to itself
            if self._fresh is not None:
                self._fresh.append(found)
        return found

    def _handle(self, tensor: Tensor, storage: torch.UntypedStorage | None) -> _Handle:
        version = version_of(tensor)
        call = self._calls.get(id(storage))
        if call is not None and call.storage() is storage and call.version == version:
            view = call.seen_as(_view_of(tensor))
            if view is None or not (tensor.is_conj() or tensor.is_neg()):
                return _Handle(None, version, call, view)
        return _Handle(tensor, version, None, None)

    def _run(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, list[_Handle]]:
        """Run a function; also return the handles of unknown tensors that autograd saved meanwhile."""
        fresh: list[_Handle] = []
        self._fresh = fresh
        try:
            return func(*args, **kwargs), fresh
        finally:
            self._fresh = None

    def _note(
        self, func: Any, held: _Held, result: Tensor, storage: torch.UntypedStorage, fresh: list[_Handle]
    ) -> None:
        call = _Call(func, held, result, storage)
        self._calls[id(storage)] = call
        self._noted.append(call)
        for handle in fresh:
            if handle.tensor is not None and _storage_of(handle.tensor) is storage:
                handle.make_again(call)

    def _change(self, target: Tensor, func: Any, args: Any, kwargs: Any) -> Any:
        """Run a function that changes a tensor. If the tensor is a noted result, so is the changed one."""
        storage = _storage_of(target)
        if storage is None:
            return func(*args, **kwargs)
        self._make_dependents(storage)
        pure = CHEAP_IN_PLACE.get(func) or (func if func in CHEAP and kwargs.get("inplace") else None)
        held = self._hold_changed(target, storage, args, kwargs) if pure is not None else None
        self._calls.pop(id(storage), None)
        if held is None:
            return func(*args, **kwargs)
        result, fresh = self._run(func, args, kwargs)
        self._note(pure, held, target, storage, fresh)
        return result

    def _hold_changed(self, target: Tensor, storage: torch.UntypedStorage, args: Any, kwargs: Any) -> _Held | None:
        """Arguments for making the changed tensor again; None if it is not the whole result of a noted call."""
        call = self._calls.get(id(storage))
        if call is None or call.storage() is not storage or call.version != version_of(target):
            return None
        if _view_of(target) != call.view or not torch.is_grad_enabled():
            return None
        try:
            return self._hold(args, {k: v for k, v in kwargs.items() if k != "inplace"}, None, target.numel())
        except _CannotHold:
            return None

    def _make_dependents(self, storage: torch.UntypedStorage) -> None:
        """Compute the calls that read a kept tensor, while it has the values that they were called with."""
        for call in self._noted:
            if any(one.tensor is not None and _storage_of(one.tensor) is storage for one in call.needs()):
                _remade(call.value)

    def _hold(self, args: Any, kwargs: Any, result: torch.UntypedStorage | None, numel: int) -> _Held:
        """Arguments of a call with a result of `numel` elements.

        Nothing is to be noted if the result is a view of an argument, or much smaller than one.
        """
        handles: list[_Handle] = []
        largest = max(numel, SMALLER * numel - 1)
        held = [self._hold_one(arg, handles, result, largest) for arg in args]
        named = {key: self._hold_one(value, handles, result, largest) for key, value in kwargs.items()}
        if not handles:
            raise _CannotHold
        return _Held(handles, held, named)

    def _hold_one(self, value: Any, handles: list[_Handle], result: Any, largest: int) -> Any:
        kind = type(value)
        if kind in _PLAIN:
            storage = _storage_of(value)
            if storage is None or storage is result or value.numel() > largest or value.is_inference():
                raise _CannotHold
            handles.append(self._handle(value, storage))
            return handles[-1]
        if kind is tuple or kind is list:
            return kind([self._hold_one(item, handles, result, largest) for item in value])
        if isinstance(value, Tensor):
            raise _CannotHold
        return value


def _unpack(handle: _Handle) -> Tensor:
    return handle.get() if handle.call is None else _remade(handle.get)


def _remade(get: Callable[[], Tensor]) -> Tensor:
    before, _thread.recomputing = is_recomputing(), True
    try:
        with without_torch_function(), torch.no_grad() if torch.is_grad_enabled() else nullcontext():
            return get()
    finally:
        _thread.recomputing = before


def _storage_of(tensor: Tensor) -> torch.UntypedStorage | None:
    try:
        return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):  # sparse tensors, tensors inside of torch.func's transforms
        return None


def _view_of(tensor: Tensor) -> View:
    return tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset()


def _viewed(value: Tensor, view: View) -> Tensor:
    dtype, shape, stride, offset = view
    if dtype == value.dtype:
        return value.as_strided(shape, stride, offset)
    empty = torch.empty(0, dtype=dtype, device=value.device)
    return empty.set_(value.untyped_storage(), offset, shape, stride)


def _laid_out(result: Tensor, view: View) -> Tensor:
    """A result of an equal function, in the dtype and the layout of the noted one."""
    dtype, shape, stride, _ = view
    return torch.empty_strided(shape, stride, dtype=dtype, device=result.device).copy_(result)


def _exchanged(value: Any) -> Any:
    """Arguments with tensors in place of their handles."""
    kind = type(value)
    if kind is _Handle:
        return value.get()
    if kind is list or kind is tuple:
        return kind([_exchanged(item) for item in value])
    return {key: _exchanged(item) for key, item in value.items()} if kind is dict else value


def _autocast_dtype(device: str) -> torch.dtype | None:
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


def _autocasting(device: str, dtype: torch.dtype | None) -> AbstractContextManager[Any]:
    """Context with the autocast of the first run; backward usually runs without."""
    if _autocast_dtype(device) == dtype:
        return nullcontext()
    return torch.autocast(device, dtype=dtype, enabled=dtype is not None, cache_enabled=False)
