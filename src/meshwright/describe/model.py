"""Describe a job's model before any weight exists: one step on fake tensors shows what is used and how."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
from torch.func import functional_call
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.utils._pytree import tree_map
from torch.utils.data import default_collate

from meshwright.describe.blocks import find_blocks
from meshwright.describe.blueprint import Blueprint, record, set_attributes
from meshwright.describe.flow import Flow, Watcher
from meshwright.describe.tape import Slot
from meshwright.describe.units import find_units
from meshwright.errors import JobError, one_line
from meshwright.facts.job import Job
from meshwright.facts.model import CallFacts, ModelFacts, ParameterFacts
from meshwright.facts.named import NamedParameters

# What a step on fake tensors raises when the model looks at values, which fake tensors do not have.
_DEPENDS_ON_DATA = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    GuardOnDataDependentSymNode,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
SAMPLES = 2  # enough for BatchNorm to have a variance
SMALL = 1 << 28  # parameters below which a step may be tried on real tensors where fake ones do not do


@dataclass(frozen=True)
class Observed:
    """What one step showed."""

    used: frozenset[str]
    called: frozenset[str]
    weight_per_sample: float | None


def describe(job: Job) -> ModelFacts:
    """The facts of a job's model. Raises JobError where the job's parts do not fit each other."""
    blueprint = record(job.model, seed=0)
    model = blueprint.model
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise JobError("The model has no trainable parameter; nothing could be trained.")
    _check_optimizer(job, model)
    observed, unseen = observe(job, blueprint)
    blocks = find_blocks(model, hint=job.blocks, called=observed.called if observed else None)
    flow, _ = trace(job, blueprint, Watcher(find_units(model, blocks, observed.called))) if observed else (None, "")
    return ModelFacts(
        parameters=parameter_facts(model, observed),
        blocks=blocks,
        calls=call_facts(flow) if flow else (),
        optimizer_slots=_optimizer_slots(job, model),
        batch_norms=batch_norm_names(model),
        weight_per_sample=observed.weight_per_sample if observed else None,
        unseen=unseen,
    )


def call_facts(flow: Flow) -> tuple[CallFacts, ...]:
    return tuple(CallFacts(name=c.name, flops=c.flops, reads=tuple(sorted(c.reads))) for c in flow.calls)


def batch_norm_names(model: nn.Module) -> tuple[str, ...]:
    return tuple(n for n, m in model.named_modules() if isinstance(m, nn.modules.batchnorm._BatchNorm))


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
    job: Job, blueprint: Blueprint, watch: AbstractContextManager[Any] | None = None
) -> tuple[Observed | None, str]:
    """One step on fake tensors; on real ones where the model looks at values and is small; else the reason why not.

    `watch` is active meanwhile, closer to the model than the fake tensors are.
    """
    return _on_fake_tensors(job, blueprint, make_batch(job, SAMPLES), lambda batch: _step(job, blueprint, batch, watch))


def trace(job: Job, blueprint: Blueprint, watcher: Watcher, batch: Any = None) -> tuple[Flow | None, str]:
    """The flow of one forward pass and loss between the modules that `watcher` watches, as `observe` sees it."""
    batch = make_batch(job, SAMPLES) if batch is None else batch

    def run(data: Any) -> Flow:
        watcher.forget()
        tensors = _stand_ins(blueprint)
        parameters = {name: tensors[name] for name, _ in blueprint.model.named_parameters()}
        with watcher.watching(blueprint.model, parameters):
            total, _ = _forward(job, blueprint.model, tensors, data)
        return watcher.flow(total)

    return _on_fake_tensors(job, blueprint, batch, run)


Result = TypeVar("Result")


def _on_fake_tensors(
    job: Job, blueprint: Blueprint, batch: Any, run: Callable[[Any], Result]
) -> tuple[Result | None, str]:
    """What `run` gives on a fake copy of the batch, or on the batch itself, or the reason why neither can be."""
    logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)  # it logs what it raises
    try:
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        # A batch may lie on a GPU; what is asked here is asked of a CPU.
        fake = tree_map(lambda leaf: mode.from_tensor(leaf.cpu()) if torch.is_tensor(leaf) else leaf, batch)
        with mode:
            return run(fake), ""
    except _DEPENDS_ON_DATA as error:
        reason = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    except JobError:
        raise
    except Exception as error:
        raise _misfit(error) from error
    if sum(p.numel() for p in blueprint.model.parameters()) > SMALL:
        return None, reason
    try:
        return run(tree_map(lambda leaf: leaf.cpu() if torch.is_tensor(leaf) else leaf, batch)), ""
    except JobError:
        raise
    except Exception as error:
        raise _misfit(error) from error


def _misfit(error: Exception) -> JobError:
    return JobError(
        f"The job's sample, inputs, model and loss do not fit each other: {one_line(error)} "
        "Check that model(*inputs(sample(2))) runs and that loss takes its output."
    )


def _step(job: Job, blueprint: Blueprint, batch: Any, watch: AbstractContextManager[Any] | None) -> Observed:
    """Forward and backward with stand-ins for all parameters, buffers and plain tensors."""
    model = blueprint.model
    tensors = _stand_ins(blueprint)
    with watch or nullcontext(), _calls(model) as called:
        total, weight = _forward(job, model, tensors, batch)
    wanted = {name: tensors[name] for name, p in model.named_parameters() if p.requires_grad}
    if not total.requires_grad:
        raise JobError("The loss does not depend on any trainable parameter; nothing could be trained.")
    gradients = torch.autograd.grad(total, list(wanted.values()), allow_unused=True)
    used = frozenset(name for name, gradient in zip(wanted, gradients, strict=True) if gradient is not None)
    return Observed(used, frozenset(called), None if torch.is_tensor(weight) else float(weight) / SAMPLES)


def _stand_ins(blueprint: Blueprint) -> dict[str, torch.Tensor]:
    """Tensors for all parameters and buffers by name, and for plain attributes in their places."""
    model = blueprint.model
    set_attributes(model, blueprint.attributes, _attribute)
    tensors = {name: _stand_in(p).requires_grad_(p.requires_grad) for name, p in model.named_parameters()}
    return tensors | {name: _stand_in(b) for name, b in model.named_buffers()}


def _forward(
    job: Job, model: nn.Module, tensors: dict[str, torch.Tensor], batch: Any
) -> tuple[torch.Tensor, float | torch.Tensor]:
    output = call_model(job, lambda *a, **k: functional_call(model, tensors, a, k, tie_weights=True), batch)
    return call_loss(job, output, batch)


def _attribute(slot: Slot) -> torch.Tensor:
    return _stand_in(torch.empty_strided(slot.size, slot.stride, dtype=slot.dtype, device="meta"))


def _stand_in(tensor: torch.Tensor) -> torch.Tensor:
    size, stride = tensor.size(), tensor.stride()
    if not tensor.is_meta:
        return tensor.detach().clone()
    empty = torch.empty_strided(size, stride, dtype=tensor.dtype, device="cpu")
    return empty.normal_(std=0.02) if empty.is_floating_point() else empty.zero_()


@contextmanager
def _calls(model: nn.Module) -> Iterator[set[str]]:
    """Names of the modules that are called meanwhile."""
    called: set[str] = set()
    hooks = [
        module.register_forward_pre_hook(lambda module, args, name=name: called.add(name))
        for name, module in model.named_modules()
    ]
    try:
        yield called
    finally:
        for hook in hooks:
            hook.remove()


def parameter_facts(model: nn.Module, observed: Observed | None) -> tuple[ParameterFacts, ...]:
    """Every parameter once, with all its names."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return tuple(
        ParameterFacts(
            names=tuple(names[id(parameter)]),
            shape=tuple(parameter.shape),
            itemsize=parameter.dtype.itemsize,
            trainable=parameter.requires_grad,
            used=observed is None or not parameter.requires_grad or name in observed.used,
        )
        for name, parameter in model.named_parameters()
    )


def _small_parameters(model: nn.Module) -> NamedParameters:
    """Parameters of the same names and number of dims, but tiny and real."""
    return NamedParameters(
        (name, nn.Parameter(torch.zeros([min(size, 8) for size in parameter.shape])))
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    )


def _check_optimizer(job: Job, model: nn.Module) -> None:
    try:
        optimizer = job.optimizer(_small_parameters(model))
        schedule = job.schedule(optimizer) if job.schedule is not None else None
    except Exception as error:
        raise JobError(f"Job(optimizer=..., schedule=...) raised {one_line(error)}") from error
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise JobError(f"Job(optimizer=...) must give a torch optimizer, but it gave {_kind(optimizer)}.")
    if schedule is not None and not callable(getattr(schedule, "step", None)):
        raise JobError(f"Job(schedule=...) must give something with a step(), but it gave {_kind(schedule)}.")


def _optimizer_slots(job: Job, model: nn.Module) -> float:
    """Bytes of state per byte of parameter, seen on tiny parameters after one step."""
    parameters = _small_parameters(model)
    optimizer = job.optimizer(parameters)
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    try:
        optimizer.step()
    except Exception:  # an optimizer that wants a closure; Adam's two moments are the common case
        return 2.0
    state = [value for values in optimizer.state.values() for value in values.values() if torch.is_tensor(value)]
    held = sum(value.numel() * value.itemsize for value in state if value.dim() > 0)
    return held / max(1, sum(p.numel() * p.itemsize for p in parameters if p.dim() > 0))
