"""The user's optimizer around a laid-out model: hooks on every step, and optimizers that were built too early."""

from __future__ import annotations

import copy
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from meshwright.assemble.check import refuse_optimizer
from meshwright.assemble.optimizer import refuse_coupled_shards
from meshwright.describe.optimizer import couplings
from meshwright.errors import JobError, Refused
from meshwright.facts.job import Job, NamedParameters
from meshwright.facts.lr_schedule import required
from meshwright.facts.model import ModelFacts
from meshwright.runtime.loop_states import sign_states
from meshwright.runtime.loose_parameters import OWNER, refuse_loose
from meshwright.runtime.own_loop import OwnLoop

MakeOptimizer = Callable[[NamedParameters], Optimizer]
_STRANGER = "_meshwright_stranger"
"""Attribute of parameters: why no optimizer may update them."""


_loops: weakref.WeakSet[OwnLoop] = weakref.WeakSet()


def claim(loop: OwnLoop) -> None:
    """Make every optimizer that updates this loop's parameters known to it."""
    _hook_steps()
    _loops.add(loop)
    ref = weakref.ref(loop)
    updated = {id(parameter) for parameter in loop.optimized}
    for parameter in loop.optimized:
        vars(parameter)[OWNER] = ref
        vars(parameter).pop(_STRANGER, None)
    for name, parameter in loop.engine.model.named_parameters():
        if parameter.requires_grad and id(parameter) not in updated:
            vars(parameter)[_STRANGER] = (
                f"The optimizer holds {name} of model.module, which {loop.strategy} does not update; build it from "
                "model.parameters(), or give it to mw.parallelize(optimizer=...)."
            )


def disown(parameters: dict[int, tuple[str, nn.Parameter]], loop: OwnLoop) -> None:
    """Mark the parameters that a model had before it was laid out, and does not have any more."""
    kept = {id(parameter) for _, parameter in loop.named()}
    for name, parameter in parameters.values():
        if id(parameter) not in kept:
            vars(parameter)[_STRANGER] = (
                f"The optimizer holds {name} as it was before mw.parallelize laid the model out, so it would train "
                "nothing; give it to mw.parallelize(optimizer=...), or build it from model.parameters() afterwards."
            )


@cache
def _hook_steps() -> None:
    register_optimizer_step_pre_hook(_before_step)
    register_optimizer_step_post_hook(_after_step)


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    loops = _loops_of(optimizer)
    refuse_loose(optimizer, [loop for loop, _ in loops], _loops)
    for loop, parameters in loops:
        if _needs_check(optimizer, loop):
            adopt(optimizer, loop)
        if loop.loss_scale is not None and (kwargs.get("closure") or any(callable(arg) for arg in args[1:])):
            raise JobError(
                f"optimizer.step(closure) computes gradients during the step, and {loop.strategy} must know before it "
                "whether they overflowed; call step() without a closure, or use bf16."
            )
        loop.before_step(parameters)


def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    for loop, _ in _loops_of(optimizer):
        loop.after_step()
        if loop.optimizer is None or loop.optimizer is optimizer:
            loop.steps += 1


def _loops_of(optimizer: Optimizer) -> list[tuple[OwnLoop, list[nn.Parameter]]]:
    """The loops whose parameters an optimizer updates, in the order of its groups."""
    found: dict[int, tuple[OwnLoop, list[nn.Parameter]]] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if reason := getattr(parameter, _STRANGER, ""):
                raise JobError(reason)
            ref = getattr(parameter, OWNER, None)
            if ref is not None and (loop := ref()) is not None:
                found.setdefault(id(loop), (loop, []))[1].append(parameter)
    return list(found.values())


_checked: weakref.WeakKeyDictionary[Any, weakref.WeakSet[Any]] = weakref.WeakKeyDictionary()


def _needs_check(optimizer: Optimizer, loop: OwnLoop) -> bool:
    return loop not in _checked.get(optimizer, ())


def adopt(optimizer: Optimizer, loop: OwnLoop) -> None:
    """Refuse an optimizer whose updates would be wrong on this rank's parts, and hook its `zero_grad`."""
    if loop not in _checked.setdefault(optimizer, weakref.WeakSet()):
        _checked[optimizer].add(loop)
        loop.updaters.add(optimizer)
        _refuse_coupled(optimizer, loop)
        _hook_zero_grad(optimizer, loop)
        sign_states(optimizer, loop)


def _refuse_coupled(optimizer: Optimizer, loop: OwnLoop) -> None:
    """All ranks must call it."""
    strategy = loop.strategy
    if not strategy.traits.shards and not strategy.axes:
        return
    if wanted := required(type(optimizer).step)[1:]:
        raise Refused(
            f"{type(optimizer).__name__}.step({wanted[0].name}) compares sums over all parameters, of which a rank of "
            f"{strategy} has parts; use ddp, or an optimizer like AdamW."
        )
    job = _job(rebuilt(optimizer, {id(p): name for name, p in loop.optimized.named()}))
    found = couplings(job, _WithoutWeights(loop.facts))
    if reason := refuse_optimizer(found, strategy):
        raise Refused(reason)
    refuse_coupled_shards(job, found, loop.optimized, strategy)


class _WithoutWeights(nn.Module):
    """A module that has nothing of a model but the names and shapes of its parameters."""

    def __init__(self, facts: ModelFacts) -> None:
        super().__init__()
        self._facts = facts

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        for one in self._facts.parameters:
            yield one.name, nn.Parameter(torch.empty(one.shape, device="meta"), requires_grad=one.trainable)


def _job(optimizer: MakeOptimizer) -> Job:
    """A job of which only the optimizer counts."""
    return Job(model=nn.Module, inputs=tuple, loss=lambda *_: (torch.zeros(()), 1), optimizer=optimizer, global_batch=1)


def rebuilt(optimizer: Optimizer, names: dict[int, str]) -> MakeOptimizer:
    """A function that makes such an optimizer for other parameters of the same names."""

    def make(parameters: NamedParameters) -> Optimizer:
        others = dict(parameters.named())
        memo: dict[int, Any] = {}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                other = others.get(names.get(id(parameter), ""))
                memo[id(parameter)] = nn.Parameter(torch.empty(0)) if other is None else other
        # Not by its class, whose arguments are unknown, and without what a schedule or we put on the instance.
        blank: Optimizer = object.__new__(type(optimizer))
        vars(blank).update({key: value for key, value in vars(optimizer).items() if key not in ("step", "zero_grad")})
        blank.param_groups = copy.deepcopy(optimizer.param_groups, memo)
        blank.state = defaultdict(dict)
        return blank

    return make


def _hook_zero_grad(optimizer: Optimizer, loop: OwnLoop) -> None:
    """An optimizer has hooks for steps, but none for `zero_grad`."""
    clear, ref = optimizer.zero_grad, weakref.ref(loop)

    def zero_grad(set_to_none: bool = True) -> None:
        if (own := ref()) is not None:
            own.before_zero_grad()
        clear(set_to_none)

    optimizer.zero_grad = zero_grad  # type: ignore[method-assign]


def take_over(
    given: Optimizer | MakeOptimizer, loop: OwnLoop, before: dict[int, tuple[str, nn.Parameter]]
) -> Optimizer:
    """The optimizer for the laid-out model: made by the user's function, or the user's with its parameters replaced.

    `before` are the parameters that the model had before, by identity.
    """
    optimizer = (
        _with_parameters_replaced(given, loop, before) if isinstance(given, Optimizer) else given(loop.optimized)
    )
    if not isinstance(optimizer, Optimizer):
        raise JobError(
            f"mw.parallelize(optimizer=...) takes a torch optimizer, or a function from parameters to one, but it gave "
            f"{type(optimizer).__name__}."
        )
    adopt(optimizer, loop)
    loop.optimizer = optimizer
    return optimizer


def _with_parameters_replaced(
    optimizer: Optimizer, loop: OwnLoop, before: dict[int, tuple[str, nn.Parameter]]
) -> Optimizer:
    kind = type(optimizer).__name__
    if optimizer.state:
        raise JobError(
            f"The {kind} given to mw.parallelize has state already, of the parameters that the model had before it was "
            "laid out; give a function instead, optimizer=lambda params: ..., and load state afterwards."
        )
    now = dict(loop.named())
    for group in optimizer.param_groups:
        strange = [p for p in group["params"] if id(p) not in before]
        if strange:
            raise JobError(
                f"The {kind} given to mw.parallelize holds a parameter of shape {tuple(strange[0].shape)} that is not "
                "the model's. Lay out all models first, and then build one optimizer from their parameters()."
            )
        names = [before[id(parameter)][0] for parameter in group["params"]]
        group["params"] = [now[name] for name in names if name in now]  # another stage may hold it
    return optimizer
