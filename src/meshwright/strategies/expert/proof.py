"""Prove by values that stacked experts may be divided: a token's result depends on it, its indices and weights alone.

The author's module runs whole on a few random tokens, and then as the ranks would run it: cut to some experts, on the
rows of these. Results and every gradient must agree. A large module is shrunk first: all widths by one factor, with the
attributes that name them.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import gcd
from typing import Any

import torch
from torch import nn

from meshwright.describe.experts import RoutedCall
from meshwright.errors import one_line
from meshwright.facts.model import ExpertFacts
from meshwright.recording.seeding import seed_torch
from meshwright.strategies.expert.stacked import call_local, combine
from meshwright.torch_private.modes import outside_of_modes

TOKENS = 13
LARGE = 1 << 20
"""A module with more elements is shrunk."""
NARROW = 4
"""The smallest width of a shrunk module."""
CLOSE = {torch.float64: 1e-9, torch.float32: 1e-4}
"""The relative differences that rounding may make. Grouped products have no float64."""

_proved: dict[Any, Proof] = {}


@dataclass(frozen=True, kw_only=True)
class Proof:
    counters: Mapping[str, int]
    """The module's attributes that count experts, with their values for a rank's share."""
    failed: str = ""
    """Why the experts cannot be divided; empty if they can."""


def prove(module: nn.Module, facts: ExpertFacts, ranks: int) -> Proof:
    """Whether a module without values can be divided over ranks, and which of its attributes change."""
    if facts.experts % ranks:
        return Proof(counters={}, failed=f"{facts.module} has {facts.experts} experts, which {ranks} do not divide")
    if any(True for _ in module.buffers()):
        return Proof(counters={}, failed=f"{facts.module} has buffers, which may belong to its experts")
    if any(True for child in module.children() for _ in child.parameters()):
        return Proof(counters={}, failed=f"{facts.module} has modules with parameters beside its stacked weights")
    key = _key(module, facts, ranks)
    if key not in _proved:
        with outside_of_modes(), torch.random.fork_rng(devices=[]), torch.enable_grad():
            seed_torch(0)
            _proved[key] = _prove(module, facts, ranks)
    return _proved[key]


def _key(module: nn.Module, facts: ExpertFacts, ranks: int) -> Any:
    shapes = tuple((name, tuple(p.shape)) for name, p in module.named_parameters())
    numbers = tuple((k, v) for k, v in vars(module).items() if isinstance(v, int | float | str))
    form = (facts.experts, facts.chosen, facts.width, facts.weighted)
    return type(module).__qualname__, type(module).__module__, shapes, numbers, form, ranks


def _prove(module: nn.Module, facts: ExpertFacts, ranks: int) -> Proof:
    reason, factor = "", _factor(module, facts)
    for dtype in CLOSE:
        for counters in _counters(module, facts, ranks):
            try:
                reason = _Trial(module, facts, ranks, factor, dtype).differs(counters)
            except Exception as error:
                reason = f"it cannot be run so: {one_line(error).removesuffix('.')}"
            if not reason:
                return Proof(counters=counters)
    return Proof(counters={}, failed=f"{facts.module} cannot be divided by experts: {reason}")


def _factor(module: nn.Module, facts: ExpertFacts) -> int:
    """By what the widths of a large module are divided; 1 for a small one."""
    sizes = _widths(module, facts)
    if sum(p.numel() for p in module.parameters()) <= LARGE:
        return 1
    common = gcd(*sizes)
    return max(n for n in range(1, common + 1) if common % n == 0 and (n == 1 or min(sizes) // n >= NARROW))


def _widths(module: nn.Module, facts: ExpertFacts) -> set[int]:
    return {size for p in module.parameters() for size in p.shape[1:] if size > 1} | {facts.width}


def _counters(module: nn.Module, facts: ExpertFacts, ranks: int) -> Iterator[dict[str, int]]:
    """Attributes that may count experts: those whose name says so, all of that value, or none."""
    equal = [k for k, v in vars(module).items() if type(v) is int and v == facts.experts]
    named = [name for name in equal if "expert" in name.lower()]
    seen: list[list[str]] = []
    for names in (named, equal, []):
        if names not in seen:
            seen.append(names)
            yield {name: facts.experts // ranks for name in names}


class _Trial:
    """A module with random values, whole and in parts, on tokens that choose experts at random."""

    def __init__(self, module: nn.Module, facts: ExpertFacts, ranks: int, factor: int, dtype: torch.dtype) -> None:
        self._facts, self._ranks, self._dtype = facts, ranks, dtype
        self._module = _shrunk(module, _widths(module, facts), factor, dtype)
        for parameter in self._module.parameters():
            nn.init.normal_(parameter.data)
        self._width = facts.width // factor

    def differs(self, counters: Mapping[str, int]) -> str:
        """What differs between the whole module and its parts; empty if nothing does."""
        close = CLOSE[self._dtype]
        for index in (self._scattered(), self._gathered()):
            whole, parts = self._run_whole(index), self._run_parts(index, counters)
            for (what, one), other in zip(whole.items(), parts.values(), strict=True):
                if one.shape != other.shape or not torch.allclose(one, other, rtol=close, atol=close * _size(one)):
                    return f"{what} is another one if each rank computes the rows of its own experts"
        return ""

    def _scattered(self) -> torch.Tensor:
        """Each token chooses different experts at random."""
        scores = torch.rand(TOKENS, self._facts.experts)
        return scores.topk(self._facts.chosen).indices

    def _gathered(self) -> torch.Tensor:
        """All tokens choose the first experts, so that most ranks have no rows."""
        return torch.arange(self._facts.chosen).expand(TOKENS, -1).contiguous()

    def _call(self, index: torch.Tensor) -> RoutedCall:
        generator = torch.Generator().manual_seed(1)
        form: Any = {"generator": generator, "dtype": self._dtype, "requires_grad": True}
        tokens = torch.randn(TOKENS, self._width, **form)
        weights = torch.rand(TOKENS, self._facts.chosen, **form)
        flat = self._facts.chosen == 1 and not self._facts.weighted
        given = weights if self._facts.weighted else None
        return RoutedCall(tokens, index.view(-1) if flat else index, given, (0, 1, 2 if self._facts.weighted else None))

    def _run_whole(self, index: torch.Tensor) -> dict[str, torch.Tensor]:
        call = self._call(index)
        self._module.zero_grad()
        given = (call.tokens, call.index) if call.weights is None else (call.tokens, call.index, call.weights)
        output = self._module(*given)
        return _results(output, call, [dict(self._module.named_parameters())])

    def _run_parts(self, index: torch.Tensor, counters: Mapping[str, int]) -> dict[str, torch.Tensor]:
        call, own = self._call(index), self._facts.experts // self._ranks
        flat = call.index.reshape(-1)
        order = flat.argsort(stable=True)
        found, cut = [], []
        for rank in range(self._ranks):
            part = _cut(self._module, self._facts.experts, rank * own, own, counters)
            rows = order[(flat[order] >= rank * own) & (flat[order] < (rank + 1) * own)]
            rows = rows[torch.randperm(len(rows))]
            weights = None if call.weights is None else call.weights.reshape(-1, 1)[rows]
            local = flat[rows] - rank * own
            results = call_local(part, call, call.tokens[rows // call.chosen], local, weights)
            found.append((rows, results))
            cut.append(dict(part.named_parameters()))
        order, results = torch.cat([rows for rows, _ in found]), torch.cat([each for _, each in found])
        return _results(combine(results, order, call), call, cut)


def _results(output: torch.Tensor, call: RoutedCall, parts: list[dict[str, nn.Parameter]]) -> dict[str, torch.Tensor]:
    """The output and the gradients of everything, those of parts joined."""
    generator = torch.Generator().manual_seed(2)
    (output * torch.randn(output.shape, generator=generator, dtype=output.dtype)).sum().backward()
    found = {"its output": output.detach(), "the gradient of its tokens": _gradient(call.tokens)}
    if call.weights is not None:
        found["the gradient of the weights"] = _gradient(call.weights)
    for name in parts[0]:
        own = [_gradient(part[name]) for part in parts]
        found[f"the gradient of {name}"] = torch.cat(own)
    return found


def _gradient(tensor: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(tensor) if tensor.grad is None else tensor.grad


def _size(tensor: torch.Tensor) -> float:
    return max(1.0, float(tensor.abs().max())) if tensor.numel() else 1.0


def _shrunk(module: nn.Module, widths: set[int], factor: int, dtype: torch.dtype) -> nn.Module:
    """A copy on the CPU, without values, whose widths are divided."""
    small = copy.deepcopy(module)
    for part in small.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None:
                shape = [parameter.shape[0], *(s // factor if s in widths else s for s in parameter.shape[1:])]
                part._parameters[name] = nn.Parameter(torch.empty(shape, dtype=dtype, device="cpu"))
        if isinstance(part, nn.Dropout):
            part.p = 0.0  # what is random cannot be compared
        for name, value in vars(part).items():
            if type(value) is int and value in widths and factor > 1 and "expert" not in name.lower():
                setattr(part, name, value // factor)
    return small.train()


def _cut(module: nn.Module, experts: int, first: int, count: int, counters: Mapping[str, int]) -> nn.Module:
    """A copy with `count` of the experts."""
    part = copy.deepcopy(module)
    for name, parameter in part._parameters.items():
        if parameter is not None and parameter.shape[0] == experts:
            part._parameters[name] = nn.Parameter(parameter.data[first : first + count].clone())
    for name, value in counters.items():
        setattr(part, name, value)
    part.zero_grad()
    return part
