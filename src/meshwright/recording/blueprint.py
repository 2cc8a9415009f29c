"""Run a job's builder: record it without allocating memory if that can be trusted, and build for real otherwise.

Under a tape, a builder sees the devices, values and random generators that it would see in a plain build.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from getpass import getuser
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import nn
from torch.jit import ScriptModule
from torch.nn.parameter import is_lazy

from meshwright.errors import JobError, MeshwrightError, one_line
from meshwright.recording.filling import Blueprint, adopt, as_it_was, draw_up, set_attributes
from meshwright.recording.memory import has_memory, named_tensors
from meshwright.recording.report_as_cpu import DEVICE, IS_META, ReportAsCpu, is_meta, tensors_in
from meshwright.recording.tape import Tape
from meshwright.torch_private.initialization import replaced_truncated_normal, truncated_normal
from meshwright.torch_private.modes import outside_of_modes
from meshwright.units import show_bytes

__all__ = ["Blueprint", "adopt", "as_it_was", "build_plainly", "model_to_read", "record", "set_attributes"]

Build = Callable[[], nn.Module]
_SET_DATA: Any = torch.Tensor.data.__set__  # type: ignore[attr-defined]


def record(build: Build, seed: int, *, values: bool = True) -> Blueprint:
    """Run the builder without allocating memory, and return the model and the recording of its weights.

    If that fails, or the recording cannot be trusted, the builder runs for real. Without `values` the weights of such a
    real build are dropped at once, and `fill` needs them from another process.
    """
    try:
        with recording(seed) as tape:
            model = build()
    except MeshwrightError:
        raise
    except (Exception, SystemExit) as error:
        return _for_real(build, seed, one_line(error), values=values)
    _check(model)
    if doubt := tape.doubt or _uninitialised(model, tape):
        del model
        return _for_real(build, seed, doubt, values=values)
    return draw_up(model, tape)


_read: tuple[Build, nn.Module] | None = None


def model_to_read(build: Build) -> nn.Module:
    """The model without weights, recorded once and shared by all readers. It must not be run or changed."""
    global _read
    if _read is None or _read[0] is not build:  # by identity: a builder need not be hashable
        _read = build, record(build, seed=0, values=False).model
    return _read[1]


def build_plainly(build: Build, seed: int) -> nn.Module:
    """What `torch.manual_seed(seed); build()` gives, with none of our modes active."""
    try:
        with outside_of_modes(), seeded(seed):
            model = build()
    except MeshwrightError:
        raise
    except (Exception, SystemExit) as error:
        raise JobError(f"The job's model cannot be built: {one_line(error)}") from error
    _check(model)
    if empty := [name for name, tensor in named_tensors(model) if tensor.is_meta]:
        raise JobError(f"The model's builder left {', '.join(empty[:3])} on the meta device; give it values there.")
    return model


def _for_real(build: Build, seed: int, doubt: str, *, values: bool) -> Blueprint:
    started = time.perf_counter()
    with _one_at_a_time():
        model = build_plainly(build, seed)
        size = sum({id(tensor): tensor.nbytes for _, tensor in named_tensors(model)}.values())
        blueprint = draw_up(model, Tape(seed))
        if not values:
            blueprint.release()
    cost = f"{show_bytes(size)} of host memory and {time.perf_counter() - started:.1f} s"
    return replace(blueprint, doubt=doubt.removesuffix("."), cost=cost)


def _check(model: object) -> None:
    if not isinstance(model, nn.Module):
        raise JobError(f"Job(model=...) must return an nn.Module, but it returned {type(model).__name__}.")
    if lazy := [name for name, parameter in model.named_parameters() if is_lazy(parameter)]:
        raise JobError(
            f"The model's parameter {lazy[0]} has no shape yet; give its module all its sizes, or call the model once "
            "on a sample in the builder.",
            kind="lazy-parameter",
            name=lazy[0],
        )
    if scripted := [name for name, module in model.named_modules() if isinstance(module, ScriptModule)]:
        raise JobError(
            f"The model's module {scripted[0]!r} is compiled by torch.jit, so its calls cannot be hooked; pass the "
            "Python module instead, and compile the model with the strategy's term compile."
        )


def _uninitialised(model: nn.Module, tape: Tape) -> str:
    """Why the values of a recorded model are unknown; empty if they are known."""
    for name, tensor in named_tensors(model):
        if has_memory(tensor) and tensor.is_meta and not (tape.has(tensor) and tape.is_written(tape.slot(tensor))):
            return f"no write to {name} was recorded"
    return ""


@contextmanager
def _one_at_a_time() -> Iterator[None]:
    """Make the ranks of a host take turns, so that it never holds more than one whole model."""
    try:
        import fcntl
    except ImportError:  # Windows
        yield
        return
    with (Path(tempfile.gettempdir()) / f"meshwright-build-{getuser()}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


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
        with _builder_may_seed(tape), _truncated_draws(tape), _RecordedAsCpu(tape), tape:
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


def _truncated_draws(tape: Tape) -> AbstractContextManager[None]:
    """Record truncated normal distributions as one operator each."""

    def draw(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if tape.has(tensor):
            tape.draw(truncated_normal, tensor, *args, **kwargs)
        else:
            truncated_normal(tensor, *args, **kwargs)
        return tensor

    return replaced_truncated_normal(draw)


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
