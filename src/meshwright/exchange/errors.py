"""The error of a file that other frameworks read or wrote."""

from __future__ import annotations

from meshwright.errors import BadInput


class ExchangeError(BadInput):
    """A config that cannot be read, contradicts itself, or cannot be written for what was asked."""
