"""What one rank of a loop does and others do not, and states that were saved by hand."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch.optim import SGD, Adam

import meshwright as mw
from loop_programs import Net, Side, batch, sgd


def state_saved_by_hand(side: Side) -> None:
    """Goes on from a copy of all states, which each rank made."""
    optimizer = sgd(side.model.parameters())
    kept: Any = None
    for step, (x, y) in enumerate(side.batches()):
        side.loss(x, y).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 1:
            kept = copy.deepcopy((side.model.state_dict(), optimizer.state_dict()))
    side.model.load_state_dict(kept[0])
    optimizer.load_state_dict(kept[1])
    side.loss(*side.part(batch(7))).backward()
    optimizer.step()


def optimizer_state_of_plain_training(side: Side) -> None:
    """Goes on with the whole optimizer state of a script that ran in one process."""
    torch.manual_seed(0)
    other = Net()
    before = Adam(other.parameters(), lr=1e-2, eps=1e-2)
    F.mse_loss(other(batch(0)[0]), batch(0)[1]).backward()
    before.step()
    side.model.load_state_dict(other.state_dict())
    optimizer = Adam(side.model.parameters(), lr=1e-2, eps=1e-2)
    optimizer.load_state_dict(before.state_dict())
    for x, y in side.batches():
        side.loss(x, y).backward()
        optimizer.step()
        optimizer.zero_grad()


def optimizer_state_of_rank_0(side: Side) -> None:
    """What rank 0 saved, loaded by all."""
    import torch.distributed as dist

    optimizer = sgd(side.model.parameters())
    for x, y in side.batches():
        side.loss(x, y).backward()
        optimizer.step()
        optimizer.zero_grad()
    kept = [copy.deepcopy(optimizer.state_dict())]
    if dist.is_initialized():
        dist.broadcast_object_list(kept)
    optimizer.load_state_dict(kept[0])
    side.loss(*side.part(batch(7))).backward()
    optimizer.step()


def skipped_on_one_rank(side: Side) -> None:
    """A condition on this rank's numbers decides about a step, after the first ones."""
    optimizer = SGD(side.model.parameters(), lr=0.05)
    for step in range(8):
        side.loss(*side.part(batch(step))).backward()
        if step != 6 or _rank_of(side) == 0:
            optimizer.step()
        optimizer.zero_grad()


def skipped_before_backward(side: Side) -> None:
    """`if not loss.isfinite(): continue` on one rank."""
    optimizer = SGD(side.model.parameters(), lr=0.05)
    for step in range(8):
        loss = side.loss(*side.part(batch(step)))
        if step == 6 and _rank_of(side) == 1:
            continue
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def skipped_before_clipping(side: Side) -> None:
    optimizer = SGD(side.model.parameters(), lr=0.05)
    for step in range(8):
        side.loss(*side.part(batch(step))).backward()
        if step != 6 or _rank_of(side) == 0:
            torch.nn.utils.clip_grad_norm_(side.model.parameters(), 0.1)
            optimizer.step()
        optimizer.zero_grad()


def saved_on_one_rank(side: Side) -> None:
    """`if rank == 0: torch.save(model.state_dict(), ...)`, as scripts do."""
    optimizer = SGD(side.model.parameters(), lr=0.05)
    for step, (x, y) in enumerate(side.batches()):
        side.loss(x, y).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 1 and _rank_of(side) == 0:
            side.model.state_dict()


def evaluated_on_one_rank(side: Side) -> None:
    optimizer = SGD(side.model.parameters(), lr=0.05)
    for step, (x, y) in enumerate(side.batches()):
        side.loss(x, y).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 1 and _rank_of(side) == 0:
            with torch.no_grad():
                side.loss(*batch(99))


def _rank_of(side: Side) -> int:
    return side.model.world.rank if isinstance(side.model, mw.Parallel) else 0


def evaluated_on_parts(side: Side) -> list[float]:
    """Each rank evaluates other samples, and the loop averages."""
    import torch.distributed as dist

    ranks = dist.get_world_size() if dist.is_initialized() else 1
    rank = dist.get_rank() if dist.is_initialized() else 0
    x, y = (tensor.chunk(ranks)[rank] for tensor in batch(99))
    with torch.no_grad():
        total = side.loss(x, y) / ranks
    if ranks > 1:
        dist.all_reduce(total)
    return [float(total)]


PROGRAMS = [
    state_saved_by_hand,
    optimizer_state_of_plain_training,
    optimizer_state_of_rank_0,
    skipped_on_one_rank,
    skipped_before_backward,
    skipped_before_clipping,
    saved_on_one_rank,
    evaluated_on_one_rank,
    evaluated_on_parts,
]
