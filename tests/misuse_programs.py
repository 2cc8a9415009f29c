"""What loops do to a laid-out model that nobody planned for, in plain PyTorch and under a strategy on real ranks.

Each program is right (the weights and numbers of plain PyTorch), refused (one of our errors), or fails loudly with an
error of PyTorch's. What must not happen is another result without a word.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch

import meshwright as mw
import misuse_by_rank
import misuse_of_gradients
import misuse_of_models
from loop_programs import LOOPS, Net, Side, batch
from meshwright.assemble.world import World
from meshwright.errors import MeshwrightError

ROUNDING = 2e-6
SMALL_DTYPES = 0.03
NEW = [*misuse_of_gradients.PROGRAMS, *misuse_of_models.PROGRAMS, *misuse_by_rank.PROGRAMS]
PROGRAMS: dict[str, Callable[[Side], Any]] = LOOPS | {program.__name__: program for program in NEW}

Outcome = tuple[str, Any, Any]
"""How it went ("done", "refused", "failed"), the state after it or the message, and what it told."""


def outcome_of(program: Callable[[Side], Any], side: Side) -> Outcome:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            told = program(side)
            return "done", {name: value.clone() for name, value in side.model.state_dict().items()}, told
    except MeshwrightError as error:
        return "refused", str(error), None
    except Exception as error:
        return "failed", f"{type(error).__name__}: {error}", None


def verdict(plain: Outcome, found: list[Outcome], strategy: str) -> str:
    """What became of a program on all ranks: "right", "refused", "fails" or "WRONG"."""
    kinds = {outcome for outcome, _, _ in found}
    if kinds != {"done"}:
        return "refused" if "refused" in kinds else "fails"
    return "right" if plain[0] == "done" and all(_is_right(plain, one, strategy) for one in found) else "WRONG"


def _is_right(plain: Outcome, found: Outcome, strategy: str) -> bool:
    low = "16" in strategy
    far = max(float((found[1][name] - value).abs().max()) for name, value in plain[1].items())
    told = max((abs(a - b) for a, b in zip(found[2] or (), plain[2] or (), strict=True)), default=0.0)
    return far < (SMALL_DTYPES if low else ROUNDING) and told < (SMALL_DTYPES if low else 1e-4)


def plainly(name: str) -> Outcome:
    """A program with nothing of ours in it."""
    torch.manual_seed(0)
    return outcome_of(PROGRAMS[name], Side(Net()))


def ready(world: World) -> None:
    """Nothing: the ranks are there."""


def under(world: World, strategy: str, name: str) -> Outcome:
    described: Any = {"sample": batch(0)[0], "tensor_plan": {"leave": "whole"}} if "=" in strategy else {}
    model = mw.parallelize(Net, strategy, seed=0, world=world, **described)
    if model.loop.loss_scale is not None:
        model.loop.loss_scale.value = 1024.0
    return outcome_of(PROGRAMS[name], Side(model, model.data_rank, model.data_ranks))
