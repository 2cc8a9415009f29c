"""Prove that a strategy trains as one process does, or name the first thing that differs.

Each strategy takes a few optimizer steps from one seed on the same global batches as one process does, with dropout
off. Losses, gradient norms, parameters and buffers are compared.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from meshwright.build.batch import micro_steps, turn_round
from meshwright.build.check import check
from meshwright.build.step import Trainer
from meshwright.build.world import World
from meshwright.describe.observe import make_batch
from meshwright.facts.job import Job
from meshwright.facts.model import ModelFacts
from meshwright.facts.strategy import Strategy
from meshwright.runtime.place import place_of
from meshwright.runtime.verdict import LOSS_BOUND, ROUNDING, Trace, Verdict, judge
from meshwright.strategies.pipeline import is_pipelined

LOSS_SCALE = 2.0**8
"""fp16's, held low: at the usual 2**16 one process overflows where the smaller parts of its ranks do not, and skips."""
DROPOUT = (
    "dropout was off; in training this strategy may draw other masks than one process does: "
    "equal in distribution, not in bits"
)
Plant = Callable[[Trainer], None]
"""Spoils a trainer on purpose; tests use it to see that a defect is found."""


def verify(
    job: Job,
    facts: ModelFacts,
    strategies: Sequence[str],
    world: World,
    *,
    steps: int = 3,
    seed: int = 0,
    plant: Plant | None = None,
) -> Iterator[Verdict]:
    """One verdict a strategy, on every rank alike. Rank 0 also runs the references."""
    references: dict[str, tuple[Trace, list[Trace]]] = {}
    for text in strategies:
        resolved = check(job, facts, Strategy.parse(text), place_of(world))
        reference = reference_of(resolved, facts, job.global_batch)
        if world.is_main and str(reference) not in references:
            references[str(reference)] = run_references(job, facts, reference, world, steps=steps, seed=seed)
        trace = run_steps(job, facts, resolved, world, steps=steps, seed=seed, plant=plant)
        verdict = judge(text, reference, trace, *references[str(reference)]) if world.is_main else None
        if verdict is not None and facts.drops and resolved.model_ranks > 1:
            verdict = replace(verdict, note=DROPOUT)
        yield world.gather(verdict)[0]


def run_references(
    job: Job, facts: ModelFacts, reference: Strategy, world: World, *, steps: int, seed: int
) -> tuple[Trace, list[Trace]]:
    """One process, and the same disturbed by rounding: weights moved by it, and sums over samples in another order."""
    one = World(device=world.device)

    def run(moved_by: int, *, backwards: bool = False) -> Trace:
        return run_steps(job, facts, reference, one, steps=steps, seed=seed, moved_by=moved_by, backwards=backwards)

    exact, moved, turned = run(0), run(1), run(2, backwards=True)
    # Where the order of samples has a meaning (BatchNorm over micro-batches), turning it round is no rounding.
    if not abs(turned.losses[0] - exact.losses[0]) <= LOSS_BOUND[reference.precision] * abs(exact.losses[0]):
        turned = run(2)
    return exact, [moved, turned]


def reference_of(strategy: Strategy, facts: ModelFacts, global_batch: int) -> Strategy:
    """One process with the same precision. Where there is BatchNorm, also with the same samples in each statistic."""
    ranks = strategy.data_ranks
    # A pipeline with BatchNorm is one of a single micro-batch: others were refused.
    count = 1 if is_pipelined(strategy) else micro_steps(global_batch, ranks, strategy.micro_batch)
    size = -(-global_batch // count) if facts.batch_norms and count > 1 else None
    return Strategy(data="single", precision=strategy.precision, pure=strategy.pure, micro_batch=size)


def run_steps(
    job: Job,
    facts: ModelFacts,
    strategy: Strategy,
    world: World,
    *,
    steps: int,
    seed: int,
    plant: Plant | None = None,
    moved_by: int = 0,
    backwards: bool = False,
) -> Trace:
    """Take a few steps on made-up batches and keep what is compared; `moved_by` numbers a disturbance by rounding.

    `backwards` turns the order of samples in every batch round.
    """
    trainer = Trainer(job, facts, strategy, world, seed=seed)
    _switch_dropout_off(trainer.engine.model)
    if plant is not None:
        plant(trainer)
    if trainer.loss_scale:
        trainer.loss_scale.value = LOSS_SCALE
    trace = Trace(losses=[], norms=[])
    if moved_by:
        _move_by_rounding(trainer, seed=moved_by * steps)
    trace.start.update(_state(trainer))
    for index in range(steps):
        if moved_by and index and strategy.precision == "fp32":
            _move_by_rounding(trainer, seed=moved_by * steps + index)
        with NoDropout():
            batch = seeded_batch(job, seed + index)
            result = trainer.step(turn_round(batch) if backwards else batch)
        trace.losses.append(result.loss)
        trace.norms.append(result.grad_norm)
        if index == 0:
            trace.first.update(_state(trainer))
    trace.last.update(_state(trainer))
    return trace


def seeded_batch(job: Job, seed: int) -> Any:
    """A global batch of made-up samples that every rank makes alike."""
    python_state, numpy_state = random.getstate(), numpy.random.get_state()
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return make_batch(job, job.global_batch)
    finally:
        random.setstate(python_state)
        numpy.random.set_state(numpy_state)


class NoDropout(TorchFunctionMode):
    """Dropout functions pass their input through, and attention drops nothing."""

    FUNCTIONS = (
        *(F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout),
        *(torch.dropout, torch.alpha_dropout, torch.feature_dropout, torch.feature_alpha_dropout),
    )

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in self.FUNCTIONS:
            return args[0] if args else kwargs["input"]
        if func is F.scaled_dot_product_attention:
            if len(args) > 4:
                args = (*args[:4], 0.0, *args[5:])
            elif "dropout_p" in kwargs:
                kwargs = {**kwargs, "dropout_p": 0.0}
        if func is F.multi_head_attention_forward:
            kwargs = {**kwargs, "training": False}  # which it asks for dropout alone
        return func(*args, **kwargs)


def _switch_dropout_off(model: nn.Module) -> None:
    """Also on the modules: backward may recompute in a thread of its own, where the mode is not active."""
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        elif isinstance(module, nn.MultiheadAttention | nn.RNNBase):
            module.dropout = 0.0


def _move_by_rounding(trainer: Trainer, seed: int) -> None:
    """By up to a unit in the last place: in fp64, because most of it would be lost in the parameter's own dtype."""
    generator = torch.Generator().manual_seed(seed)
    last_place = 2 * ROUNDING[trainer.strategy.precision]
    with torch.no_grad():
        for parameter in trainer.engine.parameters():
            noise = torch.rand(parameter.shape, generator=generator, dtype=torch.float64) * 2 - 1
            parameter.copy_(parameter.double() * (1 + last_place * noise.to(parameter.device)))


def _state(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Whole tensors on rank 0; the other ranks take part and keep nothing."""
    state = {}
    for name, tensor in trainer.engine.state():
        if trainer.world.is_main:
            state[name] = tensor.detach().to("cpu", copy=True)
    return state
