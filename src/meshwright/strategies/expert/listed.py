"""Experts as modules of a list: a rank keeps some of them, and the author's code runs unchanged around all of them.

The module that calls the experts runs twice. The first time each call notes its rows and returns zeros. Then the rows
are sent to the ranks of their experts, computed there and sent back. The second time each call returns these results.
What the author computes around the experts (the router) runs twice, so it must be cheap beside them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from meshwright.errors import JobError
from meshwright.facts.model import ExpertFacts, ModelFacts
from meshwright.recording.wrap_forward import wrap_forward
from meshwright.strategies.cuts import Cuts, Owned, narrow
from meshwright.strategies.expert.exchange import Route, find_even_route, find_route, is_fake


def refuse_listed(model: nn.Module, mixture: ExpertFacts, facts: ModelFacts) -> str:
    """Why a list of experts cannot be divided; empty if it can."""
    modules = model.get_submodule(mixture.module)
    if any(True for _ in modules.buffers()):
        return f"the experts of {mixture.module} have buffers, which every rank would change by itself"
    if any(not parameter.shape for parameter in modules.parameters()):
        return f"the experts of {mixture.module} have scalar parameters"
    inside = f"{mixture.caller}." if mixture.caller else ""
    if moved := [state.name for state in facts.moved if state.name.startswith(inside)]:
        return f"{mixture.caller} runs twice in each pass, and it changes {moved[0]} each time"
    return ""


def split_listed(modules: nn.Module, caller: nn.Module, facts: ExpertFacts, mesh: DeviceMesh) -> Cuts:
    """Give each rank some of the modules; the others keep their names and have empty parameters."""
    cuts: Cuts = {}
    calls = ExpertCalls(facts, mesh)
    per_rank = facts.experts // mesh.size()
    for number, expert in enumerate(modules.children()):
        for prefix, module in expert.named_modules():
            for name, parameter in list(module._parameters.items()):
                if parameter is None:
                    continue
                path = ".".join(part for part in (facts.module, str(number), prefix, name) if part)
                cuts[path] = Owned(mesh=mesh, owner=number // per_rank, shape=tuple(parameter.shape))
                narrow(module, name, cuts[path], {})
        wrap_forward(expert, partial(calls.of_expert, number=number))
    calls.modules = list(modules.children())
    wrap_forward(caller, calls.of_caller)
    return cuts


class ExpertCalls:
    """The calls of one list of experts, as they are noted, computed and answered."""

    def __init__(self, facts: ExpertFacts, mesh: DeviceMesh) -> None:
        self._facts, self._mesh = facts, mesh
        self.modules: list[nn.Module] = []
        self._noted: dict[int, torch.Tensor] | None = None
        self._answers: dict[int, torch.Tensor] | None = None
        self._checked = False

    def of_expert(
        self, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any, *, number: int
    ) -> torch.Tensor:
        if self._noted is not None:
            self._noted[number] = args[0]
            return torch.zeros_like(args[0])
        if self._answers is not None:
            self._check(number, args[0])
            return self._answers[number]
        return forward(*args, **kwargs)  # type: ignore[no-any-return]

    def of_caller(self, caller: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        with _same_draws(), _same_lists(caller):
            self._noted = {}
            try:
                forward(*args, **kwargs)
                noted = self._noted
            finally:
                self._noted = None
        if not noted:
            raise JobError(f"{self._facts.caller} called none of its experts in {self._facts.module}.")
        self._inputs, self._answers = noted, self._compute(noted)
        try:
            return forward(*args, **kwargs)
        finally:
            self._answers, self._inputs, self._checked = None, {}, True

    def _check(self, number: int, rows: torch.Tensor) -> None:
        """The rows must be those of the first run, in which experts returned zeros."""
        noted = self._inputs.get(number)
        same = noted is not None and noted.shape == rows.shape
        if same and not self._checked and not is_fake(self._mesh):
            assert noted is not None
            same = torch.equal(noted, rows)
        if not same:
            raise JobError(
                f"The rows for expert {number} of {self._facts.module} depend on the results of other experts, so ep "
                "cannot compute them on different ranks; use ddp or fsdp."
            )

    def _compute(self, noted: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        """Every expert's results for this rank's rows; local experts compute the rows of all ranks."""
        like = next(iter(noted.values()))
        rows = [noted.get(number, like[:0]) for number in range(self._facts.experts)]
        counts = [len(each) for each in rows]
        if is_fake(self._mesh):
            route = find_even_route(sum(counts), len(counts), self._mesh, like.device)
        else:
            route = find_route(torch.tensor(counts, device=like.device), self._mesh)
        results = route.back(self._run_local(route.there(torch.cat(rows)), route))
        return dict(enumerate(results.split(counts)))

    def _run_local(self, arrived: torch.Tensor, route: Route) -> torch.Tensor:
        """The results of the rows that arrived, in their order. An expert without rows does not run."""
        first = self._mesh.get_local_rank() * len(route.arrived[0])
        parts = arrived.split([sum(own) for own in route.arrived])
        pieces = [list(part.split(list(own))) for part, own in zip(parts, route.arrived, strict=True)]
        for place, expert in enumerate(self.modules[first : first + len(route.arrived[0])]):
            own = [piece[place] for piece in pieces]
            if sum(map(len, own)):
                results = expert(torch.cat(own)).split([len(each) for each in own])
                for piece, result in zip(pieces, results, strict=True):
                    piece[place] = result
        found = torch.cat([each for piece in pieces for each in piece])
        if torch.is_grad_enabled() and not found.requires_grad:  # other ranks send gradients back, if this one has none
            return found.detach().requires_grad_()
        return found


@contextmanager
def _same_draws() -> Iterator[None]:
    """Restore the generators, so that the second run draws what the first did."""
    host = torch.get_rng_state()
    device = torch.cuda.get_rng_state() if torch.cuda.is_available() and torch.cuda.is_initialized() else None
    try:
        yield
    finally:
        torch.set_rng_state(host)
        if device is not None:
            torch.cuda.set_rng_state(device)


@contextmanager
def _same_lists(caller: nn.Module) -> Iterator[None]:
    """Restore lists that the caller and its modules keep, such as one of auxiliary losses."""
    kept = (value for module in caller.modules() for value in vars(module).values() if type(value) is list)
    lists = [(value, list(value)) for value in kept]
    try:
        yield
    finally:
        for value, before in lists:
            value[:] = before
