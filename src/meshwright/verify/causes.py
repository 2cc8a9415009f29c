"""Find out why no strategy can train a job as plain PyTorch does, by experiments on the plain model.

Each experiment runs in one process without any strategy and answers one question about the user's model and loss: do
they draw random numbers, does a sample's result depend on other samples of the batch, does forward change state? The
answer names the module, operator or tensor.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from meshwright.assemble.batch import Share, part
from meshwright.describe.dropout import NoDropout
from meshwright.describe.observe import call_loss, call_model
from meshwright.describe.samples import Cutter
from meshwright.facts.job import Job
from meshwright.torch_private.modes import TorchDispatchMode
from meshwright.torch_private.modules import BatchNorm
from meshwright.torch_private.trees import tree_flatten_with_path
from meshwright.verify.evidence import State, state_of, tensors_in
from meshwright.verify.float64 import double_arithmetic, in_double
from meshwright.verify.plain_training import Recipe, build_plainly, seed_step, step_batch

APART = {torch.float64: 1e-9, torch.float32: 1e-4}
"""Relative difference from which on two results differ by more than rounding."""


def find_cause(job: Job, *, seed: int, device: torch.device) -> str | None:
    """The property of the job that strategies cannot reproduce; None if none was found.

    The order of the experiments matters: a random model also looks as if samples depended on each other.
    """
    recipe = Recipe(steps=1, seed=seed, device=device)
    try:
        return _find(Experiment(in_double(job), replace(recipe, arithmetic=double_arithmetic), torch.float64))
    except Exception:  # it does not run in float64
        try:
            return _find(Experiment(job, recipe, torch.float32))
        except Exception:
            return None  # better no answer than another error


def _find(experiment: Experiment) -> str | None:
    questions = (random_builder, random_model, changed_state, shared_batch)
    return next((answer for ask in questions if (answer := ask(experiment))), None)


@dataclass(frozen=True)
class Result:
    """Result of one forward pass."""

    output: Any
    total: float
    weight: float


@dataclass(frozen=True)
class Experiment:
    """A job with what its forward passes need."""

    job: Job
    recipe: Recipe
    dtype: torch.dtype

    def build(self) -> nn.Module:
        """A new model whose BatchNorms use running statistics: strategies reproduce batch statistics."""
        model = build_plainly(self.job, self.recipe)
        for module in model.modules():
            if isinstance(module, BatchNorm):
                module.eval()
        return model

    def batch(self) -> Any:
        return step_batch(self.job, self.recipe, 0)

    def halves(self) -> list[Any]:
        share = Share(micro_batch=-(-self.job.global_batch // 2))
        pieces = part(self.batch(), share, Cutter(self.job), nominal=self.job.global_batch).pieces
        return [piece.data for piece in pieces]

    def run(self, model: nn.Module, batch: Any, *, reseed: int = 0) -> Result:
        seed_step(replace(self.recipe, reseed=reseed), 0)
        with self.recipe.arithmetic(), NoDropout():
            output = call_model(self.job, model, batch)
            total, weight = call_loss(self.job, output, batch)
        return Result(output, float(total.detach()), float(weight))

    def apart(self, one: torch.Tensor | float, other: torch.Tensor | float) -> bool:
        a, b = (torch.as_tensor(x).detach().double() for x in (one, other))
        if a.shape != b.shape or not a.numel():
            return a.shape != b.shape
        return not float((a - b).abs().max()) <= APART[self.dtype] * max(float(b.abs().max()), 1e-30)


def random_builder(experiment: Experiment) -> str | None:
    one, other = (state_of(experiment.build()) for _ in range(2))
    for name, value in one.items():
        if name not in other or not torch.equal(value, other[name]):
            return (
                f"Job(model=...) makes another {name} each time it is called from the same seed; "
                "draw from torch, numpy.random or random only"
            )
    return None


def random_model(experiment: Experiment) -> str | None:
    """Compare two passes that differ only in the state of random generators."""
    batch = experiment.batch()
    one, other = (experiment.run(experiment.build(), batch, reseed=reseed) for reseed in (0, 1))
    if one.total == other.total and _same(one.output, other.output):
        return None
    watch, model = _Draws(), experiment.build()
    with _telling_modules(model, watch), watch:
        python, arrays = random.getstate(), numpy.random.get_state()
        experiment.run(model, batch)
    effect = "ranks and micro-batches draw other numbers than one process does"
    if watch.found is not None:
        module, operator = watch.found
        return f"the model or loss draws random numbers, first in {module} by {operator}; {effect}"
    return f"the model or loss draws random numbers from {_moved_generator(python, arrays)}; {effect}"


def _same(one: Any, other: Any) -> bool:
    pairs = zip(tensors_in(one), tensors_in(other), strict=True)
    return all(a.shape == b.shape and torch.equal(a, b) for a, b in pairs)


def _moved_generator(python: Any, arrays: Any) -> str:
    if random.getstate() != python:
        return "Python's random"
    moved = any(not numpy.array_equal(a, b) for a, b in zip(numpy.random.get_state(), arrays, strict=True))
    return "numpy.random" if moved else "a generator of its own"


class _Draws(TorchDispatchMode):
    """Records the first random operator and the module that ran it."""

    def __init__(self) -> None:
        super().__init__()
        self.running: list[str] = []
        self.found: tuple[str, str] | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.found is None and torch.Tag.nondeterministic_seeded in func.tags:
            self.found = self.running[-1] if self.running else "the loss", str(func.overloadpacket)
        return func(*args, **(kwargs or {}))


@contextmanager
def _telling_modules(model: nn.Module, watch: _Draws) -> Iterator[None]:
    names = {id(module): f"module {name or type(model).__name__}" for name, module in model.named_modules()}

    def enter(module: nn.Module, *rest: Any) -> None:
        watch.running.append(names.get(id(module), type(module).__name__))

    def leave(module: nn.Module, *rest: Any) -> None:
        if watch.running:
            watch.running.pop()

    before, after = register_module_forward_pre_hook(enter), register_module_forward_hook(leave)
    try:
        yield
    finally:
        before.remove()
        after.remove()


def changed_state(experiment: Experiment) -> str | None:
    """Compare what forward changes for each half of the batch."""
    states: list[State] = []
    for half in experiment.halves():
        model = experiment.build()
        start = state_of(model)
        experiment.run(model, half)
        states.append({name: value for name, value in state_of(model).items() if not torch.equal(value, start[name])})
    parameters = {name for name, _ in experiment.build().named_parameters(remove_duplicate=False)}
    changed = dict.fromkeys(name for state in states for name in state)
    for name in changed:
        what = "parameter" if name in parameters else "buffer"
        found = [state.get(name) for state in states]
        if any(value is None or found[0] is None or experiment.apart(value, found[0]) for value in found):
            return f"forward changes the {what} {name} by the samples that it sees; ranks see their own only"
        if name in parameters:
            return f"forward changes the parameter {name}, which a strategy may keep elsewhere"
    return None


def shared_batch(experiment: Experiment) -> str | None:
    """Compare a batch with its halves: does a sample's result depend on the others?"""
    halves = experiment.halves()
    if len(halves) < 2:
        return None
    whole = experiment.run(experiment.build(), experiment.batch())
    parts = [experiment.run(experiment.build(), half) for half in halves]
    sums = sum(one.total for one in parts), sum(one.weight for one in parts)
    if not experiment.apart(sums[0], whole.total) and not experiment.apart(sums[1], whole.weight):
        return None
    if place := _first_shared(experiment):
        return f"the output of {place} for a sample depends on the other samples of the batch"
    if name := _one_number(whole.output):
        return f"the model's {name} is one number over the whole batch (a router's auxiliary loss, say)"
    if experiment.apart(sums[1], whole.weight):
        return "the loss's weight of a batch is not the sum of the weights of its parts"
    return "the loss depends on which samples share a batch (a contrastive loss, say): it is not a sum over samples"


def _first_shared(experiment: Experiment) -> str | None:
    """The first module whose output for the first half of the batch depends on the second."""
    half = experiment.halves()[0]
    alone, together = _module_outputs(experiment, half), _module_outputs(experiment, experiment.batch())
    for (name, one), (other_name, other) in zip(alone, together, strict=False):
        if name != other_name:
            return name  # which module is called depends on the values of the batch
        for a, b in zip(one, other, strict=False):
            rows = len(a) if a.dim() else 0
            if rows and a.shape[1:] == b.shape[1:] and len(b) > rows and experiment.apart(b[:rows], a):
                return name
    return None


def _module_outputs(experiment: Experiment, batch: Any) -> list[tuple[str, list[torch.Tensor]]]:
    """Outputs of each module, in the order in which the modules finished."""
    model, found = experiment.build(), []
    names = {id(module): f"module {name or type(model).__name__}" for name, module in model.named_modules()}

    def note(module: nn.Module, args: Any, output: Any) -> None:
        if id(module) in names:
            found.append((names[id(module)], [t.detach().clone() for t in tensors_in(output) if t.is_floating_point()]))

    hook = register_module_forward_hook(note)
    try:
        experiment.run(model, batch)
    finally:
        hook.remove()
    return found


def _one_number(output: Any) -> str | None:
    """Path of the first 0-dim tensor in the model's output."""
    for path, leaf in tree_flatten_with_path(output)[0]:
        if isinstance(leaf, torch.Tensor) and leaf.dim() == 0:
            return f"output{''.join(str(key) for key in path)}"
    return None
