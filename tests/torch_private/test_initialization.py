"""Truncated normal distributions are drawn by one function, which can be replaced."""

from typing import Any

import torch
from torch import nn

from meshwright.torch_private.initialization import replaced_truncated_normal, truncated_normal


def test_it_is_what_the_public_function_calls() -> None:
    torch.manual_seed(0)
    expected = nn.init.trunc_normal_(torch.empty(64), std=0.02, a=-0.03, b=0.03)
    torch.manual_seed(0)
    found = torch.empty(64)
    truncated_normal(found, 0.0, 0.02, -0.03, 0.03)
    assert torch.equal(found, expected) and found.abs().max() <= 0.03


def test_another_function_can_take_its_place() -> None:
    calls: list[Any] = []

    def noted(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        calls.append((args, kwargs))
        return tensor

    generator = torch.Generator()
    with replaced_truncated_normal(noted):
        nn.init.trunc_normal_(torch.empty(4), 1.0, 2.0, -3.0, 3.0, generator=generator)
    ((args, kwargs),) = calls
    assert args[:4] == (1.0, 2.0, -3.0, 3.0)
    assert generator in (*args[4:], *kwargs.values())
    assert nn.init.trunc_normal_(torch.empty(4)).isfinite().all()
