"""Find what a loss over the whole batch needs: the layout of the model's output, and what it reads of the batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from meshwright.describe.batch_layout import Layout, pairs_of
from meshwright.describe.learnt_layout import learn_layout
from meshwright.describe.observe import call_loss, see_output
from meshwright.describe.samples import BatchSource
from meshwright.describe.structure import tensors_of
from meshwright.errors import Refused
from meshwright.facts.job import Job
from meshwright.recording.blueprint import record
from meshwright.recording.report_as_cpu import tensors_in
from meshwright.torch_private.modes import TorchDispatchMode

SIZES = (2, 3, 5)


@dataclass(frozen=True)
class WholeLoss:
    """What must be gathered from ranks and micro-batches."""

    outputs: Layout
    batch: Layout
    reads: tuple[bool, ...]
    """For each value of a batch, whether the loss reads it."""


def inspect_whole_loss(job: Job, source: BatchSource) -> WholeLoss:
    """Run model and loss on batches of a few sizes, without values if possible."""
    blueprint = record(job.model, seed=0)
    draws, reads = [], []

    def look(output: Any, batch: Any) -> tuple[Any, list[bool]]:
        return output, _reads(job, source.layout, output, batch)

    for samples in SIZES:
        seen = see_output(job, blueprint, source.draw(samples), look)
        if seen is None:
            raise Refused(
                "The loss is over the whole batch, so the samples must be found in the model's output, but the model "
                'does not run without its weights; use one rank without mb, or Job(loss_over="samples").'
            )
        draws.append((samples, seen[0]))
        reads.append(seen[1])
    return WholeLoss(
        learn_layout(draws, "output"), source.layout, tuple(any(column) for column in zip(*reads, strict=True))
    )


def _reads(job: Job, layout: Layout, output: Any, batch: Any) -> list[bool]:
    """For each value of the batch, whether the loss reads one of its tensors, or it has none."""
    with _LossReads() as seen:
        call_loss(job, output, batch)
    held = [tensors_of(value) for _, value in pairs_of(layout, batch)]
    return [not tensors or any(id(tensor) in seen.found for tensor in tensors) for tensors in held]


class _LossReads(TorchDispatchMode):
    """Remembers every tensor that is an argument of an operator."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found |= {id(tensor): tensor for tensor in tensors_in((args, kwargs))}
        return func(*args, **(kwargs or {}))
