"""Real tensors that take part in a recording, guarded against later changes.

Small ones are copied at once. A large one may be a memory-mapped file, so only a reference is kept. It is copied before
an operator changes it in place. Changes made without an operator (by numpy, by another thread) are detected by its
version and by a sample of its content.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from meshwright.recording.report_as_cpu import META
from meshwright.torch_private.modes import outside_of_modes
from meshwright.torch_private.tensors import storage_id, version_of

SMALL = 1 << 16
"""The largest constant, in bytes, that is copied."""
SAMPLED = 8
"""Elements that are sampled at each of three places. More places would read more pages of a memory-mapped file."""


def sample(tensor: torch.Tensor) -> list[float | int | bool | complex]:
    """A few elements from the start, the middle and the end of a tensor."""
    count = tensor.numel()
    starts = (0, max(0, count // 2 - SAMPLED // 2), max(0, count - SAMPLED))
    places = [place for start in starts for place in range(start, min(count, start + SAMPLED))]
    if not places:
        return []
    whole = torch.tensor(places, device=tensor.device)
    indices = []
    for size in reversed(tensor.shape):
        indices.append(whole % size)
        whole = whole // size
    chosen: torch.Tensor = tensor.detach()[tuple(reversed(indices))] if indices else tensor.detach().reshape(1)
    return chosen.tolist()


@dataclass(frozen=True)
class _ConstantGuard:
    """What a constant looked like when it was first used."""

    tensor: torch.Tensor
    version: int
    content: str

    def is_stale(self) -> bool:
        return version_of(self.tensor) != self.version or str(sample(self.tensor)) != self.content


class Constants:
    """Storages of real tensors, each with a meta storage that represents it in the recording."""

    def __init__(self) -> None:
        self.storages: dict[int, torch.UntypedStorage] = {}
        """By the identity of the meta storages."""
        self._stand_ins: dict[int, torch.UntypedStorage] = {}  # by the identity of the real ones
        self._guards: dict[int, _ConstantGuard] = {}
        self._alive: list[torch.UntypedStorage] = []  # keeps storages alive, so that no id is reused

    def stand_in(self, tensor: torch.Tensor) -> torch.Tensor:
        """A meta tensor with the layout of a real one."""
        storage = tensor.untyped_storage()
        with outside_of_modes(), torch.no_grad():
            if not self._is_known(storage):
                self._add(tensor.detach(), storage)
            meta = self._stand_ins[storage_id(storage)]
            empty = torch.empty(0, dtype=tensor.dtype, device=META)
            return empty.set_(meta, tensor.storage_offset(), tensor.size(), tensor.stride())

    def before_change(self, tensor: torch.Tensor) -> None:
        """Copy a real tensor for what was recorded so far, before an operator changes it in place."""
        storage = tensor.untyped_storage()
        meta = self._stand_ins.pop(storage_id(storage), None)
        if meta is not None and storage_id(self.storages[storage_id(meta)]) == storage_id(storage):
            with outside_of_modes():
                self.storages[storage_id(meta)] = storage.clone()
            self._guards.pop(storage_id(meta))

    def stale(self) -> bool:
        """Whether any constant was changed without the recording seeing it."""
        return any(guard.is_stale() for guard in self._guards.values())

    def release(self) -> None:
        self.storages, self._stand_ins, self._guards, self._alive = {}, {}, {}, []

    def _is_known(self, storage: torch.UntypedStorage) -> bool:
        """Whether a storage has a valid stand-in. A small storage may have changed since it was copied."""
        meta = self._stand_ins.get(storage_id(storage))
        if meta is None or storage_id(meta) in self._guards:
            return meta is not None
        return bool(self.storages[storage_id(meta)].tolist() == storage.tolist())

    def _add(self, tensor: torch.Tensor, storage: torch.UntypedStorage) -> None:
        meta = torch.UntypedStorage(storage.nbytes(), device=META)
        self._stand_ins[storage_id(storage)] = meta
        self._alive += [storage, meta]
        if storage.nbytes() <= SMALL:
            self.storages[storage_id(meta)] = storage.clone()
        else:
            self.storages[storage_id(meta)] = storage
            self._guards[storage_id(meta)] = _ConstantGuard(tensor, version_of(tensor), str(sample(tensor)))
