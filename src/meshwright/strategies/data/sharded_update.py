"""The engine of ZeRO-1 and ZeRO-2: every rank has whole parameters and updates its part of each.

Every parameter is cut along dim 0 like in FSDP2, so optimizer state keeps the parameter's name and global coordinates.
(`ZeroRedundancyOptimizer` assigns whole parameters to ranks, so the rank with the embedding has too much, and it needs
an optimizer class while a job has a factory.) A bucket is a shard unit: its gradients are reduce-scattered in backward
as soon as they are complete, and its parameters are gathered after the update.

Samples may decide which parameters a rank uses, so all ranks reduce buckets in one fixed order, the last unit first.
An incomplete bucket delays those after it until the end of backward. Each row of a bucket also carries a flag per
parameter, which tells a rank without a gradient whether another rank has it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import zip_longest
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from meshwright.errors import JobError
from meshwright.facts.job import NamedParameters
from meshwright.facts.model import ModelFacts, unit_of
from meshwright.strategies.collectives import all_gather, reduce_scatter
from meshwright.strategies.data.summing import message_dtype, on_any_rank, refuse_gradients, sum_over_ranks
from meshwright.strategies.engine import ApplyContext, Engine, HeldTensor
from meshwright.strategies.gather_whole import whole


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


class ShardedUpdateEngine(Engine):
    """Computes with whole parameters and updates this rank's rows of each."""

    averages_scaled = updates_copies = True

    def __init__(self, model: nn.Module, context: ApplyContext, *, keep_whole: bool) -> None:
        super().__init__(model)
        assert context.mesh is not None
        # A user's loop may reduce several times before an update, each time only what is new.
        self._mesh, self._keep_whole = context.mesh, keep_whole and not context.own_loop
        self._reduce_dtype = context.reduce_dtype
        self._each, self._reduces = context.strategy.reduces_each, True
        self._is_told = self._each and context.pipelined
        """Whether a pipeline tells when a micro-batch is done."""
        self._under_way: Bucket | None = None
        self._next = 0
        """The number of buckets whose reduction has started, of this micro-batch or step."""
        self._masters = _masters(model, context)
        # Frozen parameters are not updated, but their masters are kept if computing uses a lowered copy.
        named = [(n, p) for n, p in model.named_parameters() if p.requires_grad or n in self._masters]
        self._pieces = {name: self._piece(name, parameter) for name, parameter in named}
        trained = {n: p for n, p in self._pieces.items() if p.parameter.requires_grad}
        self._trained = list(trained.values())
        used = {n: p for n, p in trained.items() if n not in context.unused}
        self._unused = [piece for name, piece in trained.items() if name not in used]
        self._scalars = [piece for piece in used.values() if not piece.parameter.shape]
        self._buckets = [Bucket(group, self._mesh, self._reduce_dtype) for group in _by_unit(used, context.facts)]
        for bucket in self._buckets:
            for piece in bucket.pieces:
                piece.parameter.register_post_accumulate_grad_hook(self._hook(bucket, piece))
        self._masters.clear()

    @contextmanager
    def accumulating(self, last: bool) -> Iterator[None]:
        self._reduces = last or self._each
        yield
        if self._each and not last and not self._is_told:
            self._finish_buckets()

    def micro_batch_done(self) -> None:
        if self._is_told:
            self._finish_buckets()

    @torch.no_grad()
    def finish(self) -> None:
        refuse_gradients(piece.name for piece in self._unused if piece.whole_gradient() is not None)
        if not self._is_told:
            self._finish_buckets()
        self._sum_scalars()

    def reduces(self, asked: bool) -> bool:
        self._reduces = asked or self._each
        return self._reduces

    @torch.no_grad()
    def end_backward(self, *, reduced: bool, factor: float) -> None:
        if reduced:
            self._finish_buckets(factor / self._mesh.size())
            self._sum_scalars(factor / self._mesh.size())
            self.forget_gradients()

    def follow_requires_grad(self) -> None:
        for piece in self._trained:
            if piece.parameter.requires_grad != piece.shard.requires_grad:
                piece.parameter.requires_grad_(piece.shard.requires_grad)

    @torch.no_grad()
    def _finish_buckets(self, share: float = 1.0) -> None:
        """Reduce what is left, and give the shards their gradients."""
        for bucket in self._buckets[self._next :]:  # delayed by a parameter without a gradient, or by a pipeline
            for piece in bucket.pieces:
                piece.take_gradient()
            self._reduce(bucket)
        for bucket in self._buckets:
            bucket.finish(self._keep_whole, share)
        self._next = 0

    def parameters(self) -> NamedParameters:
        return NamedParameters((n, piece.shard) for n, piece in self._pieces.items() if piece.parameter.requires_grad)

    @torch.no_grad()
    def updated(self) -> None:
        for piece in self._scalars:
            piece.parameter.data.copy_(piece.shard.to_local())
        # Gather one bucket ahead: the next is sent while this one is copied.
        for current, following in zip_longest(self._buckets, self._buckets[1:]):
            if current is self._buckets[0]:
                current.start_gather()
            if following is not None:
                following.start_gather()
            current.finish_gather()

    def forget_gradients(self) -> None:
        for piece in self._pieces.values():
            piece.forget_whole()

    def held(self) -> Iterator[HeldTensor]:
        shards = {id(piece.parameter): piece.shard for piece in self._pieces.values()}
        for held in super().held():
            yield HeldTensor(held.name, shards.get(id(held.tensor), held.tensor))

    @torch.no_grad()
    def loaded(self) -> None:
        for piece in self._pieces.values():
            piece.parameter.data.copy_(whole(piece.shard.detach()))

    def resident(self) -> dict[str, list[torch.Tensor]]:
        pieces = self._pieces.values()
        gradients = (g for piece in pieces for g in (piece.parameter.grad, piece.gradient, piece.shard.grad))
        return {
            "parameters": list(self.model.parameters()),
            "masters": [piece.shard for piece in pieces],
            "gradients": [g for g in gradients if g is not None],
        }

    def _piece(self, name: str, parameter: nn.Parameter) -> ShardedParameter:
        shape = parameter.shape
        rows = -(-shape[0] // self._mesh.size()) if shape else 1
        rank = self._mesh.get_local_rank()
        source = self._masters.get(name, parameter.data)
        local = source[rank * rows : (rank + 1) * rows] if shape else source
        if name in self._masters:
            local = local.clone()  # a view would keep the whole master in memory
        local = local.contiguous()  # fused kernels need contiguous rows, also of a strided parameter
        stride = torch.empty(shape, device="meta").stride()
        placement = Shard(0) if shape else Replicate()
        dtensor = DTensor.from_local(local, self._mesh, [placement], run_check=False, shape=shape, stride=stride)
        shard = nn.Parameter(dtensor, requires_grad=parameter.requires_grad)
        return ShardedParameter(name, parameter, shard, rows)

    def _hook(self, bucket: Bucket, piece: ShardedParameter) -> Any:
        # Weak references: Python's collector cannot see a parameter's hooks, so nothing would ever be freed.
        engine_ref, bucket_ref, piece_ref = weakref.ref(self), weakref.ref(bucket), weakref.ref(piece)

        def on_gradient(parameter: torch.Tensor) -> None:
            engine, its_bucket, its_piece = engine_ref(), bucket_ref(), piece_ref()
            if engine is None or its_bucket is None or its_piece is None:
                return
            its_piece.take_gradient()
            if engine._reduces:
                engine._arrived(its_bucket, its_piece)

        return on_gradient

    def _arrived(self, bucket: Bucket, piece: ShardedParameter) -> None:
        if piece.name in bucket.arrived and bucket in self._buckets[: self._next]:
            raise JobError(
                f"The gradient of {piece.name} came twice in one backward pass, the second time after it was summed "
                "over ranks. Reentrant activation checkpointing does that; pass use_reentrant=False."
            )
        bucket.arrived.add(piece.name)
        while self._next < len(self._buckets) and self._buckets[self._next].is_complete:
            self._reduce(self._buckets[self._next])

    def _sum_scalars(self, share: float = 1.0) -> None:
        by_dtype: dict[torch.dtype, list[ShardedParameter]] = {}
        for piece in self._scalars:
            piece.take_gradient()
            by_dtype.setdefault(piece.shard.dtype, []).append(piece)
        for pieces in by_dtype.values():
            likes, own = [piece.shard.to_local() for piece in pieces], [piece.whole_gradient() for piece in pieces]
            summed = sum_over_ranks(own, likes, self._mesh.get_group(), share=share, dtype=self._reduce_dtype)
            for piece, gradient in zip(pieces, summed, strict=True):
                if gradient is not None and piece.shard.grad is not None:
                    piece.shard.grad.to_local().add_(gradient)
                elif gradient is not None:
                    piece.shard.grad = piece.as_shard(gradient)

    @torch.no_grad()
    def _reduce(self, bucket: Bucket) -> None:
        # One sum runs at a time, so that at most two buckets' gradients exist twice.
        if self._under_way is not None:
            self._under_way.wait()
        bucket.reduce()
        self._under_way, self._next = bucket, self._next + 1
        if not self._keep_whole:
            for piece in bucket.pieces:
                piece.forget_whole()


def _masters(model: nn.Module, context: ApplyContext) -> dict[str, torch.Tensor]:
    """Cast parameters to the compute dtype if it is lower, and return the originals by name."""
    if not context.lowered:
        return {}
    masters = {}
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point():
            masters[name] = parameter.data
            parameter.data = parameter.data.to(context.compute_dtype)
    return masters


def _by_unit(pieces: dict[str, ShardedParameter], facts: ModelFacts) -> list[list[ShardedParameter]]:
    """Pieces grouped by unit and dtype, in the order in which backward completes them; those of no unit come last."""
    groups: dict[tuple[str, torch.dtype, torch.dtype], list[ShardedParameter]] = {}
    for name, piece in pieces.items():
        if piece.parameter.shape:
            unit = unit_of(name, facts.shard_units)
            groups.setdefault((unit, piece.parameter.dtype, piece.shard.dtype), []).append(piece)
    called = {name: place for place, name in enumerate((*facts.shard_units, *(call.name for call in facts.calls)))}
    return [groups[key] for key in sorted(groups, key=lambda key: called.get(key[0], -1), reverse=True)]
