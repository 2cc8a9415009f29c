"""Run a job's model without its weights: one step on fake tensors, with values if the model reads them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from math import isclose
from typing import Any, TypeVar

import torch
from torch import nn

from meshwright.describe import pass_tensors
from meshwright.describe.calls import Flow
from meshwright.describe.code_lines import CodeLine, failed_line
from meshwright.describe.data_source import first_batch
from meshwright.describe.flow import Watcher
from meshwright.describe.parameter_reads import Reads
from meshwright.describe.pass_tensors import PassCache, has_no_values, lend, stand_ins
from meshwright.describe.read_values import ReadValues, ValuesUnknown
from meshwright.describe.repeats import PassObserver
from meshwright.describe.structure import tensors_of
from meshwright.describe.template import watch_calls
from meshwright.describe.watch_values import following, moved_buffers
from meshwright.errors import JobError, one_line
from meshwright.facts.job import Job
from meshwright.recording.blueprint import Blueprint
from meshwright.recording.seeding import seed_torch
from meshwright.torch_private import fake_tensors

SAMPLES = 2  # with one, BatchNorm would have no variance
Result = TypeVar("Result")


@dataclass(frozen=True)
class Observed:
    """What was observed in one step."""

    used: frozenset[str]
    called: frozenset[str]
    weight_per_sample: float | None
    read_elsewhere: frozenset[str] = frozenset()
    """Parameters that are read, or whose shape is read, while none of the modules that own them runs."""
    by_value: bool = False
    """Whether the step needed values, which fake tensors do not have."""
    reads: ReadValues = field(default_factory=ReadValues)
    """The lines that read them, if the step ran on fake tensors with known values."""


def make_batch(job: Job, samples: int) -> Any:
    """A batch of `Job(sample=...)`, or of the first samples of the data."""
    try:
        if job.sample is not None:
            return job.sample(samples)
        return first_batch(job, samples)
    except JobError:
        raise
    except Exception as error:
        source = "sample" if job.sample is not None else "data"
        raise JobError(f"Job({source}=...) raised {one_line(error)}") from error


def call_model(job: Job, model: Any, batch: Any) -> Any:
    """The model's output for the inputs that the job takes from a batch."""
    inputs = job.inputs(batch)
    if isinstance(inputs, Mapping):  # also transformers' BatchEncoding
        return model(**inputs)
    if isinstance(inputs, tuple | list):
        return model(*inputs)
    raise JobError(
        f"Job(inputs=...) must return a tuple of positional or a dict of keyword arguments, not {_kind(inputs)}; "
        'write `lambda batch: (batch["x"],)`.'
    )


def call_loss(job: Job, output: Any, batch: Any) -> tuple[torch.Tensor, float | torch.Tensor]:
    """The loss's sum and weight, checked."""
    result = job.loss(output, batch)
    if not isinstance(result, tuple) or len(result) != 2:
        raise JobError(
            f"Job(loss=...) must return (sum, weight), but it returned {_kind(result)}; "
            "for a mean over samples, return the sum and the number of samples."
        )
    total, weight = result
    if not isinstance(total, torch.Tensor):
        raise JobError(f"Job(loss=...) must return (sum, weight), but its sum is a {_kind(total)}; leave out .item().")
    if total.numel() != 1:
        raise JobError(f"Job(loss=...) must return one number as its sum, but it has shape {tuple(total.shape)}.")
    if not isinstance(weight, int | float | torch.Tensor):
        raise JobError(f"Job(loss=...) must return a number or a tensor as its weight, but it is {_kind(weight)}.")
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
    """Observe one step: on fake tensors, or with values if the model reads them; else the reason.

    `watch` is active during the step, inside the fake tensor mode.
    """
    reads = ReadValues()
    run = partial(_step, job, blueprint, watch, reads)
    found, unseen = _run(blueprint, make_batch(job, SAMPLES), run, pass_cache, reads)
    return replace(found, reads=reads) if found else None, unseen


def trace(
    job: Job,
    blueprint: Blueprint,
    watcher: Watcher,
    batch: Any = None,
    *,
    pass_cache: PassCache | None = None,
    observer: PassObserver | None = None,
) -> tuple[Flow | None, str]:
    """The flow of one forward pass and loss between the modules that `watcher` watches; else the reason why not."""
    batch = make_batch(job, SAMPLES) if batch is None else batch

    def run(data: Any, under: PassCache | None) -> Flow:
        watcher.forget()
        tensors = under.stand_ins(blueprint) if under else stand_ins(blueprint)
        parameters = {name: tensors[name] for name, _ in blueprint.model.named_parameters()}
        short = under.repeats.running(watcher, observer) if under else following(watcher, tensors_of(data))
        with watcher.watching(blueprint.model, parameters), lend(blueprint.model, tensors), short:
            output = call_model(job, blueprint.model, data)
            watcher.in_loss = True
            total, _ = call_loss(job, output, data)
            moved = moved_buffers(watcher, blueprint.model, tensors)
        changes_batch = any(watcher.writers(tensor) for tensor in tensors_of(data))
        return replace(watcher.flow(total, output), moved=moved, changes_batch=changes_batch)

    return _run(blueprint, batch, run, pass_cache)


def forward_passes(job: Job, blueprint: Blueprint, *watches: AbstractContextManager[Any]) -> bool:
    """Run forward passes in sequence on the same stand-ins, one under each watch. False if none can run."""

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
    """Run one forward pass with made-up weights that are always the same. `seed` is for other random numbers."""
    with torch.random.fork_rng(devices=[]):
        seed_torch(0)
        tensors = stand_ins(blueprint)
        seed_torch(seed)
        with lend(blueprint.model, tensors), watch:
            _forward(job, blueprint.model, batch)


def forward_with_values(
    job: Job, blueprint: Blueprint, batch: Any, watch: Callable[[Any], AbstractContextManager[Any]], *, seed: int = 0
) -> None:
    """Like `forward_on_real_tensors`, but a large model runs on fake tensors with values.

    `watch` gets the batch that the model gets.
    """
    if pass_tensors.is_small(blueprint.model):
        return forward_on_real_tensors(job, blueprint, batch, watch(batch), seed=seed)

    def run(data: Any) -> None:
        with lend(blueprint.model, stand_ins(blueprint)), watch(data):
            _forward(job, blueprint.model, data)

    rung = partial(pass_tensors.on_fake_with_values, reads=ReadValues(), seed=seed)
    return pass_tensors.climb(blueprint.model, batch, run, rung)


def see_output(job: Job, blueprint: Blueprint, batch: Any, look: Callable[[Any, Any], Result]) -> Result | None:
    """The result of `look(output, batch)`, without values if possible; None if the model could not run."""

    def run(data: Any, under: PassCache | None) -> Result:
        with lend(blueprint.model, stand_ins(blueprint)):
            return look(call_model(job, blueprint.model, data), data)

    return _run(blueprint, batch, run, None)[0]


def _run(
    blueprint: Blueprint,
    batch: Any,
    run: Callable[[Any, PassCache | None], Result],
    pass_cache: PassCache | None,
    reads: ReadValues | None = None,
) -> tuple[Result | None, str]:
    """The result of `run` without values if possible, else with values; else the reason why not."""
    model = blueprint.model
    if pass_cache is not None and pass_cache.runs:
        # If anything fails while blocks are skipped, the pass is repeated with all of them.
        with suppress(Exception):
            return pass_tensors.climb(model, batch, lambda data: run(data, pass_cache), *pass_cache.rungs), ""
    try:
        if pass_cache is None or pass_cache.runs:
            return pass_tensors.climb(model, batch, lambda data: run(data, None), pass_tensors.on_fake), ""
    except JobError:
        raise
    except Exception:  # also for a model that reads no values: some fake kernels refuse what the real ones accept
        if pass_cache is not None:
            pass_cache.runs = False
    reads = reads or ReadValues()
    with_values = partial(pass_tensors.on_fake_with_values, reads=reads)
    rungs = [pass_tensors.on_real, with_values] if pass_tensors.is_small(model) else [with_values]
    line: list[CodeLine | None] = []
    try:
        return pass_tensors.climb(model, batch, partial(_telling, line, lambda data: run(data, None)), *rungs), ""
    except JobError:
        raise
    except Exception as error:
        if not _depends_on_data(error):
            raise _misfit(error) from error
        return None, one_line(error).removesuffix(".") + f" ({line[-1]})" * bool(line and line[-1])


def _telling(line: list[CodeLine | None], run: Callable[[Any], Result], data: Any) -> Result:
    """Run, and note the line of the author's code that raised an error."""
    try:
        return run(data)
    except Exception as error:
        line.append(failed_line(error))
        raise


def _depends_on_data(error: Exception) -> bool:
    """Whether fake tensors raised this error because the model reads values."""
    from meshwright.torch_private import symbolic_shapes  # late, because it imports sympy

    return isinstance(
        error,
        ValuesUnknown
        | fake_tensors.DataDependentOutputException
        | fake_tensors.DynamicOutputShapeException
        | symbolic_shapes.GuardOnDataDependentSymNode
        | fake_tensors.UnsupportedFakeTensorException
        | fake_tensors.UnsupportedOperatorException,
    )


def _misfit(error: Exception) -> JobError:
    return JobError(
        f"The job's sample, inputs, model and loss do not fit each other: {one_line(error)} "
        "Check that model(*inputs(sample(2))) runs and that loss takes its output."
    )


def _gradients(total: torch.Tensor, leaves: dict[str, torch.Tensor]) -> list[torch.Tensor | None]:
    """The leaves' gradients. `autograd.grad` would not work with an author's `checkpoint(use_reentrant=True)`."""
    total.backward()
    gradients = {name: leaf.grad for name, leaf in leaves.items()}
    for leaf in leaves.values():
        leaf.grad = None
    if sparse := [name for name, gradient in gradients.items() if gradient is not None and gradient.is_sparse]:
        raise JobError(
            f"The gradient of {sparse[0]} is sparse, as nn.Embedding(sparse=True) makes it, but gradients are clipped, "
            "summed and sharded as dense tensors here; build the layer with sparse=False."
        )
    return list(gradients.values())


def _step(
    job: Job,
    blueprint: Blueprint,
    watch: AbstractContextManager[Any] | None,
    values: ReadValues,
    batch: Any,
    under: PassCache | None,
) -> Observed:
    """Run forward and backward with stand-ins for all parameters, buffers and other tensors."""
    model = blueprint.model
    tensors = under.stand_ins(blueprint) if under else stand_ins(blueprint)
    wanted = {name: tensors[name] for name, p in model.named_parameters() if p.requires_grad}
    with ExitStack() as stack:
        stack.enter_context(lend(model, tensors))
        reads = Reads(model)
        stack.enter_context(under.repeats.running(observer=reads) if under else nullcontext())
        with watch or nullcontext(), watch_calls(model) as called, reads.noting():
            total, weight = _forward(job, model, batch)
        if not total.requires_grad:
            raise JobError("The loss does not depend on any trainable parameter; compute it from the model's output.")
        gradients = _gradients(total, wanted)
        known = None if torch.is_tensor(weight) else float(weight) / SAMPLES
        by_value = bool(values.lines) or not has_no_values(total)
        if known is not None and by_value:
            known = known if _weighs(job, model, known) else None
    trained = {id(tensor) for tensor in under.repeats.trained} if under else set()
    used = frozenset(
        name
        for (name, tensor), gradient in zip(wanted.items(), gradients, strict=True)
        if gradient is not None or id(tensor) in trained
    )
    called |= under.repeats.called if under else set()
    return Observed(used, frozenset(called), known, read_elsewhere=frozenset(reads.elsewhere), by_value=by_value)


@torch.no_grad()
def _weighs(job: Job, model: nn.Module, per_sample: float) -> bool:
    """Whether other samples have the same weight: on real tensors the weight may depend on values."""
    with suppress(Exception):  # the data may have only two samples
        batches = [(samples, make_batch(job, samples)) for samples in (SAMPLES + 1, SAMPLES)]
        return all(isclose(float(_forward(job, model, batch)[1]), samples * per_sample) for samples, batch in batches)
    return False


def _forward(job: Job, model: nn.Module, batch: Any) -> tuple[torch.Tensor, float | torch.Tensor]:
    return call_loss(job, call_model(job, model, batch), batch)
