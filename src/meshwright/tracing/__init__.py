"""The traced grade of forecast: `build` on fake tensors in a fake world."""

from meshwright.tracing.step import trace_roles, trace_step

__all__ = ["trace_roles", "trace_step"]
