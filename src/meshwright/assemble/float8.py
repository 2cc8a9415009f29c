"""`fp8`: large linear layers multiply in float8, forward and backward; everything else is as under `bf16`.

This file says which layers these are. `strategies/float8_linear.py` has their arithmetic.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from functools import lru_cache
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.describe.dtypes import LOW
from meshwright.facts.model import ModelFacts
from meshwright.facts.strategy import Strategy
from meshwright.recording.wrap_forward import Around, wrap_forward
from meshwright.strategies.float8_linear import ALIGNED, float8_linear
from meshwright.torch_private.modules import AttentionOutput

Linear = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""(input, weight, bias) -> output."""
SMALLEST = 1 << 22
"""Elements of a weight from which rounding is taken to pay for itself: 2048 x 2048.

With 8192 rows, the products of such a layer save 0.12 of 0.30 ms on an H200 (docs/data/float8_gpu.json). What rounding
costs was not timed beside them, and smaller layers were not timed."""
CAPABILITY = (8, 9)
"""The compute capability from which GPUs multiply float8 matrices: Ada, Hopper and later."""


def gpus_have_float8() -> bool:
    """Whether this machine's GPUs multiply float8 matrices; True without GPUs, for plans. (CPUs do, though slowly.)"""
    return not torch.cuda.is_available() or torch.cuda.get_device_capability() >= CAPABILITY


def layers_in_float8(model: nn.Module, facts: ModelFacts, strategy: Strategy) -> list[str]:
    """Names of the layers that a strategy multiplies in float8."""
    parts = prod(term.size for term in strategy.inner_axes)
    return float8_layers(model, facts, parts) if strategy.number_format.factors else []


def float8_layers(model: nn.Module, facts: ModelFacts, parts: int = 1) -> list[str]:
    """Names of the linear layers that multiply in float8, if each may be divided into some parts.

    The first and the last layers are sensitive, so those before the first block and after the last one stay in bf16; in
    a model without blocks, the first and the last one. So does a weight that is also used elsewhere, as an embedding.
    """
    uses = Counter(id(p) for module in model.modules() for p in module._parameters.values() if p is not None)
    linear = {name: module for name, module in model.named_modules() if is_plain_linear(module)}
    between = _between_first_and_last(facts, linear)
    return [
        name
        for name, module in linear.items()
        if between(name)
        and _pays(module, parts)
        and uses[id(module._parameters["weight"])] == 1
        and f"{name}.weight" not in facts.read_elsewhere
    ]


def _between_first_and_last(facts: ModelFacts, linear: Collection[str]) -> Callable[[str], bool]:
    """Whether a layer is in a block, or called between the first and the last of the model."""
    called = list(dict.fromkeys(call.name for call in facts.calls))
    ends = {name for name in (*called[:1], *called[-1:]) if name in linear}
    if facts.blocks:
        places = [place for place, name in enumerate(called) if name in facts.blocks]
        inner = set(called[places[0] : places[-1] + 1]) if places else set(facts.blocks)
    else:
        inner = set([name for name in called if name in linear][1:-1])
    return lambda name: name not in ends and (name in inner or any(name.startswith(f"{b}.") for b in facts.blocks))


def is_plain_linear(module: nn.Module) -> bool:
    """Whether calls of a module are one product with its own weight."""
    # PyTorch's attention has a subclass whose weight it reads without calling it.
    plain = isinstance(module, nn.Linear) and not isinstance(module, AttentionOutput)
    plain = plain and type(module).forward is nn.Linear.forward
    return plain and module._parameters.get("weight") is not None


def _pays(module: nn.Module, parts: int) -> bool:
    weight = module._parameters["weight"]
    assert weight is not None
    return weight.numel() >= SMALLEST and not any(side % (ALIGNED * parts) for side in weight.shape)


def multiply_in_float8(model: nn.Module, names: Sequence[str], linear: Linear = float8_linear) -> None:
    """Make calls of these layers multiply in float8.

    This comes before an inner axis is applied, which hands the layer parts of its weight and knows a `linear` for them.
    """
    for name in names:
        wrap_forward(model.get_submodule(name), _multiplying_by(linear))


@lru_cache(maxsize=16)
def _multiplying_by(linear: Linear) -> Around:
    def multiply(module: Any, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if len(args) != 1 or kwargs or args[0].dtype not in (torch.float32, *LOW):
            return forward(*args, **kwargs)
        return linear(args[0], module.weight, module.bias)

    return multiply
