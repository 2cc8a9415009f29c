"""Errors that a model raises only under a strategy that divides it, as one sentence that names strategy and module."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

import torch
import torch.distributed as dist
from torch import nn

from meshwright.errors import MeshwrightError, Refused, one_line
from meshwright.facts.strategy import Strategy


@contextmanager
def naming(strategy: Strategy, model: nn.Module | None = None) -> Iterator[None]:
    """Around what ran without an error while the model was described: whatever it raises, dividing it has caused."""
    try:
        yield
    except (MeshwrightError, torch.OutOfMemoryError, dist.DistError):
        raise
    except Exception as error:
        if strategy.model_ranks == 1:
            raise
        raise Refused(
            f"{strategy} cannot run this model: {_place(error.__traceback__, model)}{one_line(error)} It ran whole "
            "before; use a data strategy (ddp, fsdp), or keep what fails in one piece with Job(tensor_plan=...) or "
            "Job(stages=...)."
        ) from error


def _place(trace: TracebackType | None, model: nn.Module | None) -> str:
    """The innermost of the model's modules that was running."""
    names = {id(module): name for name, module in model.named_modules() if name} if model is not None else {}
    found = ""
    while trace is not None:
        found = names.get(id(trace.tb_frame.f_locals.get("self")), found)
        trace = trace.tb_next
    return f"in {found}, " if found else ""
