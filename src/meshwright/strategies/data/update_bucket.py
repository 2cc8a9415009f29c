"""The messages of ZeRO-1 and ZeRO-2: parameters that are sent together, each cut along dim 0 like in FSDP2.

The cut keeps the name and global coordinates of optimizer state. Each row of a message also carries a flag for each
parameter, which tells a rank without a gradient whether another rank has it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from meshwright.strategies.collectives import all_gather, reduce_scatter
from meshwright.strategies.data.summing import message_dtype, on_any_rank


@dataclass
class ShardedParameter:
    """A parameter and this rank's part of it."""

    name: str
    parameter: nn.Parameter
    shard: Any
    """The optimizer's parameter: an nn.Parameter that is a DTensor over the data axis."""
    rows: int
    """Rows of dim 0 in a full chunk; the last ranks may have fewer or none."""
    gradient: torch.Tensor | None = None
    """The whole gradient in the master's dtype, if the parameter has a smaller dtype."""

    @property
    def width(self) -> int:
        """Elements of a full chunk."""
        return self.rows * prod(self.parameter.shape[1:])

    def take_gradient(self) -> None:
        """Add the parameter's gradient to `gradient` if the dtypes differ."""
        if self.parameter.grad is None or self.parameter.dtype == self.shard.dtype:
            return
        if self.gradient is None:
            self.gradient = self.parameter.grad.to(self.shard.dtype)
        else:
            self.gradient += self.parameter.grad
        self.parameter.grad = None

    def whole_gradient(self) -> torch.Tensor | None:
        return self.gradient if self.gradient is not None else self.parameter.grad

    def forget_whole(self) -> None:
        self.gradient = self.parameter.grad = None

    def chunk(self, tensor: torch.Tensor, rank: int) -> torch.Tensor:
        """A view of the rows of `rank`."""
        return tensor[rank * self.rows : (rank + 1) * self.rows]

    def as_shard(self, local: torch.Tensor) -> DTensor:
        like = self.shard
        return DTensor.from_local(
            local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
        )


class Bucket:
    """Parameters that are sent together as a (ranks, width) matrix, whose row r belongs to rank r."""

    def __init__(
        self, pieces: list[ShardedParameter], mesh: DeviceMesh, reduce_dtype: torch.dtype | None = None
    ) -> None:
        self.pieces = pieces
        self._dtype = message_dtype(pieces[0].shard.dtype, reduce_dtype)
        self.ranks, self.rank, self.group = mesh.size(), mesh.get_local_rank(), mesh.get_group()
        self.width = sum(piece.width for piece in pieces)
        self.arrived: set[str] = set()
        """Names of pieces that have the gradient of the last micro-batch."""
        self._missing: list[bool] = []
        """Whether this rank has no gradient in this step, for each piece."""
        self._work: dist.Work | None = None
        self._reduced = self._sent = self._gathered = torch.empty(0)

    @property
    def is_complete(self) -> bool:
        return len(self.arrived) == len(self.pieces)

    def reduce(self) -> None:
        """Start to sum gradients over ranks; each rank gets its row, and the number of ranks with each gradient."""
        like = self.pieces[0].shard
        width = self.width + len(self.pieces)
        matrix = torch.zeros(self.ranks, width, dtype=self._dtype, device=like.device)
        for piece, columns in self._columns():
            if (gradient := piece.whole_gradient()) is not None:
                self._pack(piece, gradient, matrix[:, columns])
        self._missing = [piece.whole_gradient() is None for piece in self.pieces]
        matrix[:, self.width :] = 1.0
        for place, missing in enumerate(self._missing, start=self.width):
            if missing:
                matrix[:, place] = 0.0
        self._sent, self._reduced = matrix, matrix.new_empty(width)
        self._work = reduce_scatter(self._reduced, matrix.view(-1), group=self.group, async_op=True)

    def wait(self) -> None:
        """Wait for the running message and free its buffer."""
        if self._work is not None:
            self._work.wait()
        self._work, self._sent = None, torch.empty(0)

    def finish(self, keep_whole: bool, share: float = 1.0) -> None:
        """Wait for the sum and add `share` times it to each shard's gradient, which stays None if no rank has one."""
        self.wait()
        exists = on_any_rank(self._missing, self._reduced[self.width :])
        self._reduced = self._reduced.to(self.pieces[0].shard.dtype)
        if share != 1.0:
            self._reduced *= share
        for (piece, columns), used in zip(self._columns(), exists, strict=True):
            if not used:
                continue
            local = piece.chunk(piece.parameter, self.rank)
            reduced = self._reduced[columns][: local.numel()].view(local.shape)
            # A strided parameter has a contiguous shard, and fused optimizer kernels need a gradient with its strides.
            kept = piece.whole_gradient() if piece.parameter.is_contiguous() else None
            if keep_whole and kept is not None:
                reduced = piece.chunk(kept, self.rank).copy_(reduced)
            if piece.shard.grad is None:
                piece.shard.grad = piece.as_shard(reduced)
            else:
                piece.shard.grad.to_local().add_(reduced)
        self._reduced = torch.empty(0)
        self.arrived.clear()

    def start_gather(self) -> None:
        """Start to send this rank's updated rows to all ranks."""
        like = self.pieces[0].parameter
        mine = torch.zeros(self.width, dtype=like.dtype, device=like.device)
        for piece, columns in self._columns():
            local = piece.shard.to_local()
            mine[columns][: local.numel()].copy_(local.reshape(-1))
        self._sent, self._gathered = mine, mine.new_empty(self.ranks, self.width)
        self._work = all_gather(self._gathered.view(-1), mine, group=self.group, async_op=True)

    def finish_gather(self) -> None:
        self.wait()
        for piece, columns in self._columns():
            self._unpack(piece, self._gathered[:, columns])
        self._gathered = torch.empty(0)

    def _columns(self) -> Iterator[tuple[ShardedParameter, slice]]:
        start = 0
        for piece in self.pieces:
            yield piece, slice(start, start + piece.width)
            start += piece.width

    def _pack(self, piece: ShardedParameter, tensor: torch.Tensor, matrix: torch.Tensor) -> None:
        if tensor.numel() == matrix.numel():
            matrix.copy_(tensor.reshape(matrix.shape))
            return
        for rank in range(self.ranks):
            rows = piece.chunk(tensor, rank)
            matrix[rank, : rows.numel()].copy_(rows.reshape(-1))

    def _unpack(self, piece: ShardedParameter, matrix: torch.Tensor) -> None:
        target = piece.parameter.data
        if target.numel() == matrix.numel():
            target.copy_(matrix.reshape(target.shape))
            return
        for rank in range(self.ranks):
            rows = piece.chunk(target, rank)
            rows.copy_(matrix[rank, : rows.numel()].view(rows.shape))
