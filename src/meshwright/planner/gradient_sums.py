"""Seconds of summing gradients over the data axis, and how much of that backward does not hide."""

from __future__ import annotations

from dataclasses import replace

from meshwright.planner.site import Site
from meshwright.planner.stage_work import StageWork
from meshwright.planner.step_layout import BUCKET, FIRST_BUCKET


def gradient_sum(site: Site, elements: int, inside: int = 0) -> float:
    """Seconds of reducing gradients to the ranks that update them; `inside` of them are summed over fewer ranks."""
    layout = site.step_layout
    size = (elements - inside) * layout.reduce_bytes
    if inside:
        kind = "reduce_scatter" if layout.optimizer_over > 1 or layout.gradients_over > 1 else "all_reduce"
        return gradient_sum(site, elements - inside) + site.time(kind, inside * layout.reduce_bytes, site.inside)
    if layout.optimizer_over > 1 or layout.gradients_over > 1:
        across = site.time("all_reduce", size / layout.shards, site.replica)
        return site.time("reduce_scatter", size, site.shard) + across
    return site.time("all_reduce", size, site.data)


def summed_in_buckets(site: Site, elements: int) -> float:
    """Seconds of DDP's buckets in a pipeline of another engine, each a ring.

    Beside messages between stages, buckets take as long as rings even where trees would be faster (published sweep on
    H100 nodes, pipelines without ZeRO on 16 and 32 nodes: 6 ms a bucket over 64 ranks, 12 to 14 over 128).
    """
    layout = site.step_layout
    size = BUCKET * layout.reduce_bytes / layout.compute_bytes
    count = max(1.0, elements * layout.reduce_bytes / size)
    return count * site.collective("ring_all_reduce", size, site.data)


def exposed_sums(site: Site, stage: StageWork, backward: float) -> float:
    """Seconds that backward, and the step after it, wait for gradients that are reduced while it runs."""
    layout = site.step_layout
    if layout.optimizer_over == 1:
        # DDP: the first gradients are ready after the last unit's backward, the last bucket after all of it.
        first, most = (round(size / layout.gradient_bytes) for size in (FIRST_BUCKET, BUCKET))
        last = min(most, max(stage.trainable - first, min(first, stage.trainable)))
        exposed = max(_on_the_wire(site, last), _on_the_wire(site, stage.trainable) - backward)
    else:
        exposed = _one_at_a_time(site, stage, backward)
    return exposed + _processor_seconds(site, stage.trainable)


def _one_at_a_time(site: Site, stage: StageWork, backward: float) -> float:
    """ZeRO's buckets: a shard unit's when it is done, and the rest at the end. Each waits for the one before."""
    pace = backward / max(sum(unit.backward for unit in stage.units), 1e-12)
    done = link = 0.0
    around = stage.trainable
    for unit in reversed(stage.units):
        done += unit.backward * pace
        if ready := min(unit.trainable, unit.in_units):
            done = max(done, link)
            link = done + _on_the_wire(site, ready)
            around -= ready
    return max(done, link) + _on_the_wire(site, max(0, around)) - backward


def _on_the_wire(site: Site, elements: int) -> float:
    """Seconds of reducing gradients that computing can hide."""
    return gradient_sum(site, elements) - _processor_seconds(site, elements)


def _processor_seconds(site: Site, elements: int) -> float:
    """Seconds of reducing gradients that no computing hides: on a CPU, gloo's copies and sums take the same cores.

    They are what the collective takes within a node, where no wire is slower than them.
    """
    if not site.is_cpu:
        return 0.0
    whole = gradient_sum(site, elements)
    return min(whole, gradient_sum(replace(site, per_node=site.step_layout.ranks), elements))
