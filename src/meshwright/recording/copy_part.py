"""Copy a value to where a model holds it, or a part of it."""

from __future__ import annotations

from typing import Any

import torch

from meshwright.recording.dtensor import is_dtensor


@torch.no_grad()
def copy_part(value: torch.Tensor, target: Any) -> None:
    """Every rank has the same whole value, on the CPU; only its own part of it is read and goes to its device."""
    if is_dtensor(target):
        target.to_local().copy_(own_part(value, target))
    else:
        target.copy_(value)


def own_part(value: torch.Tensor, target: Any) -> torch.Tensor:
    """What this rank holds of a value that is laid out as the DTensor `target` is; a view where that is possible."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh, placements = target.device_mesh, target.placements
    if not all(type(placement) in (Shard, Replicate) for placement in placements):
        whole = value.to(target.device)
        return distribute_tensor(whole, mesh, placements, src_data_rank=None).to_local()
    for axis, placement in enumerate(placements):
        if type(placement) is Shard:
            size, rows = value.shape[placement.dim], -(-value.shape[placement.dim] // mesh.size(axis))
            start = min(size, mesh.get_local_rank(axis) * rows)
            value = value.narrow(placement.dim, start, min(rows, size - start))
    return value
