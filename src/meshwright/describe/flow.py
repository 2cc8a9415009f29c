"""Who feeds whom: one forward pass on fake tensors, in which chosen modules are watched.

Between the calls of watched modules runs the author's own code, the glue. For every call the flow says which outputs
of earlier calls, and which parameters, reach its inputs through glue alone. So a pipeline knows what must cross a cut,
and tensor parallelism which linear layers feed which.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.weak import WeakTensorKeyDictionary

from meshwright.describe.calls import (
    CONSTANTS,
    GLUE,
    NUMBERS,
    Call,
    ConstantLeaf,
    Flow,
    InputLeaf,
    Inside,
    Leaf,
    Source,
    StrangeLeaf,
    TensorLeaf,
    Value,
)
from meshwright.describe.flops import count_flops
from meshwright.torch_private.modes import TorchDispatchMode
from meshwright.torch_private.operators import PACK_PADDED_SEQUENCE, PAD_PACKED_SEQUENCE, schema_of
from meshwright.torch_private.trees import tree_flatten, tree_leaves


@dataclass
class _Open:
    """A call that has not returned yet."""

    index: int
    name: str
    needs: set[Source]
    before: dict[StorageWeakRef, frozenset[Source]]
    """What had been written in place before the call."""
    reads: set[str] = field(default_factory=set)
    flops: float = 0.0
    looked: bool = False
    """Whether it made a number of a tensor."""


class Watcher(TorchDispatchMode):
    """Follows tensors while a model runs. Watched modules that run inside another watched one belong to that one."""

    def __init__(self, names: Collection[str]) -> None:
        super().__init__()
        self._names = frozenset(names)
        self.forget()
        self.seen: Callable[[Any, tuple[Any, ...], Any], None] = lambda func, args, result: None
        """Called with every operator; for those who look for something in particular."""

    def forget(self) -> None:
        """Begin anew."""
        self._sources: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self._parameters: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self._written: dict[StorageWeakRef, frozenset[Source]] = {}
        """What was written in place, by where: it is read through every view of that."""
        self._looked: frozenset[Source] = frozenset()
        """What glue made numbers of, as `item()` does: they decide what runs afterwards, so all of it needs them."""
        self._writers: dict[StorageWeakRef, list[int]] = {}
        """Where something was written in place: the call that did, or `GLUE`, each time."""
        self._batch: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        """Tensors that come of the batch, if that is marked."""
        self._open: _Open | None = None
        self._returned: list[list[tuple[StorageWeakRef, int]]] = []
        """Where each call's leaves lie, and how often that had been written to then."""
        self._without_grad: list[tuple[str, torch.Tensor]] = []
        """What calls gave while gradients were off."""
        self.calls: list[Call] = []
        self.in_loss = False
        """Whether the model has returned."""
        self.looked = False
        """Whether the glue did."""
        self.shaped: str | None = None
        self.loss_looked = False
        """Whether the loss looked at values that calls gave."""

    @contextmanager
    def watching(self, model: nn.Module, parameters: dict[str, torch.Tensor]) -> Iterator[Watcher]:
        """Follow `model`, whose parameters are these tensors, until the context ends."""
        for name, tensor in parameters.items():
            self._sources[tensor] = self.sources(tensor) | {name} if tensor in self._sources else frozenset({name})
            self._parameters[tensor] = self._sources[tensor]
        hooks = []
        for name, module in model.named_modules():
            if name in self._names:
                hooks.append(module.register_forward_pre_hook(self._enter(name), with_kwargs=True))
                hooks.append(module.register_forward_hook(self._leave(name), with_kwargs=True))
        try:
            with self:
                yield self
        finally:
            for hook in hooks:
                hook.remove()

    def mark_batch(self, tensors: Iterable[torch.Tensor]) -> None:
        """Also follow what comes of the batch, so that it is seen who looks at its values."""
        for tensor in tensors:
            self._batch[tensor] = True

    def flow(self, total: torch.Tensor, output: Any = None) -> Flow:
        """All that was seen, with the loss that came of the model's output."""
        changed = [any(self._writes(place) != writes for place, writes in leaves) for leaves in self._returned]
        calls = (replace(call, changed=yes) for call, yes in zip(self.calls, changed, strict=True))
        needs = self.sources(total) | self._looked
        if self.loss_looked:  # with other values it may need another part of the output
            needs |= self._union(output)
        # An autograd function, as reentrant recomputation is, gives them a gradient after all.
        hidden = next((name for name, leaf in self._without_grad if leaf.requires_grad), None)
        return Flow(calls=tuple(calls), needs=frozenset(needs), looked=self.looked, shaped=self.shaped, hidden=hidden)

    def writers(self, tensor: torch.Tensor) -> frozenset[int]:
        """Who changed a tensor in place."""
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
            # Also what no argument handed over: a call may find a tensor on an object that it shares with others.
            self._open.needs |= {s for s in sources if not isinstance(s, str) and s != Inside(self._open.index)}
            self._open.flops += count_flops(func, args, kwargs or {}, result)
            self._open.looked |= isinstance(result, NUMBERS)
            sources |= {Inside(self._open.index)}
        elif isinstance(result, NUMBERS):
            self._looked |= sources
        changed = _changed_by(func, args, kwargs or {})
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
        """In the glue: what comes of the batch, and whether a number or a shape is made of values."""
        of_batch = any(leaf in self._batch for leaf in tree_leaves(given) if isinstance(leaf, torch.Tensor))
        if of_batch or sources:
            if any(isinstance(leaf, NUMBERS) for leaf in made):
                self.look(bool(sources))
            if _shapes_by_values(func, given) and not self.in_loss and self.shaped is None:
                self.shaped = self.calls[-1].name if self.calls else ""
        if of_batch:
            self.mark_batch(leaf for leaf in made if isinstance(leaf, torch.Tensor))

    def look_at(self, tensor: torch.Tensor) -> None:
        """Somebody reads a tensor's values by another way than an operator."""
        sources = self.sources(tensor)
        if self._open is not None:
            self._open.looked = True
        elif sources or tensor in self._batch:
            self._looked |= sources
            self.look(bool(sources))

    def look(self, at_calls: bool) -> None:
        """The glue looked at values: of what calls gave, or of the batch alone."""
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

    def _enter(self, name: str) -> Callable[..., None]:
        def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
            if self._open is None:
                needs = self._union((args, kwargs)) | self._looked
                self._open = _Open(len(self.calls), name, needs, dict(self._written))

        return enter

    def _leave(self, name: str) -> Callable[..., None]:
        def leave(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if self._open is None or self._open.name != name:
                return
            done, self._open = self._open, None
            inputs = tree_leaves((args, kwargs))
            leaves, tree = tree_flatten(output)
            places = {id(leaf): place for place, leaf in enumerate(inputs) if not isinstance(leaf, CONSTANTS)}
            described = tuple(_describe(leaf, places, looked=done.looked) for leaf in leaves)
            made: dict[int, set[Source]] = {}  # a tensor that is returned in two places is read in either
            for number, (leaf, kind) in enumerate(zip(leaves, described, strict=True)):
                if isinstance(kind, TensorLeaf):
                    self._written.pop(_storage(leaf), None)
                    # A parameter that is returned as it is may still be read off its module.
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
                    leaves=(*described, *(_tensor_leaf(inputs[place]) for place in wrote)),
                    tree=tree,
                    flops=done.flops,
                    wrote=wrote,
                )
            )

        return leave

    def _changed_inputs(self, call: _Open, inputs: list[Any]) -> tuple[int, ...]:
        """Places of the inputs that a call wrote to; not parameters, of which every stage has its own."""
        first = {id(leaf): place for place, leaf in reversed(list(enumerate(inputs))) if isinstance(leaf, torch.Tensor)}
        return tuple(
            place
            for place in sorted(first.values())
            if call.index in self.writers(inputs[place]) and inputs[place] not in self._parameters
        )

    def _note_changed_input(self, call: _Open, leaf: torch.Tensor, value: Value) -> None:
        """From now on it is read as an output of the call is, through each view of it."""
        place = _storage(leaf)
        covers = leaf.numel() * leaf.element_size() == leaf.untyped_storage().nbytes()
        before = frozenset() if covers else call.before.get(place, frozenset())
        self._written[place] = before | {value}
        self._sources[leaf] = frozenset({value})


def _describe(leaf: Any, places: dict[int, int], *, looked: bool) -> Leaf:
    if isinstance(leaf, NUMBERS) and looked:
        return StrangeLeaf("number that may depend on the data")
    if isinstance(leaf, CONSTANTS):
        return ConstantLeaf(leaf)
    if id(leaf) in places:
        return InputLeaf(places[id(leaf)])
    return _tensor_leaf(leaf) if isinstance(leaf, torch.Tensor) else StrangeLeaf(type(leaf).__name__)


def _tensor_leaf(tensor: torch.Tensor) -> TensorLeaf:
    return TensorLeaf(tuple(tensor.shape), tensor.dtype)


_UNTAGGED = (PACK_PADDED_SEQUENCE.default, PAD_PACKED_SEQUENCE.default)
"""Operators that make shapes of lengths, which PyTorch does not say of them."""


def _shapes_by_values(func: Any, given: Any) -> bool:
    """Whether the shape of what an operator gives depends on values: that of `x[i]` only where `i` is a mask."""
    if func is torch.ops.aten.index.Tensor:
        return any(leaf.dtype in (torch.bool, torch.uint8) for leaf in tree_leaves(given[0][1]) if leaf is not None)
    return torch.Tag.dynamic_output_shape in func.tags or func in _UNTAGGED


def _storage(tensor: torch.Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())


def _changed_by(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """What an operator writes to, of its arguments."""
    if not schema_of(func).is_mutable:
        return []
    given = {**dict(zip((argument.name for argument in schema_of(func).arguments), args, strict=False)), **kwargs}
    written = [a.name for a in schema_of(func).arguments if a.alias_info is not None and a.alias_info.is_write]
    return [leaf for name in written for leaf in tree_leaves(given.get(name)) if isinstance(leaf, torch.Tensor)]
