"""Read an error of a device that ran out of memory: where it happened, and how much was asked for."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from types import TracebackType

import torch
from torch import nn

from meshwright.facts.rehearsal import BACKWARD, Moment
from meshwright.units import parse_bytes

WORDS = ("out of memory", "not enough memory", "can't allocate memory")
"""In the messages of CUDA's and the CPU's allocators."""
_WANTED = re.compile(r"Tried to allocate ([0-9.]+ [KMGT]?i?B)|tried to allocate ([0-9]+) bytes")
_BACKWARD = "_engine_run_backward"
"""The function through which PyTorch enters its autograd engine, as tracebacks show it."""


def is_exhausted(error: BaseException) -> bool:
    """Whether memory ran out; a pipeline raises its own error from the original one."""
    return any(_ran_out(one) for one in _chain(error))


def bytes_wanted(error: BaseException) -> int:
    """Bytes of the request that could not be met; 0 if the error does not say."""
    for one in _chain(error):
        if found := _WANTED.search(str(one)):
            return parse_bytes(found[1]) if found[1] else int(found[2])
    return 0


def place_of_error(error: BaseException, moment: Moment, models: Sequence[nn.Module]) -> Moment:
    """The moment of an error: what was noted last, corrected by its traceback."""
    names = {id(module): name for model in models for name, module in model.named_modules() if name}
    frames = [frame for one in _chain(error) for frame in _frames(one.__traceback__)]
    in_backward = any(code == _BACKWARD for code, _ in frames)
    phase = BACKWARD if in_backward else moment.phase
    module = moment.module if phase == moment.phase else ""
    if not module:
        module = next((names[owner] for _, owner in reversed(frames) if owner in names), "")
    return Moment(phase=phase, module=module)


def _ran_out(error: BaseException) -> bool:
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(word in str(error) for word in WORDS)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


def _frames(trace: TracebackType | None) -> Iterator[tuple[str, int]]:
    """The function of each frame, and the identity of the object whose method it is."""
    while trace is not None:
        frame = trace.tb_frame
        yield frame.f_code.co_name, id(frame.f_locals.get("self"))
        trace = trace.tb_next
