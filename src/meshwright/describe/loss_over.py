"""Find out by experiment whether a job's loss is a sum over samples, so that a batch may be cut anywhere.

A contrastive loss is not, nor is one with batch statistics: it needs the outputs of all samples together, so the layout
of the outputs and what the loss reads of the batch are found, too. A model whose outputs depend on which samples share
a batch cannot be cut at all. Neither can one whose gradients do: with a hook that clips a gradient, or
`Embedding(scale_grad_by_freq=True)`. BatchNorm and dropout are switched off here: BatchNorm is synchronised, and
dropout has separate rules.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from meshwright.describe.batch_layout import CannotCut, Layout, Rows, Shared, pairs_of, rebuilt
from meshwright.describe.dropout import NoDropout, switch_dropout_off
from meshwright.describe.learnt_layout import learn_layout
from meshwright.describe.loss_form import SkippedTargets, find_form
from meshwright.describe.observe import call_loss, call_model, make_batch, see_output
from meshwright.describe.samples import BatchSource, Cutter, own_random_numbers
from meshwright.describe.structure import map_tensors, tensors_of
from meshwright.errors import Refused
from meshwright.facts.job import Job
from meshwright.recording.blueprint import record
from meshwright.recording.report_as_cpu import tensors_in
from meshwright.recording.seeding import seed_torch
from meshwright.recording.wrap_forward import removing
from meshwright.torch_private.modes import TorchDispatchMode
from meshwright.torch_private.modules import BatchNorm

SMALL = 1 << 23  # the largest model, in parameters, that is built and run for this
WHOLE, RANGES = 5, ((0, 2), (2, 3))
"""The size of the batch, and the ranges (first, length) it is cut into."""
SIZES = (2, 3, 5)
"""Sizes of the batches that show the layout of the outputs."""
NEAR = 1e-5
"""Relative tolerance for two sums of the same numbers in fp32."""
NEAR_GRADIENTS = {torch.float64: (1e-4, 1e-6), torch.float32: (1e-2, 1e-4)}
"""By dtype, the tolerance for gradients relative to their own size and to the largest: one that cancels is noise."""
Gradients = dict[str, torch.Tensor | None]


@dataclass(frozen=True)
class LossOver:
    """What depends on which samples share a batch."""

    kind: str = "samples"
    """"samples": nothing, the loss is a sum over samples; "batch": the loss; "model": the model's outputs;
    "backward": the gradients."""
    mixed: str = ""
    """The part of the output ("model") or the parameter ("backward") that depends on it."""
    module: str | None = None
    """For "model", the first module whose output depends on it, if it was found."""
    form: str = ""
    """What is wrong with the loss's sum or weight, a key of `LOSS_FORMS`."""


def find_loss_over(job: Job, parameters: int) -> LossOver:
    """What the job declares, or what an experiment on a small model shows; "samples" if neither is available."""
    if job.loss_over is not None:
        return LossOver(job.loss_over)
    if parameters > SMALL or job.global_batch == 1:
        return LossOver()
    try:
        with own_random_numbers(0), _without_denormals(), torch.no_grad():
            return _try(job)
    except Exception:  # if the job does not run, `observe` reports it
        return LossOver()


@contextmanager
def _without_denormals() -> Iterator[None]:
    """Count numbers that are too small to be normal as zero: they are 25 times as slow.

    A new model whose BatchNorms are off has many, since its values shrink from layer to layer.
    """
    were_kept = bool(torch.tensor(torch.finfo(torch.float32).tiny) / 2 > 0)
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(not were_kept)


def _try(job: Job) -> LossOver:
    batch, cutter = make_batch(job, WHOLE), Cutter(job)
    try:
        pieces = cutter.cut(batch, RANGES)
    except CannotCut:
        return LossOver()
    model = job.model().train()
    found = _compare(job, model, batch, pieces)
    if found.kind == "samples":
        found = replace(_compare_gradients(job, model, batch, pieces), form=found.form)
    if found.kind == "samples":
        return found
    try:  # in float64, in case the difference was rounding
        double: list[Any] = map_tensors(lambda t: t.double() if t.is_floating_point() else t, [batch, *pieces])
        compare = _compare_gradients if found.kind == "backward" else _compare
        return compare(job, model.double(), double[0], double[1:])
    except Exception:  # a model that does not run in float64
        return found


def _compare(job: Job, model: nn.Module, batch: Any, pieces: list[Any]) -> LossOver:
    _freeze_statistics(model)
    with NoDropout():
        output, *outputs = [_seeded(job, model, part) for part in (batch, *pieces)]
        with SkippedTargets() as skipped:
            whole = _loss(job, output, batch)
        parts = [_loss(job, out, piece) for out, piece in zip(outputs, pieces, strict=True)]
        additive = _near(whole, parts[0] + parts[1], parts)
        form = find_form(whole, parts, [length for _, length in RANGES], skipped, additive)
        if additive:
            return LossOver("batch" if _chooses_samples(job, model, batch, output, whole) else "samples", form=form)
        if not _near(whole, _loss(job, _seeded(job, model, batch, seed=1), batch), parts):
            return LossOver()  # random numbers, or state kept between passes: the comparison means nothing
        sizes = [WHOLE, *(length for _, length in RANGES)]
        layout = learn_layout(list(zip(sizes, [output, *outputs], strict=True)), "output")
        if _near(whole, _loss_together(job, layout, outputs, batch), parts):
            return LossOver("batch", form=form)
        module = _mixing_module(job, model, batch, pieces[0])
    return LossOver("model", _mixed(layout, output, outputs), module)


def _chooses_samples(job: Job, model: nn.Module, batch: Any, output: Any, whole: torch.Tensor) -> bool:
    """Whether the loss of the batch is not that of its single samples.

    A loss of the hardest half may by chance choose the same samples in both parts. A model whose branches depend on the
    batch is not meant: the outputs of single samples must give the loss of the batch.
    """
    try:
        pieces = Cutter(job).cut(batch, tuple((first, 1) for first in range(WHOLE)))
        outputs = [_seeded(job, model, piece) for piece in pieces]
        parts = [_loss(job, out, piece) for out, piece in zip(outputs, pieces, strict=True)]
        if not torch.stack(parts).isfinite().all() or _near(whole, torch.stack(parts).sum(0), parts):
            return False
        layout = learn_layout(list(zip([WHOLE, *[1] * WHOLE], [output, *outputs], strict=True)), "output")
    except Exception:  # the model or the loss cannot take one sample
        return False
    return _near(whole, _loss_together(job, layout, outputs, batch), parts)


def _mixing_module(job: Job, model: nn.Module, batch: Any, piece: Any) -> str | None:
    """The first module that makes the first samples depend on the others; None if none was found.

    Its inputs do not depend on them, and its outputs do.
    """
    together, alone = (_module_calls(job, model, data) for data in (batch, piece))
    for (name, *many), (other, *few) in zip(together, alone, strict=False):
        if name != other:
            return None  # which module is called depends on the samples
        inputs, outputs = (_is_mixed(*pair) for pair in zip(many, few, strict=True))
        if outputs and not inputs:
            return name
    return None


def _is_mixed(many: list[torch.Tensor], few: list[torch.Tensor]) -> bool:
    """Whether the first samples of a larger batch have other values than in the smaller one."""
    for one, part in zip(many, few, strict=False):
        rows = len(part) if part.dim() else 0
        comparable = rows and one.shape[1:] == part.shape[1:] and len(one) > rows
        if comparable and not torch.allclose(one[:rows], part, rtol=1e-4, atol=1e-6):
            return True
    return False


_Tensors = list[torch.Tensor]


def _module_calls(job: Job, model: nn.Module, batch: Any) -> list[tuple[str, _Tensors, _Tensors]]:
    """Inputs and outputs of each module, in the order in which the modules finished."""
    found: list[tuple[str, _Tensors, _Tensors]] = []
    given: list[_Tensors] = []

    def begin(module: nn.Module, args: Any, kwargs: Any) -> None:
        given.append(_kept((args, kwargs)))

    def end(module: nn.Module, args: Any, output: Any, *, name: str) -> None:
        found.append((name, given.pop(), _kept(output)))

    hooks = [module.register_forward_pre_hook(begin, with_kwargs=True) for module in model.modules()]
    hooks += [module.register_forward_hook(partial(end, name=name)) for name, module in model.named_modules()]
    with removing(hooks):
        _seeded(job, model, batch)
    return found


def _kept(tree: Any) -> _Tensors:
    return [t.detach().clone() for t in tensors_of(tree) if t.is_floating_point()]


def _compare_gradients(job: Job, model: nn.Module, batch: Any, pieces: list[Any]) -> LossOver:
    _freeze_statistics(model)
    with NoDropout(), torch.enable_grad():
        whole, parts = (_gradients(job, model, batches, 0) for batches in ([batch], pieces))
        mixed = _first_apart(whole, parts)
        if mixed is None:
            return LossOver()
        again = _gradients(job, model, [batch], 1)
    # If they differ as well, there are random numbers, or state kept between passes: the comparison means nothing.
    return LossOver() if _first_apart(whole, again) else LossOver("backward", mixed)


def _gradients(job: Job, model: nn.Module, batches: list[Any], seed: int) -> Gradients:
    """Gradients of the sum of the losses, accumulated over the batches."""
    model.zero_grad()
    for batch in batches:
        total, _ = call_loss(job, _seeded(job, model, batch, seed), batch)
        total.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def _first_apart(one: Gradients, other: Gradients) -> str | None:
    """The first parameter whose gradients differ by more than rounding."""
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
    """The loss of the joined outputs; NaN if it cannot be computed."""
    try:
        columns = zip(*(pairs_of(layout, output) for output in outputs), strict=True)
        values = [_together(column[0][0], [value for _, value in column]) for column in columns]
        return _loss(job, rebuilt(layout, outputs[0], iter(values)), batch)
    except Exception:
        return torch.tensor([float("nan")] * 2)


def _together(layout: Layout, values: list[Any]) -> Any:
    """The joined values, or the first one if they cannot be joined: the loss may not read it."""
    return layout.joined(values) if isinstance(layout, Rows) else values[0]


def _mixed(layout: Layout, output: Any, outputs: list[Any]) -> str:
    """The first part of the output that differs from the joined parts of its samples."""
    columns = zip(pairs_of(layout, output), *(pairs_of(layout, out) for out in outputs), strict=True)
    for (inner, value), *others in columns:
        joined = _together(inner, [other for _, other in others])
        if not isinstance(inner, Rows | Shared) or not torch.allclose(joined, value, rtol=1e-4, atol=1e-6):
            return str(inner.path)
    return "output"


def _seeded(job: Job, model: nn.Module, batch: Any, seed: int = 0) -> Any:
    seed_torch(seed)
    return call_model(job, model, batch)


def _loss(job: Job, output: Any, batch: Any) -> torch.Tensor:
    """The loss's sum and weight."""
    total, weight = call_loss(job, output, batch)
    return torch.tensor([float(total), float(weight)], dtype=torch.float64)


def _near(one: torch.Tensor, other: torch.Tensor, parts: list[torch.Tensor]) -> bool:
    sizes = torch.stack([one, other, *parts]).abs().amax(0)
    return bool(((one - other).abs() <= NEAR * sizes).all())


def _freeze_statistics(model: nn.Module) -> None:
    """Put BatchNorms into eval mode, and switch dropout modules off."""
    switch_dropout_off(model)
    for module in model.modules():
        if isinstance(module, BatchNorm):
            module.eval()


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
