"""Copy a full value into a model's tensor, or this rank's part of it into a DTensor."""

from __future__ import annotations

from typing import Any

import torch

from meshwright.recording.dtensor import is_dtensor


@torch.no_grad()
def copy_part(value: torch.Tensor, target: Any) -> None:
    """Copy the rank's part of a full CPU value into `target`. Only that part is read and moved to the device."""
    if is_dtensor(target):
        target.to_local().copy_(own_part(value, target))
    else:
        target.copy_(value)


def own_part(value: torch.Tensor, target: Any) -> torch.Tensor:
    """This rank's part of a value that is sharded as the DTensor `target` is; a view if possible."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh, placements = target.device_mesh, target.placements
    if not all(type(placement) in (Shard, Replicate) for placement in placements):
        return distribute_tensor(value.to(target.device), mesh, placements, src_data_rank=None).to_local()
    for axis, placement in enumerate(placements):
        if type(placement) is Shard:
            size, rows = value.shape[placement.dim], -(-value.shape[placement.dim] // mesh.size(axis))
            start = min(size, mesh.get_local_rank(axis) * rows)
            value = value.narrow(placement.dim, start, min(rows, size - start))
    return value
