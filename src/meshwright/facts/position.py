"""Where a run continues in its data, independent of ranks and workers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class DataPosition:
    """A place between two samples of a run."""

    samples: int = 0
    """Samples passed, counted through all epochs."""
    epoch: int | None = None
    """The current epoch; None if only `samples` is known, from which it follows in data of known length."""
    within: int = 0
    """Items of the current epoch that were passed: samples, or batches if the data consist of whole batches."""
    digest: int | None = None
    """A checksum of the items passed in this epoch; None if their order follows from the seed alone."""
    state: Mapping[str, Any] | None = None
    """The dataset's own `state_dict()` at this place, if it continues at the exact next sample."""
