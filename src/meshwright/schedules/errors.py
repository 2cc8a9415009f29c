"""The error for an invalid schedule."""

from __future__ import annotations

from meshwright.errors import BadInput


class ScheduleError(BadInput):
    """A schedule that cannot be parsed, misses an action, or deadlocks."""
