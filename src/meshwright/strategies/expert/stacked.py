"""Experts as stacked weights: a rank keeps some of them, and runs the author's own module on the rows that arrive."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from meshwright.describe.experts import RoutedCall, read_call
from meshwright.errors import JobError
from meshwright.facts.model import ExpertFacts
from meshwright.recording.wrap_forward import wrap_forward
from meshwright.strategies.cuts import Cut, Cuts, narrow
from meshwright.strategies.expert.exchange import Route, find_even_route, find_route, is_fake, local_experts


def split_stacked(module: nn.Module, facts: ExpertFacts, counters: Mapping[str, int], mesh: DeviceMesh) -> Cuts:
    """Cut stacked weights to this rank's experts. `counters` are attributes that count experts, with new values."""
    cuts: Cuts = {}
    for attribute in [key for key, parameter in module._parameters.items() if parameter is not None]:
        cuts[f"{facts.module}.{attribute}"] = Cut(dim=0, mesh=mesh)
        narrow(module, attribute, cuts[f"{facts.module}.{attribute}"], {})
    for name, value in counters.items():
        setattr(module, name, value)
    wrap_forward(module, partial(_routed, name=facts.module, experts=facts.experts, mesh=mesh))
    return cuts


def _routed(
    module: nn.Module,
    forward: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    name: str,
    experts: int,
    mesh: DeviceMesh,
) -> torch.Tensor:
    call = read_call(args, kwargs)
    if call is None:
        raise JobError(f"{name} was called with other arguments than tokens, indices of experts and their weights.")
    order = call.index.reshape(-1).argsort(stable=True)
    route = _route(call, name, experts, mesh)
    rows = call.tokens.index_select(0, order // call.chosen)
    arrived = route.there(rows)
    weights = None if call.weights is None else route.there(call.weights.reshape(-1, 1).index_select(0, order))
    index = local_experts(route.arrived, arrived.device).to(call.index.dtype)
    results = route.back(call_local(forward, call, arrived, index, weights))
    return combine(results, order, call)


def _route(call: RoutedCall, name: str, experts: int, mesh: DeviceMesh) -> Route:
    if is_fake(mesh):
        return find_even_route(call.index.numel(), experts, mesh, call.index.device)
    counts = torch.bincount(call.index.reshape(-1), minlength=experts)
    if len(counts) > experts:
        raise JobError(f"{name} was called with an index of {len(counts) - 1}, but it has {experts} experts.")
    return find_route(counts, mesh)


def call_local(
    forward: Callable[..., Any],
    call: RoutedCall,
    tokens: torch.Tensor,
    index: torch.Tensor,
    weights: torch.Tensor | None,
) -> torch.Tensor:
    """The module's result for rows that use one expert each, given in the form of the author's call.

    Without rows it gets one of zeros: some modules cannot run on none, and parameters need a gradient on every rank.
    """
    rows = len(tokens)
    if not rows:
        tokens, index = F.pad(tokens, (0, 0, 0, 1)), F.pad(index, (0, 1))
        weights = None if weights is None else F.pad(weights, (0, 0, 0, 1))
    shape = (-1, 1) if call.index.dim() == 2 else (-1,)
    values = {call.keys[0]: tokens, call.keys[1]: index.view(shape)}
    if weights is not None and call.keys[2] is not None:
        values[call.keys[2]] = weights.view(shape)
    places = sorted(key for key in values if isinstance(key, int))
    named = {key: value for key, value in values.items() if isinstance(key, str)}
    result: torch.Tensor = forward(*(values[place] for place in places), **named)
    return result[:rows]


def combine(results: torch.Tensor, order: torch.Tensor, call: RoutedCall) -> torch.Tensor:
    """The sum over each token's experts, from results in the order in which rows were sent."""
    in_place = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    return results.index_select(0, in_place).view(len(call.tokens), call.chosen, *results.shape[1:]).sum(1)
