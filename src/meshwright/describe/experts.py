"""Find mixtures of experts by their structure: which modules hold experts that tokens choose by an index.

Two forms are found. Stacked: a module with parameters `[experts, ...]` is called with tokens `[tokens, width]`, integer
indices `[tokens]` or `[tokens, chosen]`, and mostly weights like the indices. Listed: a list of alike modules, of which
one caller gives each some rows of its tokens, and none the result of another.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from meshwright.facts.model import ExpertFacts

SAMPLES = 2  # of the step that is observed


@dataclass(frozen=True)
class RoutedCall:
    """The tensors of a call of stacked experts, and the place of each among the arguments."""

    tokens: torch.Tensor
    index: torch.Tensor
    weights: torch.Tensor | None
    keys: tuple[int | str, int | str, int | str | None]

    @property
    def chosen(self) -> int:
        return self.index.shape[1] if self.index.dim() == 2 else 1


def read_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> RoutedCall | None:
    """Tokens, indices and weights by their dtypes and shapes; None if the arguments are not just these."""
    arguments: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
    given = {key: value for key, value in arguments if value is not None}
    if not all(torch.is_tensor(value) for value in given.values()):
        return None
    whole = [key for key, x in given.items() if x.dtype in (torch.int64, torch.int32) and x.dim() in (1, 2)]
    if len(whole) != 1:
        return None
    index = given.pop(whole[0])
    weights = [key for key, x in given.items() if x.is_floating_point() and x.shape == index.shape]
    tokens = [key for key, x in given.items() if key not in weights and x.is_floating_point() and x.dim() == 2]
    if len(tokens) != 1 or len(weights) > 1 or len(given) != 1 + len(weights):
        return None
    if given[tokens[0]].shape[0] != index.shape[0] or (index.dim() == 2 and not weights):
        return None
    weight = weights[0] if weights else None
    given_weights = None if weight is None else given[weight]
    return RoutedCall(given[tokens[0]], index, given_weights, (tokens[0], whole[0], weight))


class MixtureWatch(AbstractContextManager["MixtureWatch"]):
    """Finds experts by the calls of modules while the context is active."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._found: dict[str, ExpertFacts] = {}

    def __enter__(self) -> MixtureWatch:
        self._found = {}
        self._running: list[tuple[str, set[Any]]] = [("", set())]
        self._stacks = {name: count for name, module in self._model.named_modules() if (count := stacked_in(module))}
        self._lists = {name: _List(name, module) for name, module in self._model.named_modules() if is_listed(module)}
        self._hooks = [hook for name, module in self._model.named_modules() for hook in self._watch(name, module)]
        return self

    def __exit__(self, *error: Any) -> None:
        for hook in self._hooks:
            hook.remove()
        for one in self._lists.values():
            if (facts := one.facts(self._model)) is not None:
                self._found[one.name] = facts
        self._lists = {}

    def experts(self) -> tuple[ExpertFacts, ...]:
        """The mixtures that were called, and those of the same class and shapes: equal blocks run only once."""
        found = dict(self._found)
        for name, module in self._model.named_modules():
            for other, facts in self._found.items():
                if facts.stacked and name not in found and _alike(module, self._model.get_submodule(other)):
                    found[name] = replace(facts, module=name, parameters=_names(name, module))
        order = {name: place for place, (name, _) in enumerate(self._model.named_modules())}
        return tuple(sorted(found.values(), key=lambda facts: order[facts.module]))

    def _watch(self, name: str, module: nn.Module) -> Iterator[Any]:
        listed = self._lists.get(name.rpartition(".")[0])

        def enter(_: nn.Module, args: Any, kwargs: Any) -> None:
            if name in self._stacks and (call := read_call(args, kwargs)) is not None:
                self._found[name] = _stacked_facts(name, module, self._stacks[name], call)
            if listed is not None:
                listed.enter(name, *self._running[-1], args, kwargs)
            self._running.append((name, {x.grad_fn for x in (*args, *kwargs.values()) if torch.is_tensor(x)}))

        def leave(_: nn.Module, args: Any, output: Any) -> None:
            names = [running for running, _ in self._running]
            if name in names[1:]:
                del self._running[len(names) - 1 - names[::-1].index(name) :]
            if listed is not None:
                listed.leave(output)

        yield module.register_forward_pre_hook(enter, with_kwargs=True)
        yield module.register_forward_hook(leave, always_call=True, prepend=True)


def stacked_in(module: nn.Module) -> int:
    """The number of experts if a module's own parameters look like stacked weights of experts; else 0."""
    shapes = [tuple(p.shape) for p in module._parameters.values() if p is not None]
    counts = Counter(shape[0] for shape in shapes if len(shape) >= 2)
    if not counts or not any(len(shape) >= 3 for shape in shapes):
        return 0
    count, times = counts.most_common(1)[0]
    return count if count > 1 and times == len(shapes) else 0


def is_listed(module: nn.Module) -> bool:
    children = list(module.children())
    alike = len(children) > 1 and all(_alike(child, children[0]) for child in children)
    return isinstance(module, nn.ModuleList) and alike and any(True for _ in children[0].parameters())


def _stacked_facts(name: str, module: nn.Module, experts: int, call: RoutedCall) -> ExpertFacts:
    return ExpertFacts(
        module=name,
        experts=experts,
        parameters=_names(name, module),
        chosen=call.chosen,
        rows=call.index.numel() / SAMPLES,
        width=call.tokens.shape[1],
        weighted=call.weights is not None,
    )


def _names(name: str, module: nn.Module) -> tuple[str, ...]:
    """The names of a module's stacked parameters."""
    return tuple(f"{name}.{key}" for key, p in module._parameters.items() if p is not None)


def _alike(one: nn.Module, other: nn.Module) -> bool:
    def shapes(module: nn.Module) -> list[Any]:
        return [(name, tuple(parameter.shape), parameter.dtype) for name, parameter in module.named_parameters()]

    return type(one) is type(other) and shapes(one) == shapes(other)


@dataclass
class _List:
    """The calls of the modules of one list."""

    name: str
    modules: nn.Module
    callers: set[str] = field(default_factory=set)
    inputs: list[torch.Tensor] = field(default_factory=list)
    outputs: list[Any] = field(default_factory=list)
    called: list[str] = field(default_factory=list)
    fits: bool = True

    def enter(self, name: str, caller: str, given: set[Any], args: Any, kwargs: Any) -> None:
        """`given`: the autograd nodes of what the caller got."""
        self.fits &= len(args) == 1 and not kwargs and torch.is_tensor(args[0]) and args[0].dim() == 2
        if self.fits:
            self.callers.add(caller)
            self.fits = not _depends(args[0], self.outputs, given)
            self.inputs.append(args[0])
            self.called.append(name)

    def leave(self, output: Any) -> None:
        if not self.fits:
            return
        self.fits = torch.is_tensor(output) and output.shape == self.inputs[-1].shape
        self.outputs.append(output)

    def facts(self, model: nn.Module) -> ExpertFacts | None:
        """None if the calls are not those of experts: each of some rows, by one caller, at most once."""
        once = len(set(self.called)) == len(self.called) > 1 and len(self.callers) == 1
        chosen_rows = len({id(x) for x in self.inputs}) == len(self.inputs)
        if not (self.fits and once and chosen_rows and len(self.outputs) == len(self.inputs)):
            return None
        rows = sum(len(x) for x in self.inputs)
        return ExpertFacts(
            module=self.name,
            experts=len(list(self.modules.children())),
            parameters=tuple(f"{self.name}.{name}" for name, _ in self.modules.named_parameters()),
            stacked=False,
            caller=next(iter(self.callers)),
            rows=rows / SAMPLES,
            width=self.inputs[0].shape[1],
        )


def _depends(tensor: torch.Tensor, outputs: list[Any], given: set[Any]) -> bool:
    """Whether a tensor was computed from one of these, as autograd sees it, without going past `given`."""
    sought = {output.grad_fn for output in outputs if torch.is_tensor(output) and output.grad_fn is not None}
    seen, waiting = set(given), [tensor.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        if node in sought:
            return True
        seen.add(node)
        waiting += [before for before, _ in node.next_functions]
    return False
