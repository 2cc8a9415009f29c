"""Who feeds whom: one forward pass on fake tensors, in which chosen modules are watched.

Between the calls of watched modules runs the author's own code, the glue. For every call the flow says which outputs
of earlier calls, and which parameters, reach its inputs through glue alone. So a pipeline knows what must cross a cut,
and tensor parallelism which linear layers feed which.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary

from meshwright.describe.flops import count_flops

NUMBERS = (bool, int, float)
CONSTANTS = (type(None), *NUMBERS, str, torch.dtype, torch.device)


@dataclass(frozen=True)
class Value:
    """A tensor in the output of a watched call."""

    call: int
    leaf: int


@dataclass(frozen=True)
class Inside:
    """Made inside of a watched call and read outside of it by another way than its output, as through a cache."""

    call: int


Source = Value | Inside | str
"""Where a tensor comes from through glue: a call's output, a call's inside, or a parameter by name."""


@dataclass(frozen=True)
class TensorLeaf:
    """A tensor that a call returned."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class InputLeaf:
    """One of the call's own inputs, returned as it came: its place among the leaves of (args, kwargs)."""

    place: int


@dataclass(frozen=True)
class ConstantLeaf:
    value: Any


@dataclass(frozen=True)
class StrangeLeaf:
    """Something that cannot be made up where the call does not run."""

    kind: str


Leaf = TensorLeaf | InputLeaf | ConstantLeaf | StrangeLeaf


@dataclass(frozen=True, kw_only=True)
class Call:
    """One call of a watched module."""

    name: str
    needs: frozenset[Source]
    """What its inputs come from."""
    reads: frozenset[str]
    """Parameters that are read in it."""
    leaves: tuple[Leaf, ...]
    tree: TreeSpec
    flops: float = 0.0
    """Of its forward pass."""
    mutates: bool = False
    """Whether it changes one of its inputs in place."""
    changed: bool = False
    """Whether one of its outputs is changed in place later."""


@dataclass(frozen=True, kw_only=True)
class Flow:
    """The watched calls of one forward pass and loss, in their order."""

    calls: tuple[Call, ...]
    needs: frozenset[Source]
    """What the loss comes from."""

    def readers(self, parameter: str) -> list[int]:
        """The calls that read a parameter, in them or in the glue before; the number of calls stands for the loss."""
        steps = [call.reads | call.needs for call in self.calls]
        return [index for index, sources in enumerate([*steps, self.needs]) if parameter in sources]


@dataclass
class _Open:
    """A call that has not returned yet."""

    index: int
    name: str
    needs: set[Source]
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
        self._open: _Open | None = None
        self._versions: list[int] = []
        self._returned: list[list[tuple[Any, int]]] = []
        """What each call returned, with its version then."""
        self.calls: list[Call] = []

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

    def flow(self, total: torch.Tensor) -> Flow:
        """All that was seen, with the loss that came of it."""
        changed = [any(_version(leaf) != version for leaf, version in leaves) for leaves in self._returned]
        calls = (replace(call, changed=yes) for call, yes in zip(self.calls, changed, strict=True))
        return Flow(calls=tuple(calls), needs=self.sources(total) | self._looked)

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
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._sources[leaf] = frozenset(sources)
        for leaf in _changed_by(func, args, kwargs or {}):
            self._written[_storage(leaf)] = self._written.get(_storage(leaf), frozenset()) | sources
        self.seen(func, args, result)
        return result

    def _union(self, tree: Any) -> set[Source]:
        found: set[Source] = set()
        for leaf in tree_leaves(tree):
            if isinstance(leaf, torch.Tensor):
                found |= self.sources(leaf)
        return found

    def _enter(self, name: str) -> Callable[..., None]:
        def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
            if self._open is None:
                self._open = _Open(len(self.calls), name, self._union((args, kwargs)) | self._looked)
                self._versions = [_version(leaf) for leaf in tree_leaves((args, kwargs))]

        return enter

    def _leave(self, name: str) -> Callable[..., None]:
        def leave(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if self._open is None or self._open.name != name:
                return
            done, self._open = self._open, None
            inputs = tree_leaves((args, kwargs))
            mutates = [_version(leaf) for leaf in inputs] != self._versions
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
            self._returned.append([(leaf, _version(leaf)) for leaf in returned])
            self.calls.append(
                Call(
                    name=name,
                    needs=frozenset(done.needs),
                    reads=frozenset(done.reads),
                    leaves=described,
                    tree=tree,
                    flops=done.flops,
                    mutates=mutates,
                )
            )

        return leave


class DropoutWatcher(Watcher):
    """Also notes whether anything is drawn at random."""

    def __init__(self, names: Collection[str]) -> None:
        super().__init__(names)
        self.drops = False
        self.seen = self._look

    def _look(self, func: Any, args: tuple[Any, ...], result: Any) -> None:
        name = func.overloadpacket.__name__
        self.drops = self.drops or name in RANDOM or (ATTENTION in name and any(0 < x < 1 for x in _numbers(args)))


RANDOM = ("native_dropout", "bernoulli", "bernoulli_", "rand", "rand_like", "randn_like", "multinomial")
ATTENTION = "scaled_dot_product"


def _numbers(args: tuple[Any, ...]) -> list[float]:
    return [value for value in args if isinstance(value, float)]


def _describe(leaf: Any, places: dict[int, int], *, looked: bool) -> Leaf:
    if isinstance(leaf, NUMBERS) and looked:
        return StrangeLeaf("number that may depend on the data")
    if isinstance(leaf, CONSTANTS):
        return ConstantLeaf(leaf)
    if id(leaf) in places:
        return InputLeaf(places[id(leaf)])
    if isinstance(leaf, torch.Tensor):
        return TensorLeaf(tuple(leaf.shape), leaf.dtype)
    return StrangeLeaf(type(leaf).__name__)


def _storage(tensor: torch.Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())


def _changed_by(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """What an operator writes to, of its arguments."""
    if not func._schema.is_mutable:
        return []
    given = {**dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)), **kwargs}
    written = [a.name for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    return [leaf for name in written for leaf in tree_leaves(given.get(name)) if isinstance(leaf, torch.Tensor)]


def _version(leaf: Any) -> int:
    return leaf._version if isinstance(leaf, torch.Tensor) and not leaf.is_inference() else 0
