"""The norm that PyTorch's clipping computes, for gradients of which a rank holds parts.

`torch.nn.utils.clip_grad_norm_` gets plain tensors under tp, op and pp, and cannot know that they are parts. It asks
here for the norm: this finds the gradients among those of all models in user loops, and sums over the ranks that hold
the rest. DTensors know their layout themselves, but PyTorch would return a norm that reads as this rank's.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from math import inf, isfinite
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from meshwright.errors import Refused
from meshwright.recording.dtensor import is_dtensor
from meshwright.strategies.norm import global_square, local, scale_
from meshwright.torch_private.clipping import Scaling, TotalNorm, wrap_clipping


@dataclass(frozen=True)
class Part:
    """How a gradient counts in a norm."""

    meshes: tuple[DeviceMesh, ...] = ()
    """The axes whose ranks hold the other parts, besides the mesh of a DTensor."""
    counts: bool = True
    """False if another stage holds the same parameter and counts it."""


class HoldsParts(Protocol):
    def gradient_parts(self) -> Iterable[tuple[torch.Tensor, Part]]:
        """The gradients of a model of which other ranks hold further parts."""

    def before_norm(self) -> None:
        """Called before a norm of these gradients is summed over the ranks."""


_holders: weakref.WeakSet[Any] = weakref.WeakSet()
_wrapped = False


def serve_clipping(holder: HoldsParts) -> None:
    """Make PyTorch's clipping right for this model's gradients, as long as it lives."""
    global _wrapped
    _holders.add(holder)
    if not _wrapped:
        wrap_clipping(_with_parts, _on_any_tensors)
        _wrapped = True


def norm_of(gradients: list[torch.Tensor], norm_type: float = 2.0) -> torch.Tensor:
    """The norm of whole gradients, the same number on every rank."""
    known = {id(gradient): part for holder in _holders for gradient, part in holder.gradient_parts()}
    groups: dict[tuple[DeviceMesh, ...], list[torch.Tensor]] = {}
    for gradient in gradients:
        part = known.get(id(gradient), Part())
        own = groups.setdefault(part.meshes, [])
        if part.counts:
            own.append(gradient)
    device = gradients[0].device
    if norm_type == inf:
        found = [_over(_largest(own, device), meshes, dist.ReduceOp.MAX) for meshes, own in groups.items()]
        return torch.stack(found).max()
    squares = [_over(global_square(own).to(device), meshes, dist.ReduceOp.SUM) for meshes, own in groups.items()]
    return torch.stack(squares).sum().sqrt().float()


def _with_parts(plain: TotalNorm) -> TotalNorm:
    def total_norm(tensors: Any, norm_type: float = 2.0, error_if_nonfinite: bool = False, foreach: Any = None) -> Any:
        tensors = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        known = {id(gradient): holder for holder in _holders for gradient, _ in holder.gradient_parts()}
        first = next((known[id(tensor)] for tensor in tensors if id(tensor) in known), None)
        if first is None:
            return plain(tensors, norm_type, error_if_nonfinite, foreach)
        if float(norm_type) not in (2.0, inf):
            raise Refused(
                f"A norm of type {norm_type} was asked for gradients that are divided over ranks; use 2 or inf."
            )
        first.before_norm()
        with torch.no_grad():
            norm = norm_of(tensors, float(norm_type))
        if error_if_nonfinite and not isfinite(float(norm)):
            raise RuntimeError(f"The total norm of order {norm_type} is non-finite, so gradients cannot be clipped.")
        return norm

    return total_norm


def _on_any_tensors(plain: Scaling) -> Scaling:
    def clip(parameters: Any, max_norm: float, total_norm: torch.Tensor, foreach: Any = None) -> None:
        parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        if len({is_dtensor(gradient) for gradient in gradients}) > 1:  # of models under several strategies
            scale_(gradients, torch.clamp(float(max_norm) / (total_norm + 1e-6), max=1.0))
        else:
            plain(parameters, max_norm, total_norm, foreach)

    return clip


def _largest(gradients: list[torch.Tensor], device: torch.device) -> torch.Tensor:
    """The largest absolute value over the ranks of each gradient's own mesh."""
    largest = torch.zeros((), device=device)
    for gradient in gradients:
        own = local(gradient)
        value = own.abs().max().float() if own.numel() else torch.zeros((), device=device)
        if is_dtensor(gradient):
            for axis in range(gradient.device_mesh.ndim):
                dist.all_reduce(value, dist.ReduceOp.MAX, gradient.device_mesh.get_group(axis))
        largest = torch.maximum(largest, value)
    return largest


def _over(value: torch.Tensor, meshes: tuple[DeviceMesh, ...], how: Any) -> torch.Tensor:
    for mesh in meshes:
        dist.all_reduce(value, how, mesh.get_group())
    return value
