"""Small state as JSON and back: exact, and nothing that is lost goes unnoticed."""

import json
import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import SGD, Optimizer, lr_scheduler

from meshwright.checkpoint.json_state import decode, encode
from meshwright.errors import CheckpointError


def sequential(optimizer: Optimizer) -> lr_scheduler.SequentialLR:
    parts = [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2), lr_scheduler.ExponentialLR(optimizer, 0.9)]
    return lr_scheduler.SequentialLR(optimizer, parts, milestones=[2])


def chained(optimizer: Optimizer) -> lr_scheduler.ChainedScheduler:
    parts = [lr_scheduler.ConstantLR(optimizer, 0.1, 3), lr_scheduler.MultiStepLR(optimizer, [2, 2, 4])]
    return lr_scheduler.ChainedScheduler(parts, optimizer)


SCHEDULES: dict[str, Callable[[Optimizer], Any]] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, [lambda step: 1 / (step + 1), lambda step: 0.9**step]),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda step: 0.95),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2, gamma=1 / 3),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [1, 3, 3, 5]),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, 1 / 3, total_iters=3),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, 1 / 7, total_iters=5),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.97),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 5, eta_min=1e-5),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2, 2),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 6, power=0.7),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, [0.1, 0.2], total_steps=12),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=2, mode="exp_range", gamma=0.9),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0, threshold=1e-3),
    "SequentialLR": sequential,
    "ChainedScheduler": chained,
}
OF_TORCH = {
    name
    for name, kind in vars(lr_scheduler).items()
    if isinstance(kind, type) and (name.endswith("LR") or issubclass(kind, lr_scheduler.LRScheduler))
}
NEED_MORE = {"LRScheduler", "_LRScheduler", "_LRSchedulerTest"}


def make(name: str) -> tuple[Optimizer, Any]:
    groups = [{"params": [nn.Parameter(torch.ones(2))], "lr": 0.1}, {"params": [nn.Parameter(torch.ones(3))]}]
    optimizer = SGD(groups, lr=0.03, momentum=0.9)
    return optimizer, SCHEDULES[name](optimizer)


def step(optimizer: Optimizer, schedule: Any) -> list[float]:
    optimizer.step()
    if isinstance(schedule, lr_scheduler.ReduceLROnPlateau):
        schedule.step(1.0)
    else:
        schedule.step()
    return [group["lr"] for group in optimizer.param_groups]


def through_json(value: Any) -> Any:
    """As it is kept: in JSON as everybody reads it, without Python's own NaN and Infinity."""
    return decode(json.loads(json.dumps(encode(value, "it"), allow_nan=False)))


def same(one: Any, other: Any) -> bool:
    """Also of the same type, and NaN is NaN."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if torch.is_tensor(one):
        return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)
    if isinstance(one, float):
        return one.hex() == other.hex()
    return bool(one == other)


def test_every_schedule_of_torch_is_here() -> None:
    assert OF_TORCH - NEED_MORE - set(SCHEDULES) == set()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules(name: str) -> None:
    """What comes back is the same, and a new schedule goes on from it to the same numbers, exactly."""
    optimizer, schedule = make(name)
    for _ in range(4):
        step(optimizer, schedule)
    state = {key: value for key, value in schedule.state_dict().items()}
    kept = through_json(state)
    assert same(kept, state)
    again, other = make(name)
    other.load_state_dict(kept)
    for old, new in zip(optimizer.param_groups, again.param_groups, strict=True):
        new.update({key: value for key, value in through_json(_numbers(old)).items()})
    for _ in range(6):
        assert step(again, other) == step(optimizer, schedule)


def _numbers(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


@pytest.mark.parametrize(
    "value",
    [
        *(None, True, False, 0, -1, 2**63, -(2**80), "", 'naïve \u2028 \\ " text', [], [[]], (), ((),), {}, {"": {}}),
        *(0.1, -0.0, 5e-324, 1.7976931348623157e308, 1 / 3, math.pi, math.inf, -math.inf, math.nan),
        *({1: "a", "1": "b"}, {(1, 2): 3, 1.5: [4]}, {None: 1, True: 2}, Counter({3: 2, 5: 1}), Counter()),
        *([1, (2, [3, (4,)])], {"tuple": 1, "dict": 2, "tensor": 3, "counter": {}, "float": "inf"}),
        *({"betas": (0.9, 0.999), "lr": 1e-3, "weight_decay": 0, "maximize": False, "foreach": None}),
    ],
    ids=repr,
)
def test_values(value: Any) -> None:
    assert same(through_json(value), value)


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16", "int64", "bool"])
@pytest.mark.parametrize("value", [0, 1, 3])
def test_tensors_of_one_number(dtype: str, value: int) -> None:
    """A learning rate may be one."""
    kind: torch.dtype = getattr(torch, dtype)
    tensor = torch.tensor(value / 3 if kind.is_floating_point else value, dtype=kind)
    assert same(through_json(tensor), tensor)


@pytest.mark.parametrize("value", [math.inf, -math.inf, [0.1], [[1.0]]])
def test_tensors_keep_infinity_and_dims(value: Any) -> None:
    assert same(through_json(torch.tensor(value)), torch.tensor(value))


@pytest.mark.parametrize("value", [np.float64(0.1), np.float32("inf"), np.int64(3), np.bool_(True)])
def test_numbers_of_numpy(value: Any) -> None:
    """As milestones from an array are."""
    assert same(through_json({"milestones": Counter({value: 1})}), {"milestones": Counter({value.item(): 1})})


def test_floats_are_exact() -> None:
    numbers = torch.randn(1000, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).exp().tolist()
    assert through_json(numbers) == numbers


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (object(), "object"),
        ({1, 2}, "set"),
        (b"bytes", "bytes"),
        (1 + 2j, "complex"),
        (torch.ones(2), "Tensor"),
        (torch.tensor(1j), "complex"),
        (lambda: None, "function"),
        (np.ones(2), "ndarray"),
        (range(3), "range"),
    ],
)
def test_what_cannot_be_kept_is_named(value: Any, kind: str) -> None:
    with pytest.raises(CheckpointError, match=rf"The schedule\.base_lrs\.inner holds a {kind}, .* cannot store"):
        encode({"base_lrs": {"inner": [1, (value,)]}}, "The schedule")


def test_a_key_that_cannot_be_kept() -> None:
    with pytest.raises(CheckpointError, match="The schedule holds a object"):
        encode({object(): 1}, "The schedule")
