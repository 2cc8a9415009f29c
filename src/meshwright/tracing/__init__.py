"""Forecasts from a trace: one training step on fake tensors in a fake world. Also the costs that the planner uses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from meshwright.tracing.step import trace_roles, trace_step

__all__ = ["trace_roles", "trace_step"]


def __getattr__(name: str) -> Any:
    """Import what a traced step needs on first use: callers that need only costs skip most of it."""
    if name not in __all__:
        raise AttributeError(f"module 'meshwright.tracing' has no attribute {name!r}")
    from meshwright.tracing import step

    return getattr(step, name)
