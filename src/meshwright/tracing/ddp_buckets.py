"""DistributedDataParallel for fake tensors, with the same buckets and the same all-reduces.

PyTorch's reducer is C++ code that reads values of tensors, which fake tensors do not have.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from meshwright.torch_private.collectives import FIRST_BUCKET_BYTES, assign_buckets
from meshwright.torch_private.tensors import storage_id

MIB = 1 << 20


@dataclass(frozen=True)
class Bucket:
    """The part of PyTorch's `GradBucket` that our communication hooks read."""

    gradients: torch.Tensor

    def buffer(self) -> torch.Tensor:
        return self.gradients


class Buckets(nn.Module):
    """Gradients are views into buckets. The communication hook sums each bucket when backward has filled it."""

    def __init__(self, module: nn.Module, *, bucket_cap_mb: int = 25, **options: Any) -> None:
        super().__init__()
        self.module, self._synced = module, True
        parameters = [p for p in module.parameters() if p.requires_grad][::-1]  # the order of the backward pass
        metas = [torch.empty(p.shape, dtype=p.dtype, device="meta") for p in parameters]
        groups, _ = assign_buckets(metas, [FIRST_BUCKET_BYTES, bucket_cap_mb * MIB])
        for indices in groups:
            self._fill([parameters[index] for index in indices])

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def register_comm_hook(self, state: Any, hook: Any) -> None:
        self._state, self._sum = state, hook

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        self._synced = False
        try:
            yield
        finally:
            self._synced = True

    def _fill(self, parameters: list[nn.Parameter]) -> None:
        buffer = parameters[0].new_zeros(sum(p.numel() for p in parameters))
        waiting = set(range(len(parameters)))
        start = 0
        for index, parameter in enumerate(parameters):
            view = buffer[start : start + parameter.numel()].view(parameter.shape)
            start += parameter.numel()
            parameter.register_post_accumulate_grad_hook(self._hook(buffer, view, index, waiting, len(parameters)))

    def _hook(self, buffer: torch.Tensor, view: torch.Tensor, index: int, waiting: set[int], count: int) -> Any:
        @torch.no_grad()
        def gradient_is_there(parameter: torch.Tensor) -> None:
            if parameter.grad is not None and _storage(parameter.grad) != _storage(buffer):
                view.copy_(parameter.grad)
                parameter.grad = view
            waiting.discard(index)
            if self._synced and not waiting:
                self._sum(self._state, Bucket(buffer))
            if not waiting:
                waiting.update(range(count))

        return gradient_is_there


def _storage(tensor: torch.Tensor) -> int:
    return storage_id(tensor.untyped_storage())
