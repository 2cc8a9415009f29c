"""The error for configs of other frameworks."""

from __future__ import annotations

from meshwright.errors import BadInput


class ExchangeError(BadInput):
    """A config that cannot be read, contradicts itself, or cannot express the strategy."""
