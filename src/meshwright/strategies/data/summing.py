"""Sum whole gradients over ranks, of which some may be missing on some ranks.

Samples may decide which parameters are used. A gradient that any rank has is summed on all. A gradient that no rank has
stays None, because an optimizer would update a parameter whose gradient is zeros.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from meshwright.errors import JobError
from meshwright.facts.job import NamedParameters
from meshwright.torch_private.fake_tensors import FakeTensor

BUCKET = 1 << 24
"""Elements per message. At most one bucket is copied at a time."""

Gradient = torch.Tensor | None


def by_mesh(
    parameters: NamedParameters, mesh: DeviceMesh, apart: Mapping[str, DeviceMesh]
) -> Iterator[tuple[DeviceMesh, list[nn.Parameter]]]:
    """Parameters with the mesh that their gradients are summed over: `mesh`, or another of `apart`."""
    groups: dict[DeviceMesh, list[nn.Parameter]] = {}
    for name, parameter in parameters.named():
        groups.setdefault(apart.get(name, mesh), []).append(parameter)
    yield from groups.items()


@torch.no_grad()
def sum_gradients(
    parameters: Sequence[torch.Tensor],
    group: dist.ProcessGroup,
    *,
    share: float = 1.0,
    dtype: torch.dtype | None = None,
) -> None:
    """Give every rank `share` times the sum of all ranks' gradients of these parameters, taken in `dtype`."""
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
    for parameter in parameters:
        by_dtype.setdefault(parameter.dtype, []).append(parameter)
    for alike in by_dtype.values():
        for bucket in _buckets(alike):
            summed = sum_over_ranks([p.grad for p in bucket], bucket, group, share=share, dtype=dtype)
            for parameter, gradient in zip(bucket, summed, strict=True):
                parameter.grad = gradient


@torch.no_grad()
def sum_over_ranks(
    gradients: Sequence[Gradient],
    likes: Sequence[torch.Tensor],
    group: dist.ProcessGroup,
    *,
    share: float = 1.0,
    dtype: torch.dtype | None = None,
) -> list[Gradient]:
    """The sums, by one message that also counts the ranks with each gradient; `likes` have their shapes.

    The message has `dtype` instead of the gradients' own, if given.
    """
    if not gradients:
        return []
    given = [torch.zeros_like(like) if g is None else g for g, like in zip(gradients, likes, strict=True)]
    missing = [gradient is None for gradient in gradients]
    flags = given[0].new_tensor([0.0 if gone else 1.0 for gone in missing])
    flat = torch.cat([*(gradient.reshape(-1) for gradient in given), flags])
    sent = flat.to(message_dtype(flat.dtype, dtype))
    dist.all_reduce(sent, group=group)
    flat = sent.to(flat.dtype)
    *parts, counts = flat.split([*(gradient.numel() for gradient in given), len(given)])
    if share != 1.0:
        flat[: -len(given)].mul_(share)
    exists = on_any_rank(missing, counts)
    return [g.copy_(part.view_as(g)) if yes else None for g, part, yes in zip(given, parts, exists, strict=True)]


def message_dtype(own: torch.dtype, wanted: torch.dtype | None) -> torch.dtype:
    """The dtype in which gradients are sent: complex ones keep theirs."""
    return wanted if wanted is not None and own.is_floating_point else own


def on_any_rank(missing: Sequence[bool], counts: torch.Tensor) -> list[bool]:
    """Whether any rank has each gradient. Waits for the device only if one is missing on this rank."""
    if not any(missing) or isinstance(counts, FakeTensor):
        return [True] * len(missing)
    return [not gone or count > 0 for gone, count in zip(missing, counts.tolist(), strict=True)]


def refuse_gradients(names: Iterable[str]) -> None:
    """Raise if parameters that looked unused have a gradient, because it would not be summed over ranks."""
    if found := list(names):
        raise JobError(
            f"{found[0]} got a gradient, but the test step before training did not use it, so its gradient is not "
            "summed over ranks. Make Job(sample=...) return batches that use every parameter, or use single."
        )


def _buckets(tensors: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    bucket: list[torch.Tensor] = []
    for tensor in tensors:
        bucket.append(tensor)
        if sum(t.numel() for t in bucket) >= BUCKET:
            yield bucket
            bucket = []
    if bucket:
        yield bucket
