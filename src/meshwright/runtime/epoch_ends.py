"""Say of each batch whether an epoch ends with it."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from dataclasses import replace

from meshwright.assemble.batch import Batch
from meshwright.facts.position import DataPosition

Placed = tuple[Batch, DataPosition]
"""A batch and the position after it."""


def with_ends(batches: Iterator[Placed], ends: Callable[[Batch, DataPosition], bool] | None) -> Generator[Placed]:
    """Set `ends_epoch` of batches. If nobody knows it beforehand (`ends` is None), the next batch tells.

    An error while looking at the next batch is raised when that one is asked for.
    """
    if ends is not None:
        for batch, after in batches:
            yield _marked(batch, after, ends=ends(batch, after))
        return
    held: Placed | None = None
    while True:
        try:
            found = next(batches, None)
        except Exception:
            if held is not None:
                yield held
            raise
        if held is not None:
            yield _marked(*held, ends=found is None or found[0].epoch != held[0].epoch)
        if found is None:
            return
        held = found


def _marked(batch: Batch, after: DataPosition, *, ends: bool) -> Placed:
    return replace(batch, ends_epoch=(batch.epoch or 0) + 1) if ends else batch, after
