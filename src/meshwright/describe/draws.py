"""Find where a training step draws random numbers: dropout, and the model's and the loss's own randomness."""

from __future__ import annotations

import random
import sys
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import FrameType
from typing import Any

import numpy
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from meshwright.describe.code_lines import CodeLine, is_authors, running_line, running_module
from meshwright.describe.dropout import NoDropout
from meshwright.describe.flow import Watcher
from meshwright.facts.model import DrawFacts

ATTENTION = "scaled_dot_product"
_DROPPING = {*NoDropout.FUNCTIONS, F.scaled_dot_product_attention, F.multi_head_attention_forward}
"""Functions whose random numbers `NoDropout` switches off."""


class _Dropping(TorchFunctionMode):
    """Tells whether one of PyTorch's functions with dropout is running."""

    def __init__(self) -> None:
        super().__init__()
        self.depth = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        drops = func in _DROPPING
        self.depth += drops
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self.depth -= drops


class DrawWatcher(Watcher):
    """A watcher that also notes where random numbers are drawn."""

    def __init__(self, names: Collection[str], model: nn.Module) -> None:
        super().__init__(names)
        self._modules = {id(module): name for name, module in model.named_modules()}
        self._first: dict[tuple[Any, ...], DrawFacts] = {}
        self._dropping = _Dropping()
        self.seen = self._look

    @contextmanager
    def watching(self, model: nn.Module, parameters: dict[str, torch.Tensor]) -> Iterator[Watcher]:
        with super().watching(model, parameters) as watcher, self._dropping:
            yield watcher

    def _look(self, func: Any, args: tuple[Any, ...], result: Any) -> None:
        name = func.overloadpacket.__name__
        if ATTENTION in name:
            if any(isinstance(value, float) and 0 < value < 1 for value in args):
                self._note(name, dropout=True)
        elif torch.Tag.nondeterministic_seeded in func.tags:
            self._note(name, dropout=self._dropping.depth > 0)

    def _note(self, operator: str, *, dropout: bool) -> None:
        module, line = running_module(), running_line() or CodeLine("", 0, "")
        if isinstance(module, nn.RNNBase):
            if not module.dropout:
                return
            dropout = True
        name = None if self.in_loss or module is None else self._modules.get(id(module), "")
        found = DrawFacts(operator=operator, module=name, file=line.file, line=line.line, dropout=dropout)
        self._first.setdefault((operator, name is None, line.file, line.line, dropout), found)

    @property
    def draws(self) -> tuple[DrawFacts, ...]:
        """Each line once, with the first module that runs it: blocks that are alike are not all run."""
        return tuple(self._first.values())


def _generators() -> dict[str, Any]:
    """The states of the generators that are not PyTorch's, as values that can be compared."""
    state: Any = numpy.random.get_state()
    return {"random": random.getstate(), "numpy.random": (state[1].tobytes(), *state[2:])}


class GeneratorWatch(AbstractContextManager["GeneratorWatch"]):
    """Finds out whether Python's or numpy's generator advances while the context is active."""

    def __init__(self) -> None:
        self.moved: tuple[str, ...] = ()

    def __enter__(self) -> GeneratorWatch:
        self._before = _generators()
        return self

    def __exit__(self, *error: Any) -> None:
        self.moved = tuple(name for name, state in _generators().items() if state != self._before[name])


class GeneratorLines(AbstractContextManager["GeneratorLines"]):
    """Finds the lines of the author's code that advance Python's or numpy's generator. Slow: it stops at every line."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = {id(module): name for name, module in model.named_modules()}
        self.draws: dict[DrawFacts, None] = {}

    def __enter__(self) -> GeneratorLines:
        self._before, self._traced = _generators(), sys.gettrace()
        self._at: dict[FrameType, int] = {}
        sys.settrace(self._called)
        return self

    def __exit__(self, *error: Any) -> None:
        sys.settrace(self._traced)

    def _called(self, frame: FrameType, event: str, arg: Any) -> Any:
        return self._stepped if is_authors(frame.f_code.co_filename) else None

    def _stepped(self, frame: FrameType, event: str, arg: Any) -> Any:
        now = _generators()
        for name, state in now.items():
            if state != self._before[name] and frame in self._at:
                module = running_module()
                self.draws[
                    DrawFacts(
                        operator=name,
                        module=None if module is None else self._modules.get(id(module), ""),
                        file=frame.f_code.co_filename,
                        line=self._at[frame],
                    )
                ] = None
        self._before = now
        self._at[frame] = frame.f_lineno
        return self._stepped
