"""Note the results of a pass's operators on meta tensors, and make the same results again without computing shapes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from meshwright.recording.report_as_cpu import META
from meshwright.torch_private.modes import TorchDispatchMode
from meshwright.torch_private.operators import READ_NUMBER, schema_of
from meshwright.tracing.meter import is_view, strided_in

Make = Callable[[Any], Any]
"""From an operator's arguments to a result."""
Results = list[tuple[Any, Make | None]]
"""Each operator of a pass, and what makes its results; None if the operator itself must run, as a view does."""


class NoteResults(TorchDispatchMode):
    """While active, notes what every operator returns."""

    def __init__(self) -> None:
        super().__init__()
        self.results: Results = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is READ_NUMBER:
            number = _read(args[0])
            self.results.append((func, lambda given: number))
            return number
        found = func(*args, **kwargs)
        viewed = is_view(func, strided_in((args, kwargs)), strided_in(found))
        self.results.append((func, None if viewed else _make(func, args, found)))
        return found


class RepeatResults(TorchDispatchMode):
    """While active, the same operators return tensors like the noted ones. Another operator is an error."""

    def __init__(self, results: Results) -> None:
        super().__init__()
        self._results = results
        self.restart()

    def restart(self) -> None:
        self.made = self.passed = self._at = 0
        """Operators whose results were made, and operators that ran."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        noted, make = self._results[self._at]
        self._at += 1
        if noted is not func:
            raise RuntimeError(f"{func} runs where {noted} ran before: the pass is not the same each time")
        if make is None:
            self.passed += 1
            return func(*args, **(kwargs or {}))
        self.made += 1
        return make(args)


def _read(tensor: torch.Tensor) -> Any:
    """The number in a tensor that the model made on the CPU; meta tensors have none, so theirs is made up."""
    if tensor.device != META:
        return tensor.item()
    return True if tensor.dtype == torch.bool else 1.0 if tensor.dtype.is_floating_point else 1


def _make(func: Any, args: Any, found: Any) -> Make | None:
    """What makes an operator's results from its arguments; None for results that are no tensors."""
    if isinstance(found, torch.Tensor):
        return _make_one(args, found)
    if not isinstance(found, tuple | list) or schema_of(func).is_mutable:
        return None
    makes = [_make_one(args, one) for one in found]
    kind = type(found)
    return lambda given: kind([make(given) for make in makes])


def _make_one(args: Any, found: Any) -> Make:
    place = next((place for place, arg in enumerate(args) if arg is found), None)
    if place is not None:
        return lambda given: given[place]
    if not isinstance(found, torch.Tensor):
        return lambda given: found
    size, stride, dtype, empty = tuple(found.shape), tuple(found.stride()), found.dtype, torch.empty_strided
    return lambda given: empty(size, stride, dtype=dtype, device=META)
