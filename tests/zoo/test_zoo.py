"""Models of every habit train as plain PyTorch does, or are refused by name.

All of them under all strategies take half an hour: `python benchmarks/zoo_check.py` (docs/zoo.md).
"""

import inspect
import json
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from rank_pool import RankPool
from zoo.catalogue import STRATEGIES, ZOO, case_of, ranks_of
from zoo.judge import Course, first_difference
from zoo.programs import examine

PAIRS = [(name, STRATEGIES[number % len(STRATEGIES)]) for number, name in enumerate(ZOO)]
"""Each model under one strategy, each strategy with several models."""
BASES = {"RNNBase", "RNNCellBase"}
"""Nobody makes these themselves."""


RECORDED = Path(__file__).parents[2] / "docs/data/zoo.json"


@cache
def recorded() -> dict[tuple[str, str], str]:
    """What `benchmarks/zoo_check.py` found last."""
    if not RECORDED.exists():
        return {}
    return {(row["model"], row["strategy"]): row["verdict"] for row in json.loads(RECORDED.read_text())["results"]}


def check(name: str, strategy: str, pool: RankPool | None) -> None:
    outcome = examine(case_of(name), strategy, pool)
    assert outcome.verdict in ("equal", "refused"), outcome
    assert outcome.verdict == recorded().get((name, strategy), outcome.verdict), outcome
    if words := ZOO[name].refused.get(strategy):
        assert outcome.verdict == "refused" and re.search(words, outcome.reason), outcome


SLOW_TO_BUILD = "spectral_norm"
"""Recording its builder takes time with the square of its layers; `test_a_strategy_is_plain_pytorch` has it too."""
SOME = {name for number, name in enumerate(ZOO) if number % 2 == 0} - {SLOW_TO_BUILD}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in SOME else pytest.mark.thorough) for name in ZOO]
)
def test_single_is_plain_pytorch(name: str) -> None:
    check(name, "single", None)


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "strategy"), PAIRS)
def test_a_strategy_is_plain_pytorch(two_ranks: RankPool, four_ranks: RankPool, name: str, strategy: str) -> None:
    check(name, strategy, four_ranks if ranks_of(strategy) == 4 else two_ranks)


@pytest.mark.thorough
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", ZOO)
def test_every_strategy_is_plain_pytorch(two_ranks: RankPool, four_ranks: RankPool, name: str, strategy: str) -> None:
    check(name, strategy, four_ranks if ranks_of(strategy) == 4 else two_ranks)


def has_parameters(kind: type[nn.Module]) -> bool:
    """Whether a class of torch.nn, or one that it is made of, creates a parameter."""
    parents = [parent for parent in kind.__mro__ if issubclass(parent, nn.Module) and parent is not nn.Module]
    return any(re.search(r"Parameter\(", inspect.getsource(parent)) for parent in parents)


def test_every_layer_with_parameters_is_in_the_zoo() -> None:
    layers = {kind for kind in vars(nn).values() if inspect.isclass(kind) and issubclass(kind, nn.Module)}
    found: set[type] = set()
    for entry in ZOO.values():
        if entry.family in ("layers", "recurrent", "forwards"):
            watch(entry.make().model, found)
    assert {kind.__name__ for kind in layers - found if has_parameters(kind)} - BASES == set()


def watch(build: Callable[[], nn.Module], found: set[type]) -> None:
    """Note the class of every module that a builder makes: a lazy one has another when it is done."""
    original = nn.Module.__init__

    def noted(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        found.add(type(self))
        original(self, *args, **kwargs)

    nn.Module.__init__ = noted  # type: ignore[method-assign]
    try:
        build()
    finally:
        nn.Module.__init__ = original  # type: ignore[method-assign]


def test_a_wrong_number_is_found() -> None:
    """The judge can fail: by a bit at the start, a gradient, a loss, an end, a missing name."""
    values = {"w": torch.ones(3, dtype=torch.float64).numpy()}
    plain = Course(start=values, unsaved=values, gradients=values, losses=[1.0], end=values)
    assert first_difference(plain, plain) is None
    for part in ("start", "unsaved", "gradients", "end"):
        wrong = Course(**{**vars(plain), part: {"w": values["w"] * (1 + 1e-4)}})
        assert first_difference(plain, wrong), part
    assert first_difference(plain, Course(**{**vars(plain), "losses": [1.00001]}))
    assert first_difference(plain, Course(**{**vars(plain), "end": {}}))
