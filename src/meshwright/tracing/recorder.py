"""Record what a step on fake tensors allocates, computes and sends, operator by operator."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from meshwright.assemble.selective import is_recomputing
from meshwright.recording.report_as_cpu import tensors_in
from meshwright.torch_private.autograd import backward_id
from meshwright.torch_private.dtensor import local_tensor, shape_search_wrapped
from meshwright.torch_private.fake_tensors import FakeTensor, inside_kernel
from meshwright.torch_private.modes import TorchDispatchMode, without_torch_function
from meshwright.torch_private.operators import DEVICE_OF
from meshwright.torch_private.tensors import storage_id
from meshwright.torch_private.trees import tree_leaves, tree_map_only
from meshwright.tracing.gradient_sums import GradientSums
from meshwright.tracing.memory import Allocation, Ledger, Workspaces
from meshwright.tracing.meter import strided_in
from meshwright.tracing.step_counts import Messages, Operations, is_collective

aten = torch.ops.aten
_VIEWS = {
    *(aten.alias.default, aten.as_strided.default, aten.detach.default, aten.expand.default, aten.permute.default),
    *(aten.select.int, aten.slice.Tensor, aten.split.Tensor, aten.split_with_sizes.default, aten.t.default),
    *(aten.transpose.int, aten.unbind.int, aten.unsqueeze.default, aten.view.default),
}
_resize = torch.UntypedStorage.resize_


class StepRecorder(TorchDispatchMode):
    """While active, follows every new storage until it is freed, and notes every operator and collective."""

    def __init__(self, messages: Messages, ledger: Ledger | None = None, *, workspaces: bool = True) -> None:
        """`ledger` is where memory is noted; `workspaces` adds those of libraries, which operators do not show."""
        super().__init__()
        self.ledger = Ledger() if ledger is None else ledger
        self.operations, self.messages = Operations(), messages
        self.phase = "build"
        """"build", "forward_backward" or "update"; autograd tells forward from backward."""
        self.in_loss = self.paused = False
        self.keeps_values = False
        """Whether fake tensors have known values, which views must have too."""
        self.captured_losses = 0
        """How often a loss ran while paused."""
        self._workspaces = Workspaces(self.ledger) if workspaces else None
        self._blocks: dict[int, Allocation | None] = {}
        self._watched: dict[int, weakref.ref[Any]] = {}
        self._gradient_sums = GradientSums()
        self._hosts: set[int] = set()
        self._outputs: set[int] = set()
        """Numbers of elements of the loss's inputs: a tensor of that size in backward is their gradient."""
        self._streams: dict[int, int] = {}

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Activate the recorder, and patch what operators do not show.

        FSDP2 frees and allocates memory by resizing storages. DTensor runs operators on whole fake tensors to find
        shapes, which takes no memory.
        """

        def resize(storage: torch.UntypedStorage, size: int) -> Any:
            found = _resize(storage, size)
            self._resized(storage)
            return found

        with ExitStack() as stack:
            stack.enter_context(patch.object(torch.UntypedStorage, "resize_", resize))
            stack.enter_context(shape_search_wrapped(self._unrecorded))
            stack.enter_context(self)
            yield

    @contextmanager
    def pausing(self) -> Iterator[None]:
        """Record nothing, and restore the moment afterwards."""
        before, moment, self.paused = self.paused, self.ledger.moment, True
        try:
            yield
        finally:
            self.paused, self.ledger.moment = before, moment

    def _unrecorded(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            with self.pausing():
                return method(*args, **kwargs)

        return call

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is DEVICE_OF and type(args[0]) is FakeTensor and not args[0].fake_mode.in_kernel_invocation:
            return args[0].fake_device  # a shortcut for two thirds of all operators under a tensor axis
        if func in _VIEWS and type(args[0]) is FakeTensor and not self.paused and not self.keeps_values:
            return _view(func, args, kwargs)
        if DTensor in types:
            return NotImplemented  # a DTensor computes on its local tensor, which is dispatched here
        if self.paused:
            return func(*args, **(kwargs or {}))
        kwargs = dict(kwargs or {})
        pinned = kwargs.pop("pin_memory", None)
        found = func(*args, **kwargs)
        given, made = strided_in((args, kwargs)), strided_in(found)
        if any(map(_is_meta, made)):
            return found  # made only for its shape: on a GPU it takes no memory either
        if self._gradient_sums.in_place(func, args):
            self._take_over(args[0], found)
        self._follow(made, on_host=bool(pinned) or self._all_on_host(given))
        self._ran(func, args, kwargs, found, given, made)
        return found

    def ran(self, func: Any, args: Any, kwargs: Any, found: Any) -> None:
        """Note an operator that was not dispatched here."""
        self._ran(func, args, kwargs, found, tensors_in((args, kwargs)), tensors_in(found))

    def _ran(self, func: Any, args: Any, kwargs: Any, found: Any, given: list[Tensor], made: list[Tensor]) -> None:
        if is_collective(func):
            for tensor, cause in self.messages.note(func, args, self.step_phase):
                self.tell(tensor, cause, only={"activations", "temporary"})
            return
        if self._workspaces is not None:
            self._workspaces.note(func, args, found, self.step_phase)
        self.operations.note(func, args, kwargs, found, given, made, self.step_phase)

    @property
    def step_phase(self) -> str:
        if self.phase != "forward_backward":
            return self.phase
        return "forward" if backward_id() == -1 else "backward"

    def tell(self, tensor: Tensor, cause: str, only: set[str] | None = None) -> None:
        """Set the cause of a tensor's memory, if its current cause is among `only`."""
        block = self._blocks.get(storage_id(_local(tensor).untyped_storage()))
        if block is not None and (only is None or block.cause in only):
            block.cause = cause

    @contextmanager
    def loss_of(self, outputs: Any) -> Iterator[None]:
        """Context around the computation of the loss from the model's outputs."""
        if self.paused:
            self.captured_losses += 1
            yield
            return
        with without_torch_function():  # under a tensor axis, a torch function would gather divided tensors
            for tensor in tree_leaves(outputs):
                if isinstance(tensor, Tensor):
                    self._outputs.add(_local(tensor).numel())
                    self.tell(tensor, "logits")
        self.in_loss = True
        try:
            yield
        finally:
            self.in_loss = False

    def enter(self, phase: str) -> None:
        self.phase = phase
        self.at(phase)

    def at(self, moment: str) -> None:
        """Set the current moment of the step."""
        self.ledger.moment = moment

    def begin(self) -> int:
        """Reset the counts of operators and messages, and return the number of events so far."""
        self.operations.counts.clear()
        self.messages.counts.clear()
        return len(self.ledger.events)

    def _follow(self, tensors: list[Tensor], on_host: bool) -> None:
        for tensor in tensors:
            storage = tensor.untyped_storage()
            key = storage_id(storage)
            if key in self._watched:
                if (block := self._blocks[key]) is not None and storage.nbytes() > block.bytes:
                    self._resized(storage)
                continue
            self._watched[key] = weakref.ref(storage, partial(self._gone, key))
            if on_host:
                self._hosts.add(key)
                self._blocks[key] = None
            else:
                self._blocks[key] = self.ledger.allocate(storage.nbytes(), self._cause(tensor), self._stream())
            self._gradient_sums.note(key)

    def _take_over(self, old: Tensor, new: Tensor) -> None:
        """Let a new tensor have the memory of an old one, which nothing reads any more."""
        before, storage = storage_id(old.untyped_storage()), new.untyped_storage()
        key = storage_id(storage)
        self._watched[key] = weakref.ref(storage, partial(self._gone, key))
        self._blocks[key], self._blocks[before] = self._blocks[before], None
        self._gradient_sums.note(key)
        if before in self._hosts:
            self._hosts.add(key)

    def _cause(self, tensor: Tensor) -> str:
        phase = self.step_phase
        if self.in_loss or (phase == "backward" and tensor.numel() in self._outputs):
            return "logits"
        again = is_recomputing() or torch.is_grad_enabled()  # single functions, or a whole block
        if phase == "forward" or (phase == "backward" and again):
            return "activations"
        return "temporary"

    def _resized(self, storage: torch.UntypedStorage) -> None:
        key = storage_id(storage)
        if key not in self._watched or key in self._hosts:
            return
        self.ledger.free(self._blocks[key])
        self._blocks[key] = self.ledger.allocate(storage.nbytes(), "gathered", self._stream())

    def _gone(self, key: int, storage: Any) -> None:
        block = self._blocks.pop(key)
        del self._watched[key]
        self._gradient_sums.forget(key)
        self._hosts.discard(key)
        if block is not None and block.cause == "activations" and self.step_phase == "forward":
            block.cause = "temporary"
        self.ledger.free(block)

    def _all_on_host(self, tensors: list[Tensor]) -> bool:
        if not self._hosts or not tensors:
            return False
        return all(storage_id(tensor.untyped_storage()) in self._hosts for tensor in tensors)

    def _stream(self) -> int:
        """The number of the current stream. FSDP2 uses several; on a CPU they do nothing but are distinct objects."""
        stream = torch.cpu.current_stream()
        return self._streams.setdefault(id(stream), len(self._streams))


def _view(func: Any, args: Any, kwargs: Any) -> Any:
    """Run a view operator, which takes no memory and runs no kernel. Most operators that DTensor runs are views.

    The result is that of the fake mode, without its cache lookup, which takes ten times as long.
    """
    mode = args[0].fake_mode
    with inside_kernel(mode):
        found = func(*args, **(kwargs or {}))
    return tree_map_only(Tensor, lambda view: FakeTensor(mode, view, args[0].fake_device), found)


def _is_meta(tensor: Tensor) -> bool:
    return isinstance(tensor, FakeTensor) and tensor.fake_device.type == "meta"


def _local(tensor: Tensor) -> Tensor:
    return local_tensor(tensor) if isinstance(tensor, DTensor) else tensor
