"""The traced grade of forecast: `build` on fake tensors in a fake world; and costs, which the other counts with."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from meshwright.tracing.step import trace_roles, trace_step

__all__ = ["trace_roles", "trace_step"]


def __getattr__(name: str) -> Any:
    """All that a step needs is imported when one is first traced; who asks for costs needs little of it."""
    if name not in __all__:
        raise AttributeError(f"module 'meshwright.tracing' has no attribute {name!r}")
    from meshwright.tracing import step

    return getattr(step, name)
