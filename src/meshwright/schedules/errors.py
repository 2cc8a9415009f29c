"""The error of a schedule that was written wrong."""

from __future__ import annotations

from meshwright.errors import BadInput


class ScheduleError(BadInput):
    """A schedule that cannot be read, lacks an action, or waits for itself."""
