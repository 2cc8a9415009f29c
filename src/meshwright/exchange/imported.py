"""What was read from somebody else's file."""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.facts.strategy import Strategy


@dataclass(frozen=True, kw_only=True)
class Imported:
    """A strategy that another framework's config describes."""

    strategy: Strategy
    """With sizes as far as the file names them."""
    origin: str
    """Whose file it is: deepspeed, accelerate or torchtitan."""
    file: str
    ignored: tuple[str, ...] = ()
    """Settings that have no equal here, by name; some with what was taken instead."""
    global_batch: int | None = None
    """Samples of one optimizer step, where the file says so."""
    max_norm: float | None = None
    """What gradients are clipped to, where the file says so."""
