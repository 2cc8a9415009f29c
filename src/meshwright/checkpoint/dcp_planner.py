"""Planners for `torch.distributed.checkpoint`, whose state is a dict from names to `HeldParts`."""

from __future__ import annotations

import io
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultSavePlanner, planner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from meshwright.checkpoint.parts import HeldParts, Part, State
from meshwright.checkpoint.storage import narrowed


class PartsSavePlanner(DefaultSavePlanner):
    """Offers every part that a rank holds; PyTorch's global plan assigns each box to one of its holders."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def set_up_planner(
        self, state_dict: Any, storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        self._state: State = state_dict
        self.is_coordinator = is_coordinator

    def create_local_plan(self) -> planner.SavePlan:
        return planner.SavePlan(
            [_item(name, held, part) for name, held in self._state.items() for part in _distinct(held)]
        )

    def resolve_data(self, write_item: planner.WriteItem) -> torch.Tensor | io.BytesIO:
        offsets = tuple(write_item.index.offset or ())
        return next(part.tensor for part in self._state[write_item.index.fqn].parts if part.offsets == offsets)


class PartsLoadPlanner(planner.LoadPlanner):
    """Requests the overlap of every part with the checkpoint's chunks."""

    def set_up_planner(self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        assert metadata is not None
        self._state: State = state_dict
        self._metadata = metadata

    def create_local_plan(self) -> planner.LoadPlan:
        items: list[planner.ReadItem] = []
        for name, held in self._state.items():
            saved = self._metadata.state_dict_metadata[name]
            assert isinstance(saved, TensorStorageMetadata)
            items += create_read_items_for_chunk_list(name, saved, [_chunk(part) for part in held.parts])
        return planner.LoadPlan(items)

    def create_global_plan(self, global_plan: list[planner.LoadPlan]) -> list[planner.LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: planner.LoadPlan) -> planner.LoadPlan:
        return central_plan

    def load_bytes(self, read_item: planner.ReadItem, value: io.BytesIO) -> None:
        raise AssertionError("our checkpoints hold tensors only")

    def resolve_tensor(self, read_item: planner.ReadItem) -> torch.Tensor:
        assert read_item.dest_index.index is not None
        part = self._state[read_item.dest_index.fqn].parts[read_item.dest_index.index]
        return narrowed(part.tensor, read_item.dest_offsets, read_item.lengths)

    def commit_tensor(self, read_item: planner.ReadItem, tensor: torch.Tensor) -> None:
        pass


def share_out(plans: list[planner.SavePlan]) -> list[planner.SavePlan]:
    """Decide which rank writes what, given what all ranks offer: each box once, bytes spread evenly. Pure."""
    return PartsSavePlanner().create_global_plan(plans)[0]


def _distinct(held: HeldParts) -> list[Part]:
    return list({part.offsets: part for part in reversed(held.parts)}.values())


def _chunk(part: Part) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(part.offsets), part.tensor.shape)


def _item(name: str, held: HeldParts, part: Part) -> planner.WriteItem:
    return planner.WriteItem(
        index=MetadataIndex(name, torch.Size(part.offsets)),
        type=planner.WriteItemType.SHARD,
        tensor_data=planner.TensorWriteData(
            chunk=_chunk(part), properties=TensorProperties(dtype=held.dtype), size=torch.Size(held.shape)
        ),
    )
