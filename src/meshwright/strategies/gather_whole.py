"""Make sharded tensors whole on every rank, many small ones in one collective.

A collective of a small tensor takes the hosts much longer than its bytes take the link, and a model has hundreds of
small parameters.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist

from meshwright.recording.dtensor import is_dtensor
from meshwright.strategies.collectives import all_gather
from meshwright.units import MIB

BATCH = 16 * MIB
"""Tensors are gathered together up to this size, which bounds the memory for it."""


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The whole tensor on every rank."""
    return tensor.full_tensor() if is_dtensor(tensor) else tensor


def gather_whole(tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Each tensor whole on every rank, in the same order. All ranks must take all of them."""
    batch: list[tuple[str, torch.Tensor]] = []
    size = 0
    for name, tensor in tensors:
        batch.append((name, tensor))
        size += tensor.numel() * tensor.element_size() if is_dtensor(tensor) else 0
        if size >= BATCH:
            yield from _gather(batch)
            batch, size = [], 0
    yield from _gather(batch)


def _gather(batch: list[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    rows = [_rows_of(tensor) for _, tensor in batch]
    together: dict[object, list[Rows]] = {}
    for found in rows:
        if found is not None:
            together.setdefault((found.group, found.local.dtype, found.local.device), []).append(found)
    joined = {id(one): tensor for many in together.values() for one, tensor in zip(many, _join(many), strict=True)}
    for (name, tensor), found in zip(batch, rows, strict=True):
        yield name, whole(tensor) if found is None else joined[id(found)]


@dataclass(frozen=True, eq=False)
class Rows:
    """A rank's rows of a tensor that one axis shards along its first dim."""

    local: torch.Tensor
    shape: torch.Size
    """Of the whole tensor."""
    group: dist.ProcessGroup

    @property
    def padded(self) -> torch.Size:
        """The shape of the first rank's rows; the last ranks may have fewer."""
        return torch.Size((-(-self.shape[0] // self.group.size()), *self.shape[1:]))


def _rows_of(tensor: torch.Tensor) -> Rows | None:
    """None if the tensor is sharded in another way, or not at all."""
    if not is_dtensor(tensor):
        return None
    from torch.distributed.tensor import Shard

    sharded = {axis: how for axis, how in enumerate(tensor.placements) if not how.is_replicate()}
    if len(sharded) != 1 or not all(type(how) is Shard and how.dim == 0 for how in sharded.values()):
        return None
    return Rows(tensor.to_local().detach(), tensor.shape, tensor.device_mesh.get_group(*sharded))


@torch.no_grad()
def _join(many: list[Rows]) -> list[torch.Tensor]:
    """The whole tensors of rows with one group, dtype and device."""
    group, first = many[0].group, many[0].local
    sizes = [one.padded.numel() for one in many]
    own, joined = first.new_zeros(sum(sizes)), first.new_empty((group.size(), sum(sizes)))
    for place, one in zip(own.split(sizes), many, strict=True):
        place[: one.local.numel()] = one.local.reshape(-1)
    all_gather(joined.view(-1), own, group=group)
    parts = zip(joined.split(sizes, dim=1), many, strict=True)
    return [part.reshape(-1)[: one.shape.numel()].clone().view(one.shape) for part, one in parts]
