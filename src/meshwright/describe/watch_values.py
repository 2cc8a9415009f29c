"""Note reads of values and changes of buffers while a `Watcher` follows a model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from meshwright.describe.calls import GLUE, Inside
from meshwright.describe.flow import Watcher

MEMORY_READS = {Tensor.tolist, Tensor.numpy, Tensor.__array__}
"""Functions that read a tensor's memory without an operator."""


@contextmanager
def following(watcher: Watcher, batch: Iterable[Tensor]) -> Iterator[None]:
    """Also follow what is computed from the batch, and note who reads its values."""
    watcher.mark_batch(batch)
    with _BufferReads(watcher):
        yield


class _BufferReads(TorchFunctionMode):
    def __init__(self, watcher: Watcher) -> None:
        super().__init__()
        self._watcher = watcher

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in MEMORY_READS:
            self._watcher.look_at(args[0])
        return func(*args, **(kwargs or {}))


def moved_buffers(watcher: Watcher, model: nn.Module, given: Mapping[str, Tensor]) -> dict[str, frozenset[int]]:
    """The changed buffers of the model by name, each with the calls that changed it, or `GLUE`."""
    found = {}
    for name, buffer in model.named_buffers():
        before = given.get(name)
        movers = watcher.writers(before) if before is not None else frozenset[int]()
        if before is not None and buffer is not before:
            inside = {source.call for source in watcher.sources(buffer) if isinstance(source, Inside)}
            movers |= frozenset(inside or {GLUE})
        if movers:
            found[name] = movers
    return found
