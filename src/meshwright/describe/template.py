"""Run one block and learn what an equal block would return for inputs of the same layout."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from meshwright.describe.block_equality import NotComparable, layer_indices, state_of
from meshwright.describe.calls import CONSTANTS, NUMBERS, Call, Source
from meshwright.describe.flow import Watcher
from meshwright.recording.wrap_forward import removing
from meshwright.torch_private.autograd import BackwardCFunction
from meshwright.torch_private.modes import TorchDispatchMode, without_torch_function
from meshwright.torch_private.tensors import storage_id, version_of
from meshwright.torch_private.trees import tree_leaves


@dataclass(frozen=True)
class MadeTensor:
    """The layout of a tensor that a block made and returned."""

    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    differentiable: bool

    @classmethod
    def of(cls, tensor: torch.Tensor) -> MadeTensor:
        return cls(tensor.shape, tensor.stride(), tensor.dtype, tensor.requires_grad)

    def empty(self) -> torch.Tensor:
        return torch.empty_strided(self.size, self.stride, dtype=self.dtype)

    def connected_to(self, tensors: Sequence[torch.Tensor], mark: Callable[[], None] = lambda: None) -> torch.Tensor:
        """A tensor of this layout that passes gradients on to `tensors`. `mark` is called when a gradient arrives."""
        return _Connect.apply(self, mark, *tensors) if self.differentiable else self.empty()


@dataclass(frozen=True)
class PassedInput:
    """An input that the block returned unchanged."""

    place: int


@dataclass(frozen=True, kw_only=True)
class Template:
    """What is known of the block that ran. Inputs are given by their places, parameters by their names in the block."""

    block: str
    output: Any
    """With `MadeTensor` and `PassedInput` for tensors."""
    touched: frozenset[int]
    """Inputs that an operator reads."""
    reads: frozenset[str]
    """Parameters that an operator reads."""
    reach: frozenset[int]
    """Inputs that get a gradient from the output."""
    trains: frozenset[str]
    """Parameters that get a gradient from the output."""
    called: frozenset[str]
    """Modules in it that are called."""
    calls: tuple[Call, ...] = ()
    """The watched calls in it. Their sources are each other, the block's parameters, and `input_source`s."""
    sources: tuple[frozenset[Source], ...] = ()
    """The sources of each `MadeTensor`, in the same form."""

    def make(
        self, inputs: Sequence[torch.Tensor], trained: Sequence[torch.Tensor], mark: Callable[[], None]
    ) -> tuple[Any, list[torch.Tensor]]:
        """An output for these inputs, and the tensors made for it. `mark` is called when a gradient arrives."""
        made: list[torch.Tensor] = []
        reached = [inputs[place] for place in sorted(self.reach)]

        def build(part: Any) -> Any:
            if isinstance(part, PassedInput):
                return inputs[part.place]
            if isinstance(part, MadeTensor):
                # One parameter is enough to make the output differentiable; `mark` notes all of them.
                made.append(part.connected_to([*reached, *trained[:1]], mark))
                return made[-1]
            return _mapped(build, part)

        return build(self.output), made


def input_source(place: int) -> str:
    """The name of an input as a source in a template. No parameter has a space in its name."""
    return f"input {place}"


def learn_block(
    name: str,
    block: nn.Module,
    inputs: list[torch.Tensor],
    run: Callable[[], Any],
    *,
    watched: Sequence[str],
    numbers: Collection[tuple[str, str]],
) -> tuple[Any, Template | None]:
    """The result of `run`, the block's forward pass, and a template if blocks like it can be skipped.

    `watched` are modules in the block; `numbers` are attributes in which equal blocks differ.
    """
    watcher, parameters = Watcher(watched), dict(block.named_parameters())
    sources = {input_source(place): tensor for place, tensor in enumerate(inputs)}
    guard = _BlockGuard(block, parameters, inputs)
    with ExitStack() as stack:
        called = stack.enter_context(watch_calls(block))
        indices = stack.enter_context(layer_indices(block, numbers))
        if watched:
            stack.enter_context(watcher.watching(block, parameters | sources))
        stack.enter_context(guard)
        output = run()
    if any(index.used for index in indices):
        return output, None
    try:
        described, made = guard.describe(output)
        reach, trains = _gradients(made, inputs, parameters)
    except NotComparable:
        return output, None
    return output, Template(
        block=name,
        output=described,
        touched=frozenset(guard.touched),
        reads=frozenset(guard.reads),
        reach=reach,
        trains=trains,
        called=frozenset(called),
        calls=tuple(watcher.calls),
        sources=tuple(watcher.sources(tensor) for tensor in made),
    )


@contextmanager
def watch_calls(model: nn.Module) -> Iterator[set[str]]:
    """Yields a set that collects the names of the modules that are called."""
    called: set[str] = set()
    hooks = [
        module.register_forward_pre_hook(lambda module, args, name=name: called.add(name))
        for name, module in model.named_modules()
    ]
    with removing(hooks):
        yield called


class _BlockGuard(TorchDispatchMode):
    """Notes whether a block uses anything but its inputs, its own tensors, and what it computes from them."""

    def __init__(
        self, block: nn.Module, parameters: Mapping[str, torch.Tensor], inputs: Sequence[torch.Tensor]
    ) -> None:
        super().__init__()
        self._block, self._state = block, state_of(block)
        self._outer = [*inputs, *parameters.values(), *block.buffers()]
        self._versions = [version_of(tensor) for tensor in self._outer]
        self._names = {id(tensor): name for name, tensor in parameters.items()}
        self._places = {id(tensor): place for place, tensor in reversed(list(enumerate(inputs)))}
        self._known = {id(tensor): tensor for tensor in self._outer}  # kept alive, so that no id is reused
        self._strange = False
        self.touched: set[int] = set()
        self.reads: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, torch.Tensor):
                self._look(leaf)
        self._strange |= isinstance(result, NUMBERS)
        self._known |= {id(leaf): leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)}
        return result

    def _look(self, tensor: torch.Tensor) -> None:
        self._strange |= id(tensor) not in self._known
        if id(tensor) in self._places:
            self.touched.add(self._places[id(tensor)])
        if id(tensor) in self._names:
            self.reads.add(self._names[id(tensor)])

    def describe(self, output: Any) -> tuple[Any, list[torch.Tensor]]:
        """The output with `MadeTensor` and `PassedInput` in it, and the tensors that the former describe."""
        changed = [version_of(tensor) for tensor in self._outer] != self._versions
        if self._strange or changed or state_of(self._block) != self._state:
            raise NotComparable
        made: list[torch.Tensor] = []
        described = self._part(output, made)
        storages = [storage_id(tensor.untyped_storage()) for tensor in (*self._outer, *made)]
        apart = len(set(storages)) - len(set(storages[: len(self._outer)])) == len(made)
        if not apart or sum(tensor.requires_grad for tensor in made) > 1:
            raise NotComparable
        return described, made

    def _part(self, part: Any, made: list[torch.Tensor]) -> Any:
        if id(part) in self._places:
            return PassedInput(self._places[id(part)])
        if isinstance(part, torch.Tensor) and id(part) in self._known:
            made.append(part)
            return MadeTensor.of(part)
        return _mapped(lambda inner: self._part(inner, made), part)


class _Connect(torch.autograd.Function):
    """An empty output that is connected to its inputs and a parameter only for gradients."""

    @staticmethod
    def forward(ctx: Any, made: MadeTensor, mark: Callable[[], None], *tensors: torch.Tensor) -> torch.Tensor:
        with without_torch_function():  # this is not the model reading a parameter's shape
            ctx.mark, ctx.layouts = mark, [(tensor.shape, tensor.dtype) for tensor in tensors]
        return made.empty()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        ctx.mark()
        return None, None, *(torch.empty(shape, dtype=dtype) for shape, dtype in ctx.layouts)


def _gradients(
    made: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], parameters: Mapping[str, torch.Tensor]
) -> tuple[frozenset[int], frozenset[str]]:
    """The inputs and parameters that autograd's graph reaches from the tensors."""
    leaves, edges = _edges(made, {(tensor.grad_fn, tensor.output_nr) for tensor in inputs if tensor.grad_fn})
    places = [
        place
        for place, tensor in enumerate(inputs)
        if id(tensor) in leaves or (tensor.grad_fn, tensor.output_nr) in edges
    ]
    return frozenset(places), frozenset(name for name, tensor in parameters.items() if id(tensor) in leaves)


def _edges(made: Sequence[torch.Tensor], ends: set[tuple[Any, int]]) -> tuple[set[int], set[tuple[Any, int]]]:
    """The leaves (by id) and the ends that autograd's graph reaches from the tensors."""
    leaves: set[int] = set()
    waiting = [(tensor.grad_fn, tensor.output_nr) for tensor in made if tensor.grad_fn is not None]
    seen = set(waiting)
    while waiting:
        edge = waiting.pop()
        node: Any = edge[0]
        if edge in ends:
            continue
        if isinstance(node, BackwardCFunction):
            raise NotComparable  # a custom autograd function may drop a gradient
        if hasattr(node, "variable"):
            leaves.add(id(node.variable))
        fresh = {following for following in node.next_functions if following[0] is not None} - seen
        seen |= fresh
        waiting += fresh
    return leaves, seen & ends


def _mapped(change: Callable[[Any], Any], value: Any) -> Any:
    """A plain container with changed parts, or a constant."""
    if type(value) in (tuple, list):
        return type(value)(change(part) for part in value)
    if type(value) is dict:
        return {key: change(part) for key, part in value.items()}
    if isinstance(value, CONSTANTS):
        return value
    raise NotComparable
