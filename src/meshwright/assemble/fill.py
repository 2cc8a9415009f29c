"""Give a model its initial weights after the strategy was applied.

Every rank replays its own recording of the builder. If a builder could not be recorded, or gave ranks different
weights, rank 0 sends its values one tensor at a time, and each rank keeps its part.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from meshwright.assemble.world import World
from meshwright.errors import JobError, one_line
from meshwright.facts.strategy import Strategy
from meshwright.recording.blueprint import Blueprint
from meshwright.recording.filling import Give
from meshwright.strategies import data_strategy
from meshwright.strategies.cuts import Cuts

_CPU = torch.device("cpu")
_printed: set[str] = set()


def fill(blueprint: Blueprint, world: World, strategy: Strategy, cuts: Cuts) -> None:
    """Fill in initial weights that are the same on every rank."""
    on_host = data_strategy(strategy).weights_on_host(strategy)
    device = _CPU if on_host else world.device
    if world.weightless:
        blueprint.allocate(device)
        return
    part = partial(_part, cuts)
    sent = partial(_from_main, blueprint, world)
    digest = blueprint.fill(device, part, sent if _any_built_for_real(blueprint, world) else None)
    if len(set(world.gather(digest))) > 1:
        note = "The model's builder gave ranks different weights from the same seed; all ranks train rank 0's."
        _print_once(world, "different", note)
        blueprint.put(part, sent)
    blueprint.release()
    if on_host:
        for buffer in blueprint.model.buffers():
            buffer.data = buffer.data.to(world.device)


def _part(cuts: Cuts, name: str, value: torch.Tensor) -> torch.Tensor:
    return cuts[name].take(value) if name in cuts else value


def _any_built_for_real(blueprint: Blueprint, world: World) -> bool:
    """Whether any rank has no recording. Raises if ranks built different models."""
    of_ranks = world.gather((blueprint.structure, blueprint.doubt, blueprint.cost))
    other = next((rank for rank, (structure, *_) in enumerate(of_ranks) if structure != blueprint.structure), None)
    if other is not None:
        raise JobError(
            f"The model's builder made different tensors on rank {other} and on rank {world.rank}; "
            "names, shapes and dtypes must not depend on the rank or on chance."
        )
    doubt, cost = next(((doubt, cost) for _, doubt, cost in of_ranks if doubt), ("", ""))
    if doubt:
        who = "every rank of a host in turn" if world.ranks > 1 else "this process"
        note = f"The model's builder could not be recorded ({doubt}), so {who} ran it for real: {cost} each time."
        _print_once(world, doubt, note)
    return bool(doubt) and world.ranks > 1 and not world.fake


def _print_once(world: World, cause: str, sentence: str) -> None:
    """Print a note once per cause, because a process may build many trainers."""
    if world.is_main and cause not in _printed:
        _printed.add(cause)
        print(f"note: {sentence}", file=sys.stderr, flush=True)


def _from_main(blueprint: Blueprint, world: World, give: Give) -> None:
    """Give every rank the values of rank 0. All ranks must call it."""
    if not world.is_main:
        while (header := _broadcast(world, None)) is not None:
            if isinstance(header, str):
                raise JobError(header)
            key, dtype, shape = header
            value = torch.empty(shape, dtype=dtype)
            _send(world, value)
            give(key, value)
        return

    def send(key: str | int, value: torch.Tensor) -> None:
        _broadcast(world, (key, value.dtype, tuple(value.shape)))
        _send(world, value.contiguous())
        give(key, value)

    try:
        blueprint.play(send)
    except Exception as error:
        _broadcast(world, f"Rank 0 could not send the initial weights: {one_line(error)}")
        raise
    _broadcast(world, None)


def _broadcast(world: World, header: Any) -> Any:
    values = [header]
    dist.broadcast_object_list(values, src=0, group=world.group, device=_CPU)
    return values[0]


def _send(world: World, value: torch.Tensor) -> None:
    """Overwrite a tensor with rank 0's, as bytes because not every dtype can be sent."""
    if value.numel():
        dist.broadcast(value.reshape(-1).view(torch.uint8), src=0, group=world.group)
