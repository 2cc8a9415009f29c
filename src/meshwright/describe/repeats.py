"""Run only the first of several equal blocks in a pass, and repeat its result for the others.

A pass on fake tensors needs structure, not values, and eighty blocks of a transformer have one structure. So the first
block of a kind runs and is watched. A later block with the same modules, parameters and attributes, called with inputs
of the same layout, is skipped: it returns new tensors that depend on its inputs and parameters as the first one's did.
A block runs nevertheless if that might be wrong: if it uses its own layer number, uses a tensor that is not an input,
parameter or buffer, changes or stores a tensor, reads a number out of a tensor, or uses a custom autograd function.
What a block reaches through globals and closures is not checked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from meshwright.describe.block_equality import NotComparable, arrival_of, kind_of, numbers_of, surroundings
from meshwright.describe.calls import Source
from meshwright.describe.flow import Watcher
from meshwright.describe.template import Template, input_source, learn_block
from meshwright.recording.wrap_forward import replaced_forwards


class PassObserver:
    """Observer of a pass that is told about skipped blocks."""

    def may_repeat(self, inputs: Sequence[torch.Tensor]) -> bool:
        """Whether a block with these inputs may be skipped."""
        return True

    def learned(self, block: str) -> None:
        """The first block of a kind has run."""

    def repeated(self, block: str, first: str) -> None:
        """A block was skipped because it is like `first`, which ran."""


@dataclass
class Repeats:
    """The blocks of a model that are like at least one other block."""

    blocks: dict[str, nn.Module]
    kinds: dict[str, int]
    """The kind of each block."""
    numbers: dict[int, tuple[tuple[str, str], ...]]
    """For each kind, the attributes (module in the block, name) in which its blocks differ."""
    called: set[str] = field(default_factory=set)
    """Modules in skipped blocks that would have been called."""
    trained: list[torch.Tensor] = field(default_factory=list)
    """Parameters of skipped blocks that would have received a gradient."""

    @contextmanager
    def running(self, watcher: Watcher | None = None, observer: PassObserver | None = None) -> Iterator[None]:
        """Skip repeated blocks while the context is active."""
        run = _Pass(self, _Echo(watcher) if watcher else None, observer or PassObserver())
        with replaced_forwards(self.blocks, run.forward):
            yield
        if run.echo is not None:
            run.echo.finish()


def find_repeats(model: nn.Module, blocks: Iterable[str]) -> Repeats:
    """The blocks that are like another one, except perhaps for their layer number."""
    modules = {name: model.get_submodule(name) for name in blocks}
    equal = _grouped(modules, numbered=False)
    single = {names[0]: modules[names[0]] for names in equal if len(names) == 1}
    groups = [names for names in (*equal, *_grouped(single, numbered=True)) if len(names) > 1]
    kinds = {name: kind for kind, names in enumerate(groups) for name in names}
    numbers = {kind: _differing([modules[name] for name in names]) for kind, names in enumerate(groups)}
    return Repeats({name: modules[name] for name in kinds}, kinds, numbers)


def _grouped(modules: dict[str, nn.Module], *, numbered: bool) -> list[list[str]]:
    found: dict[Any, list[str]] = {}
    for name, module in modules.items():
        with suppress(NotComparable):
            found.setdefault(kind_of(module, numbered=numbered), []).append(name)
    return list(found.values())


def _differing(blocks: Sequence[nn.Module]) -> tuple[tuple[str, str], ...]:
    """The integer attributes that differ between blocks."""
    first, *others = map(numbers_of, blocks)
    return tuple(place for place, number in first.items() if any(other[place] != number for other in others))


@dataclass
class _Pass:
    """One forward pass, with its backward pass if there is one."""

    repeats: Repeats
    echo: _Echo | None
    observer: PassObserver
    templates: dict[Any, Template | None] = field(default_factory=dict)
    """By kind, layout of inputs and surroundings; None if every such block has to run."""

    def forward(self, name: str, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        inputs: list[torch.Tensor] = []
        try:
            arrival = arrival_of((args, kwargs), inputs)
        except NotComparable:
            return forward(*args, **kwargs)
        if self.echo is not None and self.echo.is_hidden(name):
            return forward(*args, **kwargs)
        key = self.repeats.kinds[name], arrival, surroundings(), self.echo is not None and self.echo.is_watched
        if key not in self.templates:
            return self._learn(key, name, inputs, partial(forward, *args, **kwargs))
        template = self.templates[key]
        # The first block always runs, also when checkpointing repeats it in the backward pass.
        if template is None or template.block == name or not self.observer.may_repeat(inputs):
            return forward(*args, **kwargs)
        return self._repeat(template, name, inputs)

    def _learn(self, key: Any, name: str, inputs: list[torch.Tensor], run: Callable[[], Any]) -> Any:
        watched = self.echo.watched_in(name) if self.echo is not None else ()
        block, numbers = self.repeats.blocks[name], self.repeats.numbers[self.repeats.kinds[name]]
        output, self.templates[key] = learn_block(name, block, inputs, run, watched=watched, numbers=numbers)
        self.observer.learned(name)
        return output

    def _repeat(self, template: Template, name: str, inputs: list[torch.Tensor]) -> Any:
        parameters = dict(self.repeats.blocks[name].named_parameters())
        trained = [parameters[inner] for inner in template.trains]
        output, made = template.make(inputs, trained, partial(self.repeats.trained.extend, trained))
        self.repeats.called |= {f"{name}.{inner}" if inner else name for inner in template.called}
        if self.echo is not None:
            self.echo.tell(template, name, parameters, inputs, made)
        self.observer.repeated(name, template.block)
        return output


class _Echo:
    """Tells a watcher what it would have seen if a skipped block had run. It uses the watcher's private state."""

    def __init__(self, watcher: Watcher) -> None:
        self._watcher = watcher
        self._first: dict[str, int] = {}
        """The calls of blocks that are watched and ran first, by block."""
        self._later: dict[int, str] = {}
        """The calls of skipped blocks, each with the block that ran first."""

    @property
    def is_watched(self) -> bool:
        """Whether a watched call is running: that of the block, unless it is hidden."""
        return self._watcher._open is not None

    def is_hidden(self, name: str) -> bool:
        """Whether the block is part of a larger module that is watched as one."""
        return self._watcher._open is not None and self._watcher._open.name != name

    def watched_in(self, name: str) -> list[str]:
        """The watched modules in a block; none if the block itself is watched."""
        if self._watcher._open is not None:
            self._first[name] = self._watcher._open.index
            return []
        return [inner.removeprefix(f"{name}.") for inner in self._watcher._names if inner.startswith(f"{name}.")]

    def tell(
        self,
        template: Template,
        name: str,
        parameters: Mapping[str, torch.Tensor],
        inputs: Sequence[torch.Tensor],
        made: Sequence[torch.Tensor],
    ) -> None:
        watcher, offset = self._watcher, len(self._watcher.calls)
        known = {inner: watcher.sources(tensor) for inner, tensor in parameters.items()}
        known |= {input_source(place): watcher.sources(tensor) for place, tensor in enumerate(inputs)}
        if watcher._open is not None:
            read = _translated({*template.reads, *map(input_source, template.touched)}, known, offset)
            watcher._open.reads |= {source for source in read if isinstance(source, str)}
            watcher._open.needs |= {source for source in read if not isinstance(source, str)}
            self._later[watcher._open.index] = template.block
            return
        for call in template.calls:
            reads = _translated(call.reads, known, offset)
            own = frozenset(source for source in reads if isinstance(source, str))
            needs = _translated(call.needs, known, offset) | (reads - own)
            watcher.calls.append(replace(call, name=f"{name}.{call.name}", needs=needs, reads=own))
            watcher._returned.append([])
        for tensor, sources in zip(made, template.sources, strict=True):
            watcher._sources[tensor] = _translated(sources, known, offset)

    def finish(self) -> None:
        """Complete the calls of skipped blocks from those of the blocks that ran first."""
        calls = self._watcher.calls
        for index, block in self._later.items():
            own = calls[index]
            calls[index] = replace(calls[self._first[block]], name=own.name, needs=own.needs, reads=own.reads)


def _translated(sources: Iterable[Source], known: dict[str, frozenset[Source]], offset: int) -> frozenset[Source]:
    """A template's sources translated to another block, whose calls begin at `offset`."""
    found: set[Source] = set()
    for source in sources:
        if isinstance(source, str):
            found |= known[source]
        else:
            found.add(replace(source, call=source.call + offset))
    return frozenset(found)
