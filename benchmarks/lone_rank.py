"""A world of which only rank 0 exists, with collectives that give it numbers it can train on.

PyTorch's backend "fake" leaves the results of reductions unset in 2.11, so gradients are whatever the memory held, and
losses cannot be compared. Here gathering repeats this rank's tensor, in one kernel, and reducing gives its own part.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _create_work_from_future
from torch.futures import Future

from meshwright.torch_private.fake_world import FakeStore

NAME = "lone"


def _done(result: Any) -> Any:
    future: Future[Any] = Future()
    future.set_result(result)
    return _create_work_from_future(future)


class LoneGroup(dist.ProcessGroup):
    """A group in which this process is rank 0 and the others do not exist.

    PyTorch 2.13 renamed some of the methods that it calls, so they have both names.
    """

    def __init__(self, ranks: int) -> None:
        super().__init__(0, ranks)
        self._ranks = ranks

    def size(self) -> int:
        return self._ranks

    def getBackendName(self) -> str:  # noqa: N802
        return NAME

    @property
    def group_name(self) -> str:
        return dist.distributed_c10d._world.pg_names[self]

    @property
    def pg_name(self) -> str:
        return self.group_name

    def allreduce(self, tensors: list[Tensor], options: Any = None) -> Any:
        return _done(tensors)

    def allreduce_coalesced(self, tensors: list[Tensor], options: Any = None) -> Any:
        return _done(tensors)

    def broadcast(self, tensors: list[Tensor], options: Any = None) -> Any:
        return _done(tensors)

    def barrier(self, options: Any = None) -> Any:
        return _done(None)

    @torch.no_grad()
    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], options: Any = None) -> Any:
        for row, own in zip(outputs, inputs, strict=True):
            for output in row:
                output.copy_(own)
        return _done(outputs)

    @torch.no_grad()
    def all_gather_single(self, output: Tensor, own: Tensor, options: Any = None) -> Any:
        rows = output.view(self._ranks, -1)
        in_place = own.data_ptr() == output.data_ptr()  # as FSDP2 gathers
        (rows[1:] if in_place else rows).copy_(own.reshape(1, -1))
        return _done(output)

    def all_gather_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], options: Any = None) -> Any:
        for output, own in zip(outputs, inputs, strict=True):
            self.all_gather_single(output, own)
        return _done(outputs)

    @torch.no_grad()
    def reduce_scatter_single(self, output: Tensor, whole: Tensor, options: Any = None) -> Any:
        output.view(-1).copy_(whole.view(self._ranks, -1)[0])
        return _done(output)

    def reduce_scatter_single_coalesced(self, outputs: list[Tensor], wholes: list[Tensor], options: Any = None) -> Any:
        for output, whole in zip(outputs, wholes, strict=True):
            self.reduce_scatter_single(output, whole)
        return _done(outputs)

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced


def _make(store: dist.Store, rank: int, ranks: int, timeout: Any) -> LoneGroup:
    assert rank == 0
    return LoneGroup(ranks)


def join_as_rank_0(ranks: int, device: torch.device) -> None:
    """Make the world of this process one of `ranks`, of which it is the first."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, _make, devices=["cpu", "cuda"])
    dist.init_process_group(NAME, store=FakeStore(), rank=0, world_size=ranks)
