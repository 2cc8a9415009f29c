"""`Job(on_gradient=...)`: the user's function on each gradient of the global batch."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from zlib import crc32

import torch

from meshwright.assemble.passes import Dropout
from meshwright.assemble.world import World
from meshwright.errors import JobError, Refused, one_line
from meshwright.facts.job import NamedParameters
from meshwright.facts.strategy import Strategy
from meshwright.recording.dtensor import is_dtensor
from meshwright.strategies.engine import Engine
from meshwright.strategies.norm import local

Hook = Callable[[str, torch.Tensor], torch.Tensor | None]
MOST = 2**20
"""Elements of the made-up gradients that a hook is tried on."""


@torch.no_grad()
def apply_hook(hook: Hook, parameters: NamedParameters, dropout: Dropout, step: int) -> None:
    """Replace the gradients that this rank holds by what the hook makes of them.

    Generators are seeded from the step and the name, so that ranks with copies of a gradient add the same noise.
    """
    for name, parameter in parameters.named():
        if parameter.grad is None:
            continue
        dropout.seed(step, crc32(name.encode()))
        own = local(parameter.grad)
        found = _result(hook, name, own)
        if found is not own:
            own.copy_(found)


def refuse_hook(hook: Hook, own: NamedParameters, engine: Engine, strategy: Strategy, world: World) -> None:
    """Raise if a strategy divides gradients, and the hook does something else to a part than to the whole.

    All ranks must call it: the ranks of a pipeline hold different parameters.
    """
    divided = [(n, p) for n, p in own.named() if is_dtensor(p) or engine.cut_of(n) is not None]
    reasons = world.gather(next((reason for name, p in divided if (reason := _differs(hook, name, p))), None))
    if found := next((reason for reason in reasons if reason), None):
        raise Refused(
            f"Job(on_gradient=...) {found}, and {strategy} divides gradients. Make it treat each element by itself, "
            "or use ddp or pp, where gradients are whole."
        )


def _differs(hook: Hook, name: str, parameter: torch.Tensor) -> str | None:
    """What the hook does that fails on parts: tried on a made-up gradient and on its halves along each dim."""
    shape = list(parameter.shape)
    if shape:
        shape[0] = max(1, min(shape[0], MOST // max(1, prod(shape[1:]))))
    generator = torch.Generator().manual_seed(0)
    gradient = torch.randn(shape, generator=generator)
    try:
        whole = _result(hook, name, gradient.clone())
        for dim, size in enumerate(shape):
            halves = [_result(hook, name, half.clone()) for half in gradient.split(max(1, -(-size // 2)), dim)]
            if not torch.equal(torch.cat(halves, dim), whole):
                return f"does something else to a part of the gradient of {name} than to the whole"
    except Exception as error:
        return f"cannot take a part of the gradient of {name} ({one_line(error).rstrip('.')})"
    return None


def _result(hook: Hook, name: str, gradient: torch.Tensor) -> torch.Tensor:
    found = hook(name, gradient)
    if found is None:
        return gradient
    if not isinstance(found, torch.Tensor) or found.shape != gradient.shape:
        got = tuple(found.shape) if isinstance(found, torch.Tensor) else type(found).__name__
        raise JobError(
            f"Job(on_gradient=...) must return None or a tensor of the gradient's shape {tuple(gradient.shape)}, "
            f"but for {name} it returned {got}."
        )
    return found
