"""Run a job's model without weights: one step on fake tensors, or on real ones where the model looks at values."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from math import isclose
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils.data import default_collate

from meshwright.describe.calls import Flow
from meshwright.describe.flow import Watcher
from meshwright.describe.ladder import climb, is_small, on_fake, on_real
from meshwright.describe.parameter_reads import Reads
from meshwright.describe.pass_cache import PassCache
from meshwright.describe.repeats import PassObserver
from meshwright.describe.stand_ins import has_no_values, lend, stand_ins
from meshwright.describe.structure import tensors_of
from meshwright.describe.template import watch_calls
from meshwright.describe.watch_values import following, moved_buffers
from meshwright.errors import JobError, one_line
from meshwright.facts.job import Job
from meshwright.recording.blueprint import Blueprint
from meshwright.torch_private.fake_tensors import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)

SAMPLES = 2  # enough for BatchNorm to have a variance
Result = TypeVar("Result")


@dataclass(frozen=True)
class Observed:
    """What one step showed."""

    used: frozenset[str]
    called: frozenset[str]
    weight_per_sample: float | None
    read_elsewhere: frozenset[str] = frozenset()
    """Parameters that are read, or asked for their shape, while none of the modules that hold them runs."""
    by_value: bool = False
    """Whether the step would not run on fake tensors, which have no values to look at."""


def make_batch(job: Job, samples: int) -> Any:
    """A batch of made-up samples, or the first of the data where the job makes up none."""
    try:
        if job.sample is not None:
            return job.sample(samples)
        dataset = job.dataset()
        return (job.collate or default_collate)([dataset[index] for index in range(samples)])
    except JobError:
        raise
    except Exception as error:
        source = "sample" if job.sample is not None else "data"
        raise JobError(f"Job({source}=...) raised {one_line(error)}") from error


def call_model(job: Job, model: Any, batch: Any) -> Any:
    """The model's output on what the job makes of a batch."""
    inputs = job.inputs(batch)
    if isinstance(inputs, dict):
        return model(**inputs)
    if isinstance(inputs, tuple | list):
        return model(*inputs)
    raise JobError(
        f"Job(inputs=...) must give a tuple of positional or a dict of keyword arguments, not {_kind(inputs)}; "
        'write `lambda batch: (batch["x"],)`.'
    )


def call_loss(job: Job, output: Any, batch: Any) -> tuple[torch.Tensor, float | torch.Tensor]:
    """The loss's sum and weight, checked."""
    result = job.loss(output, batch)
    if not isinstance(result, tuple) or len(result) != 2 or not isinstance(result[0], torch.Tensor):
        raise JobError(
            f"Job(loss=...) must give (sum, weight), but it gave {_kind(result)}; "
            "for a mean over samples, return the sum and the number of samples."
        )
    total, weight = result
    if total.numel() != 1:
        raise JobError(f"Job(loss=...) must give one number as its sum, but it has shape {tuple(total.shape)}.")
    if not isinstance(weight, int | float | torch.Tensor):
        raise JobError(f"Job(loss=...) must give a number or a tensor as its weight, but it gave {_kind(weight)}.")
    return total.reshape(()), weight


def _kind(value: Any) -> str:
    return "Tensor" if torch.is_tensor(value) else type(value).__name__


def observe(
    job: Job,
    blueprint: Blueprint,
    watch: AbstractContextManager[Any] | None = None,
    *,
    pass_cache: PassCache | None = None,
) -> tuple[Observed | None, str]:
    """One step on fake tensors; on real ones where the model looks at values and is small; else the reason why not.

    `watch` is active meanwhile, closer to the model than the fake tensors are.
    """
    batch = make_batch(job, SAMPLES)
    return _run(blueprint, batch, partial(_step, job, blueprint, watch), pass_cache)


def trace(
    job: Job,
    blueprint: Blueprint,
    watcher: Watcher,
    batch: Any = None,
    *,
    pass_cache: PassCache | None = None,
    follower: PassObserver | None = None,
) -> tuple[Flow | None, str]:
    """The flow of one forward pass and loss between the modules that `watcher` watches, as `observe` sees it."""
    batch = make_batch(job, SAMPLES) if batch is None else batch

    def run(data: Any, under: PassCache | None) -> Flow:
        watcher.forget()
        tensors = under.stand_ins(blueprint) if under else stand_ins(blueprint)
        parameters = {name: tensors[name] for name, _ in blueprint.model.named_parameters()}
        short = under.repeats.running(watcher, follower) if under else following(watcher, tensors_of(data))
        with watcher.watching(blueprint.model, parameters), lend(blueprint.model, tensors), short:
            output = call_model(job, blueprint.model, data)
            watcher.in_loss = True
            total, _ = call_loss(job, output, data)
            moved = moved_buffers(watcher, blueprint.model, tensors)
        changes_batch = any(watcher.writers(tensor) for tensor in tensors_of(data))
        return replace(watcher.flow(total, output), moved=moved, changes_batch=changes_batch)

    return _run(blueprint, batch, run, pass_cache)


def forward_passes(job: Job, blueprint: Blueprint, *watches: AbstractContextManager[Any]) -> bool:
    """Forward passes one after another from the same stand-ins, each under a watch; False where none can be run."""

    def run(data: Any, under: PassCache | None) -> bool:
        with lend(blueprint.model, stand_ins(blueprint)):
            for watch in watches:
                with watch:
                    _forward(job, blueprint.model, data)
        return True

    return bool(_run(blueprint, make_batch(job, SAMPLES), run, None)[0])


def forward_on_real_tensors(
    job: Job, blueprint: Blueprint, batch: Any, watch: AbstractContextManager[Any], *, seed: int = 0
) -> None:
    """One forward pass on made-up weights that are always the same; `seed` is for what else is drawn."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        tensors = stand_ins(blueprint)
        torch.manual_seed(seed)
        with lend(blueprint.model, tensors), watch:
            _forward(job, blueprint.model, batch)


def see_output(job: Job, blueprint: Blueprint, batch: Any, look: Callable[[Any, Any], Result]) -> Result | None:
    """What `look` makes of the model's output and the batch, without values if that can be; None if nothing ran."""

    def run(data: Any, under: PassCache | None) -> Result:
        with lend(blueprint.model, stand_ins(blueprint)):
            return look(call_model(job, blueprint.model, data), data)

    return _run(blueprint, batch, run, None)[0]


def _run(
    blueprint: Blueprint, batch: Any, run: Callable[[Any, PassCache | None], Result], pass_cache: PassCache | None
) -> tuple[Result | None, str]:
    """What `run` gives without values, or with them where the model is small, or the reason why neither can be."""
    model = blueprint.model
    if pass_cache is not None:
        # Whatever goes wrong where blocks are left out is looked at again with all of them.
        with suppress(Exception):
            return climb(model, batch, lambda data: run(data, pass_cache), *pass_cache.rungs), ""
    try:
        return climb(model, batch, lambda data: run(data, None), on_fake), ""
    except JobError:
        raise
    except Exception as error:
        # Also where nothing looks at values: some fake kernels refuse what the real ones take.
        if not is_small(model):
            if _depends_on_data(error):
                return None, one_line(error).removesuffix(".")
            raise _misfit(error) from error
    try:
        return climb(model, batch, lambda data: run(data, None), on_real), ""
    except JobError:
        raise
    except Exception as error:
        raise _misfit(error) from error


def _depends_on_data(error: Exception) -> bool:
    """Whether a step on fake tensors raised it because the model looks at values, which fake tensors do not have."""
    from meshwright.torch_private import symbolic_shapes  # it brings a computer algebra along

    return isinstance(
        error,
        DataDependentOutputException
        | DynamicOutputShapeException
        | symbolic_shapes.GuardOnDataDependentSymNode
        | UnsupportedFakeTensorException
        | UnsupportedOperatorException,
    )


def _misfit(error: Exception) -> JobError:
    return JobError(
        f"The job's sample, inputs, model and loss do not fit each other: {one_line(error)} "
        "Check that model(*inputs(sample(2))) runs and that loss takes its output."
    )


def _gradients(total: torch.Tensor, leaves: dict[str, torch.Tensor]) -> list[torch.Tensor | None]:
    """Not by `autograd.grad`: an author's `checkpoint(..., use_reentrant=True)` works with `backward` only."""
    total.backward()
    gradients = {name: leaf.grad for name, leaf in leaves.items()}
    for leaf in leaves.values():
        leaf.grad = None
    if sparse := [name for name, gradient in gradients.items() if gradient is not None and gradient.is_sparse]:
        raise JobError(
            f"The gradient of {sparse[0]} is sparse, as nn.Embedding(sparse=True) makes it, and gradients are clipped, "
            "summed and sharded as dense tensors here; build the layer with sparse=False."
        )
    return list(gradients.values())


def _step(
    job: Job, blueprint: Blueprint, watch: AbstractContextManager[Any] | None, batch: Any, under: PassCache | None
) -> Observed:
    """Forward and backward with stand-ins for all parameters, buffers and plain tensors."""
    model = blueprint.model
    tensors = under.stand_ins(blueprint) if under else stand_ins(blueprint)
    wanted = {name: tensors[name] for name, p in model.named_parameters() if p.requires_grad}
    with ExitStack() as stack:
        stack.enter_context(lend(model, tensors))
        reads = Reads(model)
        stack.enter_context(under.repeats.running(follower=reads) if under else nullcontext())
        with watch or nullcontext(), watch_calls(model) as called, reads.noting():
            total, weight = _forward(job, model, batch)
        if not total.requires_grad:
            raise JobError("The loss does not depend on any trainable parameter; nothing could be trained.")
        gradients = _gradients(total, wanted)
        known = None if torch.is_tensor(weight) else float(weight) / SAMPLES
        if known is not None and not has_no_values(total):
            known = known if _weighs(job, model, known) else None
    trained = {id(tensor) for tensor in under.repeats.trained} if under else set()
    used = frozenset(
        name
        for (name, tensor), gradient in zip(wanted.items(), gradients, strict=True)
        if gradient is not None or id(tensor) in trained
    )
    called |= under.repeats.called if under else set()
    return Observed(
        used,
        frozenset(called),
        known,
        read_elsewhere=frozenset(reads.elsewhere),
        by_value=not has_no_values(total),
    )


@torch.no_grad()
def _weighs(job: Job, model: nn.Module, per_sample: float) -> bool:
    """Whether other samples weigh the same: where tensors have values, a weight may depend on them."""
    with suppress(Exception):  # data of two samples has no third
        batches = [(samples, make_batch(job, samples)) for samples in (SAMPLES + 1, SAMPLES)]
        return all(isclose(float(_forward(job, model, batch)[1]), samples * per_sample) for samples, batch in batches)
    return False


def _forward(job: Job, model: nn.Module, batch: Any) -> tuple[torch.Tensor, float | torch.Tensor]:
    return call_loss(job, call_model(job, model, batch), batch)
