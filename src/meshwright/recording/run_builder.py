"""Run a builder under a tape, with the devices, values and random generators that it would see in a plain build."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy
import torch

from meshwright.recording.report_as_cpu import DEVICE, IS_META, ReportAsCpu, is_meta, tensors_in
from meshwright.recording.tape import Tape

_SET_DATA: Any = torch.Tensor.data.__set__  # type: ignore[attr-defined]


class _RecordedAsCpu(ReportAsCpu):
    """Recorded tensors report to be on the CPU and have readable values; the builder's own meta tensors do not.

    A library that builds on the meta device and loads files afterwards checks which tensors still have no values.
    """

    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self._tape = tape

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.tolist and self._tape.has(args[0]):
            return self._tape.real(args[0]).tolist()
        if func is torch.Tensor.data_ptr and self._tape.has(args[0]):
            slot = self._tape.slot(args[0])
            return slot.storage + slot.extent.start
        if func == _SET_DATA and self._tape.has(args[0]) and not is_meta(args[1]):
            return func(args[0], self._tape.take_over(args[1]))
        if func not in (IS_META, DEVICE) and self._is_on_meta(func, args, kwargs or {}):
            with self._tape.paused():
                return func(*args, **(kwargs or {}))
        return super().__torch_function__(func, types, args, kwargs)

    def _is_on_meta(self, func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
        """Whether the builder requests a result on the meta device, by name or by its arguments."""
        device = kwargs.get("device")
        if func is torch.Tensor.to and device is None:
            device = next((arg for arg in args[1:2] if isinstance(arg, str | torch.device)), None)
        if device is not None:
            return str(device).startswith("meta")
        tensors = tensors_in((args, kwargs))
        return any(map(is_meta, tensors)) and not any(self._tape.has(tensor) for tensor in tensors)

    def hides(self, tensor: torch.Tensor) -> bool:
        return self._tape.has(tensor)


@contextmanager
def recording(seed: int) -> Iterator[Tape]:
    """Record a builder. All random generators start from the seed and are restored afterwards."""
    tape = Tape(seed)
    with seeded(seed):
        untouched = torch.default_generator.get_state()
        with _builder_may_seed(tape), _RecordedAsCpu(tape), tape:
            yield tape
        if not torch.equal(torch.default_generator.get_state(), untouched):
            tape.doubt = tape.doubt or "it uses torch's generator in a way that is not recorded"
    if tape.constants.stale():
        tape.doubt = tape.doubt or "data that weights were made from was changed later without an operator"


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed the generators of torch, Python and numpy, and restore them afterwards."""
    states = torch.default_generator.get_state(), random.getstate(), numpy.random.get_state()
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    try:
        yield
    finally:
        torch.default_generator.set_state(states[0])
        random.setstate(states[1])
        numpy.random.set_state(states[2])


@contextmanager
def _builder_may_seed(tape: Tape) -> Iterator[None]:
    """Make `torch.manual_seed`, `fork_rng` and the like act on the recording instead of the generator."""

    def manual_seed(seed: int) -> torch.Generator:
        tape.set_random_state(torch.Generator().manual_seed(int(seed)).get_state())
        return torch.default_generator

    replaced = dict(manual_seed=manual_seed, get_rng_state=tape.random_state, set_rng_state=tape.set_random_state)
    places = [(module, name) for module in (torch, torch.random) for name in replaced]
    before = [getattr(module, name) for module, name in places]
    for module, name in places:
        setattr(module, name, replaced[name])
    try:
        yield
    finally:
        for (module, name), value in zip(places, before, strict=True):
            setattr(module, name, value)
