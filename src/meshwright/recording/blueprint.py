"""Run a job's builder: record it without allocating memory if that can be trusted, and build for real otherwise."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from getpass import getuser
from pathlib import Path

from torch import nn
from torch.jit import ScriptModule
from torch.nn.parameter import is_lazy

from meshwright.errors import JobError, MeshwrightError, one_line
from meshwright.recording.filling import Blueprint, adopt, as_it_was, draw_up, set_attributes
from meshwright.recording.memory import has_memory, named_tensors
from meshwright.recording.run_builder import recording, seeded
from meshwright.recording.tape import Tape
from meshwright.torch_private.modes import outside_of_modes
from meshwright.units import show_bytes

__all__ = ["Blueprint", "adopt", "as_it_was", "build_plainly", "model_to_read", "record", "set_attributes"]

Build = Callable[[], nn.Module]


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
            "on a sample in the builder."
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
