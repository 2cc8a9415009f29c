"""Turn errors that a model raises only under a strategy into one sentence that names the strategy and the module."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import TracebackType

import torch
import torch.distributed as dist
from torch import nn

from meshwright.errors import MeshwrightError, Refused, one_line
from meshwright.facts.strategy import Strategy
from meshwright.recording.dtensor import is_dtensor
from meshwright.torch_private.autograd import StopRecomputation


@contextmanager
def naming_strategy(strategy: Strategy, model: nn.Module | None = None) -> Iterator[None]:
    """Blame the strategy for errors in code that ran without one while the model was described.

    Only if the strategy changes how the model runs: it divides the model, shards it into DTensors, or recomputes.
    """
    try:
        yield
    except (MeshwrightError, torch.OutOfMemoryError, dist.DistError, StopRecomputation):
        raise
    except Exception as error:
        sharded = model is not None and any(map(is_dtensor, model.parameters()))
        if strategy.model_ranks == 1 and strategy.recompute == "none" and not sharded:
            raise
        cause = _first(error)
        raise Refused(
            f"{strategy} cannot run this model: {_place(cause.__traceback__, model)}{one_line(cause)} The undivided "
            f"model ran before; {_way_out(strategy)}"
        ) from error


@contextmanager
def naming_optimizer(strategy: Strategy, parameters: Iterable[torch.Tensor]) -> Iterator[None]:
    """Blame the strategy's shards for errors in the optimizer's step."""
    try:
        yield
    except (MeshwrightError, torch.OutOfMemoryError, dist.DistError):
        raise
    except Exception as error:
        if not any(map(is_dtensor, parameters)):
            raise
        raise Refused(
            f"The optimizer's step does not run on the shards of {strategy}: {one_line(error)} Use ddp, or an "
            "optimizer that PyTorch runs on DTensors, AdamW for one."
        ) from error


def _way_out(strategy: Strategy) -> str:
    if strategy.recompute != "none":
        return f"drop ac={strategy.recompute}, which runs each block again with its inputs as they are by then."
    if strategy.model_ranks == 1:
        return "use ddp, zero1 or zero2, which compute with whole parameters."
    return (
        "use a data strategy (ddp, fsdp), or keep what fails in one piece with Job(tensor_plan=...) or Job(stages=...)."
    )


def _first(error: BaseException) -> BaseException:
    """The original cause: PyTorch's pipelines wrap it in their own errors."""
    return error if error.__cause__ is None else _first(error.__cause__)


def _place(trace: TracebackType | None, model: nn.Module | None) -> str:
    """The innermost of the model's modules that was running when the error was raised."""
    names = {id(module): name for name, module in model.named_modules() if name} if model is not None else {}
    found = ""
    while trace is not None:
        found = names.get(id(trace.tb_frame.f_locals.get("self")), found)
        trace = trace.tb_next
    return f"in {found}, " if found else ""
