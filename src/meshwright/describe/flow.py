"""Follow the data flow between chosen modules in one forward pass without values.

The author's code between the calls of watched modules is called glue. For every call, the flow says which outputs of
earlier calls and which parameters reach its inputs through glue alone. So a pipeline knows what must cross a cut, and
tensor parallelism knows which linear layers feed each other.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.weak import WeakTensorKeyDictionary

from meshwright.describe.calls import CONSTANTS, GLUE, NUMBERS, Call, Flow, Inside, Source, TensorLeaf, Value, leaf_of
from meshwright.describe.flops import count_flops
from meshwright.describe.recurrent import recurrent_work
from meshwright.recording.operation import changed_by
from meshwright.recording.wrap_forward import removing
from meshwright.torch_private.modes import TorchDispatchMode, in_transform
from meshwright.torch_private.operators import PACK_PADDED_SEQUENCE, PAD_PACKED_SEQUENCE
from meshwright.torch_private.trees import tree_flatten, tree_leaves


@dataclass
class _Open:
    """A call that has not returned yet."""

    index: int
    name: str
    needs: set[Source]
    before: dict[StorageWeakRef, frozenset[Source]]
    """In-place writes before the call."""
    reads: set[str] = field(default_factory=set)
    flops: float = 0.0
    looked: bool = False
    """Whether it read a number out of a tensor."""


class Watcher(TorchDispatchMode):
    """Follows tensors while a model runs. A watched module that runs inside another one counts as part of that."""

    def __init__(self, names: Collection[str]) -> None:
        super().__init__()
        self._names = frozenset(names)
        self.forget()
        self.seen: Callable[[Any, tuple[Any, ...], Any], None] = lambda func, args, result: None
        """Called with every operator, for users that look for something specific."""

    def forget(self) -> None:
        """Discard everything that was recorded."""
        self._sources: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self._parameters: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self._written: dict[StorageWeakRef, frozenset[Source]] = {}
        """Sources that were written in place, by storage: every view of the storage reads them."""
        self._looked: frozenset[Source] = frozenset()
        """Sources of numbers that glue read, as `item()` does. They may decide what runs, so later calls need them."""
        self._writers: dict[StorageWeakRef, list[int]] = {}
        """By storage, the call (or `GLUE`) that made each in-place write."""
        self._batch: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        """Tensors computed from the batch, if the batch is marked."""
        self._open: _Open | None = None
        self._returned: list[list[tuple[StorageWeakRef, int]]] = []
        """The storages that each call returned, and how often each had been written to."""
        self._without_grad: list[tuple[str, torch.Tensor]] = []
        """Tensors that calls returned while gradients were off."""
        self.calls: list[Call] = []
        self.in_loss = False
        """Whether the model has returned."""
        self.looked = False
        """Whether the glue read values."""
        self.shaped: str | None = None
        self.loss_looked = False
        """Whether the loss read values of calls' outputs."""

    @contextmanager
    def watching(self, model: nn.Module, parameters: dict[str, torch.Tensor]) -> Iterator[Watcher]:
        """Follow `model`, whose parameters are these tensors, while the context is active."""
        for name, tensor in parameters.items():
            self._sources[tensor] = self.sources(tensor) | {name} if tensor in self._sources else frozenset({name})
            self._parameters[tensor] = self._sources[tensor]
        hooks = []
        for name, module in model.named_modules():
            if name in self._names:
                hooks.append(module.register_forward_pre_hook(partial(self._enter, name), with_kwargs=True))
                hooks.append(module.register_forward_hook(partial(self._leave, name), with_kwargs=True))
        with removing(hooks), self:
            yield self

    def mark_batch(self, tensors: Iterable[torch.Tensor]) -> None:
        """Also follow what is computed from the batch, to see who reads its values."""
        for tensor in tensors:
            self._batch[tensor] = True

    def flow(self, total: torch.Tensor, output: Any = None) -> Flow:
        """The recorded flow. `total` is the loss of the model's `output`."""
        changed = [any(self._writes(place) != writes for place, writes in leaves) for leaves in self._returned]
        calls = (replace(call, changed=yes) for call, yes in zip(self.calls, changed, strict=True))
        needs = self.sources(total) | self._looked
        if self.loss_looked:  # with other values the loss may need another part of the output
            needs |= self._union(output)
        # Inside an autograd function, such as reentrant checkpointing, they get a gradient nevertheless.
        hidden = next((name for name, leaf in self._without_grad if leaf.requires_grad), None)
        return Flow(calls=tuple(calls), needs=frozenset(needs), looked=self.looked, shaped=self.shaped, hidden=hidden)

    def writers(self, tensor: torch.Tensor) -> frozenset[int]:
        """The calls that changed a tensor in place, or `GLUE`."""
        return frozenset(self._writers.get(_storage(tensor), ()))

    def _writes(self, place: StorageWeakRef) -> int:
        return len(self._writers.get(place, ()))

    def sources(self, tensor: torch.Tensor) -> frozenset[Source]:
        found: frozenset[Source] = self._sources.get(tensor, frozenset())
        return found | self._written.get(_storage(tensor), frozenset()) if self._written else found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        sources = self._union((args, kwargs))
        if self._open is not None:
            self._open.reads |= {source for source in sources if isinstance(source, str)}
            # Not only arguments: a call may read a tensor from an object that it shares with other calls.
            self._open.needs |= {s for s in sources if not isinstance(s, str) and s != Inside(self._open.index)}
            work = recurrent_work(func, args)
            self._open.flops += work.flops if work else count_flops(func, args, kwargs or {}, result)
            self._open.looked |= isinstance(result, NUMBERS)
            sources |= {Inside(self._open.index)}
        elif isinstance(result, NUMBERS):
            self._looked |= sources
        changed = changed_by(func, args, kwargs or {})
        if self._batch and self._open is None:
            self._follow_batch(func, (args, kwargs), [*tree_leaves(result), *changed], sources)
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._sources[leaf] = frozenset(sources)
        for leaf in changed:
            place = _storage(leaf)
            self._written[place] = self._written.get(place, frozenset()) | sources
            self._writers.setdefault(place, []).append(self._open.index if self._open is not None else GLUE)
        self.seen(func, args, result)
        return result

    def _follow_batch(self, func: Any, given: Any, made: list[Any], sources: set[Source]) -> None:
        """In the glue: follow what is computed from the batch, and note numbers and shapes made of values."""
        of_batch = any(leaf in self._batch for leaf in tree_leaves(given) if isinstance(leaf, torch.Tensor))
        if of_batch or sources:
            if any(isinstance(leaf, NUMBERS) for leaf in made):
                self.look(bool(sources))
            if _shapes_by_values(func, given) and not self.in_loss and self.shaped is None:
                self.shaped = self.calls[-1].name if self.calls else ""
        if of_batch:
            self.mark_batch(leaf for leaf in made if isinstance(leaf, torch.Tensor))

    def look_at(self, tensor: torch.Tensor) -> None:
        """Note that a tensor's values are read without an operator."""
        sources = self.sources(tensor)
        if self._open is not None:
            self._open.looked = True
        elif sources or tensor in self._batch:
            self._looked |= sources
            self.look(bool(sources))

    def look(self, at_calls: bool) -> None:
        """Note that the glue read values: of calls' outputs, or only of the batch."""
        if self.in_loss:
            self.loss_looked |= at_calls
        else:
            self.looked = True

    def _union(self, tree: Any) -> set[Source]:
        found: set[Source] = set()
        for leaf in tree_leaves(tree):
            if isinstance(leaf, torch.Tensor):
                found |= self.sources(leaf)
        return found

    def _enter(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self._open is None and not in_transform():  # there it is part of the glue
            needs = self._union((args, kwargs)) | self._looked
            self._open = _Open(len(self.calls), name, needs, dict(self._written))

    def _leave(self, name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if self._open is None or self._open.name != name or in_transform():
            return
        done, self._open = self._open, None
        inputs = tree_leaves((args, kwargs))
        leaves, tree = tree_flatten(output)
        places = {id(leaf): place for place, leaf in enumerate(inputs) if not isinstance(leaf, CONSTANTS)}
        described = tuple(leaf_of(leaf, places, looked=done.looked) for leaf in leaves)
        made: dict[int, set[Source]] = {}  # a tensor that is returned twice may be read from either place
        for number, (leaf, kind) in enumerate(zip(leaves, described, strict=True)):
            if isinstance(kind, TensorLeaf):
                self._written.pop(_storage(leaf), None)
                # A parameter that is returned unchanged may still be read from its module.
                made.setdefault(id(leaf), set(self._parameters.get(leaf, ()))).add(Value(done.index, number))
                self._sources[leaf] = frozenset(made[id(leaf)])
        returned = [leaf for leaf, kind in zip(leaves, described, strict=True) if isinstance(kind, TensorLeaf)]
        wrote = self._changed_inputs(done, inputs)
        for number, place in enumerate(wrote, start=len(leaves)):
            self._note_changed_input(done, inputs[place], Value(done.index, number))
            returned.append(inputs[place])
        self._returned.append([(_storage(leaf), self._writes(_storage(leaf))) for leaf in returned])
        if not torch.is_grad_enabled():
            self._without_grad += [(name, leaf) for leaf in returned]
        self.calls.append(
            Call(
                name=name,
                needs=frozenset(done.needs),
                reads=frozenset(done.reads),
                leaves=(*described, *(TensorLeaf.of(inputs[place]) for place in wrote)),
                tree=tree,
                flops=done.flops,
                wrote=wrote,
            )
        )

    def _changed_inputs(self, call: _Open, inputs: list[Any]) -> tuple[int, ...]:
        """Places of the inputs that a call wrote to, except parameters: every stage has its own copy of those."""
        first = {id(leaf): place for place, leaf in reversed(list(enumerate(inputs))) if isinstance(leaf, torch.Tensor)}
        return tuple(
            place
            for place in sorted(first.values())
            if call.index in self.writers(inputs[place]) and inputs[place] not in self._parameters
        )

    def _note_changed_input(self, call: _Open, leaf: torch.Tensor, value: Value) -> None:
        """Treat a changed input as an output of the call from now on, through every view of it."""
        place = _storage(leaf)
        covers = leaf.numel() * leaf.element_size() == leaf.untyped_storage().nbytes()
        before = frozenset() if covers else call.before.get(place, frozenset())
        self._written[place] = before | {value}
        self._sources[leaf] = frozenset({value})


_UNTAGGED = (PACK_PADDED_SEQUENCE.default, PAD_PACKED_SEQUENCE.default)
"""Operators whose shapes depend on values, although PyTorch does not tag them so."""


def _shapes_by_values(func: Any, given: Any) -> bool:
    """Whether the shape of an operator's result depends on values: that of `x[i]` only if `i` is a mask."""
    if func is torch.ops.aten.index.Tensor:
        return any(leaf.dtype in (torch.bool, torch.uint8) for leaf in tree_leaves(given[0][1]) if leaf is not None)
    return torch.Tag.dynamic_output_shape in func.tags or func in _UNTAGGED


def _storage(tensor: torch.Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())
