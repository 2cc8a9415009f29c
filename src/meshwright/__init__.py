"""Distributed PyTorch training: one job, one training loop and one checkpoint format for every parallel strategy.

run = mw.setup(job, "fsdp,bf16")
for batch in run.batches(steps=1000):
        result = run.step(batch)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from meshwright import strategies as _registers_strategies_and_axes  # noqa: F401
from meshwright.facts.cluster import Cluster
from meshwright.facts.evaluation import EarlyStop, Evaluation, Metric
from meshwright.facts.forecast import Forecast
from meshwright.facts.job import Job
from meshwright.facts.layout import Layout
from meshwright.facts.plan import Plan, Ranking
from meshwright.facts.strategy import Strategy
from meshwright.facts.timeline import Timeline
from meshwright.version import VERSION

if TYPE_CHECKING:
    from meshwright.api.notebook import layout, plan, timeline
    from meshwright.api.on_ranks import on_ranks
    from meshwright.api.setup import setup
    from meshwright.runtime.parallel_model import Parallel
    from meshwright.runtime.parallelize import parallelize
    from meshwright.runtime.run import Run

__version__ = VERSION
__all__ = [
    "Cluster",
    "EarlyStop",
    "Evaluation",
    "Forecast",
    "Job",
    "Layout",
    "Metric",
    "Parallel",
    "Plan",
    "Ranking",
    "Run",
    "Strategy",
    "Timeline",
    "layout",
    "on_ranks",
    "parallelize",
    "plan",
    "setup",
    "timeline",
]

_LATER = {
    "Parallel": "meshwright.runtime.parallel_model",
    "Run": "meshwright.runtime.run",
    "layout": "meshwright.api.notebook",
    "on_ranks": "meshwright.api.on_ranks",
    "parallelize": "meshwright.runtime.parallelize",
    "plan": "meshwright.api.notebook",
    "setup": "meshwright.api.setup",
    "timeline": "meshwright.api.notebook",
}


def __getattr__(name: str) -> Any:
    """Import what needs torch.distributed on first use, because a job file needs only `Job`."""
    if name not in _LATER:
        raise AttributeError(f"module 'meshwright' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_LATER[name]), name)
