"""The engine of ZeRO-1 and ZeRO-2: every rank has whole parameters and updates its part of each.

`ZeroRedundancyOptimizer` assigns whole parameters to ranks, so the rank with the embedding has too much, and it needs
an optimizer class while a job has a factory. Here every parameter is divided. A bucket is a shard unit: its gradients
are reduce-scattered in backward as soon as they are complete, and its parameters are gathered after the update.

Samples may decide which parameters a rank uses, so all ranks reduce buckets in one fixed order, the last unit first.
An incomplete bucket delays those after it until the end of backward.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import zip_longest
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from meshwright.errors import JobError
from meshwright.facts.job import NamedParameters
from meshwright.facts.model import ModelFacts, unit_of
from meshwright.strategies.data.summing import refuse_gradients, sum_over_ranks
from meshwright.strategies.data.update_bucket import Bucket, ShardedParameter
from meshwright.strategies.engine import ApplyContext, Engine, HeldTensor
from meshwright.strategies.gather_whole import whole


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
