"""The result of reading another framework's config."""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.facts.strategy import Strategy


@dataclass(frozen=True, kw_only=True)
class Imported:
    """A strategy read from another framework's config."""

    strategy: Strategy
    """Has the sizes that the file sets."""
    origin: str
    """The framework: deepspeed, accelerate or torchtitan."""
    file: str
    ignored: tuple[str, ...] = ()
    """Names of settings without an equal here; some with what was used instead."""
    global_batch: int | None = None
    """Samples per optimizer step, if the file sets it."""
    max_norm: float | None = None
    """Gradient clipping norm, if the file sets it."""
