"""Find out by trying whether a job's loss is a sum over samples, which any cut of a batch leaves alone.

A contrastive loss is not, nor is one with statistics of the batch: it can be computed if the outputs of all samples are
brought together. A model whose outputs depend on which samples share a batch cannot be cut at all, and neither can one
that computes so in its backward pass: a hook that clips a gradient, `Embedding(scale_grad_by_freq=True)`. BatchNorm and
dropout are left out: the one is synchronised, and the other has rules of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from meshwright.describe.batch_layout import CannotCut, Layout, Rows, Shared, pairs_of, rebuilt
from meshwright.describe.dropout_off import NoDropout, switch_dropout_off
from meshwright.describe.learnt_layout import learn_layout
from meshwright.describe.observe import call_loss, call_model, make_batch
from meshwright.describe.samples import Cutter, own_random_numbers
from meshwright.describe.structure import map_tensors
from meshwright.facts.job import Job
from meshwright.torch_private.modules import BatchNorm

SMALL = 1 << 23  # parameters up to which a model is built and run to try
WHOLE, RANGES = 5, ((0, 2), (2, 3))
"""A batch, and how it is cut."""
NEAR = 1e-5
"""How far two sums of the same numbers may be apart, relative to their sizes, in fp32."""
NEAR_GRADIENTS = {torch.float64: (1e-4, 1e-6), torch.float32: (1e-2, 1e-4)}
"""The same for gradients by dtype, and how much of the largest of all: a gradient that cancels out is but rounding."""
Gradients = dict[str, torch.Tensor | None]


@dataclass(frozen=True)
class LossOver:
    """What the loss is of."""

    kind: str = "samples"
    """"samples": a sum over them; "batch": over the outputs of all of them; "model": the outputs already are;
    "backward": gradients are."""
    mixed: str = ""
    """What depends on which samples share a batch: for "model" a part of the output, for "backward" the gradient of a
    parameter."""


def find_loss_over(job: Job, parameters: int) -> LossOver:
    """What the job declares, or what a small model shows; a sum over samples where neither tells."""
    if job.loss_over is not None:
        return LossOver(job.loss_over)
    if parameters > SMALL or job.global_batch == 1:
        return LossOver()
    try:
        with own_random_numbers(0), torch.no_grad():
            return _try(job)
    except Exception:  # what does not run here is said where it must run
        return LossOver()


def _try(job: Job) -> LossOver:
    batch, cutter = make_batch(job, WHOLE), Cutter(job)
    try:
        pieces = cutter.cut(batch, RANGES)
    except CannotCut:
        return LossOver()
    model = job.model().train()
    found = _compare(job, model, batch, pieces)
    if found.kind == "samples":
        found = _compare_gradients(job, model, batch, pieces)
    if found.kind == "samples":
        return found
    try:  # perhaps it was rounding
        double: list[Any] = map_tensors(lambda t: t.double() if t.is_floating_point() else t, [batch, *pieces])
        compare = _compare_gradients if found.kind == "backward" else _compare
        return compare(job, model.double(), double[0], double[1:])
    except Exception:  # a model that does not run in float64
        return found


def _compare(job: Job, model: nn.Module, batch: Any, pieces: list[Any]) -> LossOver:
    with _without_batch_statistics(model), NoDropout():
        output, *outputs = [_seeded(job, model, part) for part in (batch, *pieces)]
        whole = _loss(job, output, batch)
        parts = [_loss(job, out, piece) for out, piece in zip(outputs, pieces, strict=True)]
        if _near(whole, parts[0] + parts[1], parts):
            return LossOver()
        if not _near(whole, _loss(job, _seeded(job, model, batch, seed=1), batch), parts):
            return LossOver()  # it draws numbers, or keeps something from pass to pass: nothing can be told
        sizes = [WHOLE, *(length for _, length in RANGES)]
        layout = learn_layout(list(zip(sizes, [output, *outputs], strict=True)), "output")
        if _near(whole, _loss_together(job, layout, outputs, batch), parts):
            return LossOver("batch")
    return LossOver("model", _mixed(layout, output, outputs))


def _compare_gradients(job: Job, model: nn.Module, batch: Any, pieces: list[Any]) -> LossOver:
    with _without_batch_statistics(model), NoDropout(), torch.enable_grad():
        whole, again = (_gradients(job, model, [batch], seed) for seed in (0, 1))
        parts = _gradients(job, model, pieces, 0)
    if _first_apart(whole, again):
        return LossOver()  # it draws numbers, or keeps something from pass to pass: nothing can be told
    mixed = _first_apart(whole, parts)
    return LossOver("backward", mixed) if mixed else LossOver()


def _gradients(job: Job, model: nn.Module, batches: list[Any], seed: int) -> Gradients:
    """Of the sum of the losses, as passes one after another add them up."""
    model.zero_grad()
    for batch in batches:
        total, _ = call_loss(job, _seeded(job, model, batch, seed), batch)
        total.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def _first_apart(one: Gradients, other: Gradients) -> str | None:
    """The first parameter whose gradients are not the same but for rounding."""
    sizes = {name: _size(one[name], other[name]) for name in one}
    dtypes = {grad.dtype for grad in one.values() if grad is not None}
    near, noise = NEAR_GRADIENTS[torch.float64 if dtypes == {torch.float64} else torch.float32]
    floor = noise * max(sizes.values(), default=0.0)
    for name, size in sizes.items():
        mine, its = one[name], other[name]
        if mine is not None and its is not None and _size(mine - its) > near * size + floor:
            return name
    return None


def _size(*gradients: torch.Tensor | None) -> float:
    return max((float(grad.abs().max()) for grad in gradients if grad is not None and grad.numel()), default=0.0)


def _loss_together(job: Job, layout: Layout, outputs: list[Any], batch: Any) -> torch.Tensor:
    """The loss of outputs that are joined; not a number where it cannot be computed."""
    try:
        return _loss(job, _joined(layout, outputs), batch)
    except Exception:
        return torch.tensor([float("nan")] * 2)


def _joined(layout: Layout, outputs: list[Any]) -> Any:
    columns = zip(*(pairs_of(layout, output) for output in outputs), strict=True)
    values = [_together(column[0][0], [value for _, value in column]) for column in columns]
    return rebuilt(layout, outputs[0], iter(values))


def _together(layout: Layout, values: list[Any]) -> Any:
    """What nobody can join is handed on as it is, for losses that do not read it."""
    return layout.joined(values) if isinstance(layout, Rows) else values[0]


def _mixed(layout: Layout, output: Any, outputs: list[Any]) -> str:
    """The first part of the output that is not made of its samples' parts."""
    columns = zip(pairs_of(layout, output), *(pairs_of(layout, out) for out in outputs), strict=True)
    for (inner, value), *others in columns:
        joined = _together(inner, [other for _, other in others])
        if not isinstance(inner, Rows | Shared) or not torch.allclose(joined, value, rtol=1e-4, atol=1e-6):
            return str(inner.path)
    return "output"


def _seeded(job: Job, model: nn.Module, batch: Any, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return call_model(job, model, batch)


def _loss(job: Job, output: Any, batch: Any) -> torch.Tensor:
    """Sum and weight."""
    total, weight = call_loss(job, output, batch)
    return torch.tensor([float(total), float(weight)], dtype=torch.float64)


def _near(one: torch.Tensor, other: torch.Tensor, parts: list[torch.Tensor]) -> bool:
    sizes = torch.stack([one, other, *parts]).abs().amax(0)
    return bool(((one - other).abs() <= NEAR * sizes).all())


@contextmanager
def _without_batch_statistics(model: nn.Module) -> Iterator[None]:
    norms = [module for module in model.modules() if isinstance(module, BatchNorm)]
    switch_dropout_off(model)
    for norm in norms:
        norm.eval()
    yield
