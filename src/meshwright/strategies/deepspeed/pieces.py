"""Find each parameter in ZeRO's flat tensors: a rank's piece of it is a range of one of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from meshwright.strategies.cuts import Stretch


@dataclass(frozen=True)
class FlatPiece:
    """This rank's part of one parameter; it may be empty."""

    name: str
    parameter: nn.Parameter
    """The model's."""
    flat: torch.Tensor
    """The optimizer's tensor: the concatenated masters of many parameters."""
    at: int
    """The start of the piece in `flat`."""
    length: int
    stretch: Stretch

    @cached_property
    def master(self) -> nn.Parameter:
        """The piece of the masters as a separate parameter."""
        return nn.Parameter(self.of(self.flat.detach()))

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """The piece of a tensor with the layout of `flat`."""
        return flat.narrow(0, self.at, self.length)

    def take(self, whole: torch.Tensor) -> torch.Tensor:
        """The same elements of a whole tensor."""
        return whole.reshape(-1).narrow(0, self.stretch.start, self.length)


def pieces_of(optimizer: Any, names: dict[int, str], shapes: dict[str, torch.Size]) -> Iterator[FlatPiece]:
    """All pieces that a ZeRO optimizer updates on this rank; `names` are keyed by the parameters' ids."""
    if hasattr(optimizer, "fp32_partitioned_groups_flat"):
        yield from _of_stage_3(optimizer, names, shapes)
        return
    if hasattr(optimizer, "bf16_groups"):  # DeepSpeed has a separate optimizer for stage 1 in bf16
        groups, flats = optimizer.bf16_groups, optimizer.fp32_groups_flat_partition
    else:
        groups, flats = optimizer.bit16_groups, optimizer.single_partition_of_fp32_groups
    for group, flat in zip(groups, flats, strict=True):
        for parameter in group:
            yield _of_stage_1_or_2(parameter, flat, names[id(parameter)])


def _of_stage_1_or_2(parameter: nn.Parameter, flat: torch.Tensor, name: str) -> FlatPiece:
    """A group's parameters are concatenated, and each rank has an equal part of the result."""
    shape, mapping = tuple(parameter.shape), parameter._hp_mapping  # type: ignore[attr-defined]  # DeepSpeed's own
    if mapping is None:
        return FlatPiece(name, parameter, flat, 0, 0, Stretch(shape=shape, start=0))
    own, there = mapping.hp_fragment_address, mapping.lp_fragment_address
    return FlatPiece(name, parameter, flat, own.start, own.numel, Stretch(shape=shape, start=there.start))


def _of_stage_3(optimizer: Any, names: dict[int, str], shapes: dict[str, torch.Size]) -> Iterator[FlatPiece]:
    """Every parameter is divided evenly; the last ranks have padding."""
    for group in optimizer.fp16_groups:
        for parameter in group:
            name = names[id(parameter)]
            number, at, room = optimizer.grad_position[optimizer.get_param_id(parameter)]
            stretch, length = even_stretch(tuple(shapes[name]), room, dist.get_rank(parameter.ds_process_group))
            yield FlatPiece(name, parameter, optimizer.fp32_partitioned_groups_flat[number], at, length, stretch)


def even_stretch(shape: tuple[int, ...], room: int, rank: int) -> tuple[Stretch, int]:
    """A rank's part of a tensor that is divided into parts of `room` elements, and the part's length."""
    start = min(rank * room, prod(shape))
    return Stretch(shape=shape, start=start), min(room, prod(shape) - start)


@torch.no_grad()
def joined(own: torch.Tensor, stretch: Stretch, group: dist.ProcessGroup | None, device: torch.device) -> torch.Tensor:
    """Join the ranks' stretches into a whole tensor on every rank. All ranks must call it."""
    flat = torch.zeros(prod(stretch.shape), dtype=own.dtype, device=device)
    flat.narrow(0, stretch.start, own.numel()).copy_(own.detach())
    dist.all_reduce(flat, group=group)
    return flat.view(stretch.shape)
