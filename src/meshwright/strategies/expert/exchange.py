"""Send rows to the ranks that hold their experts, and results back. Counts are uneven, and no row is dropped.

In a fake world nothing arrives, so counts are unknown. Routing is balanced there: each rank receives as many rows as it
sends, in equal parts for its experts. Memory and time of a trace are those of balanced routing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from meshwright.strategies.mesh_axis import place_in
from meshwright.torch_private.collectives import exchange_rows
from meshwright.torch_private.modes import without_torch_function


class Exchange(torch.autograd.Function):
    """Rows for each rank; their gradients come back the same way."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, sent: list[int], received: list[int], group: str) -> torch.Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        with without_torch_function():
            return exchange_rows(x, sent, received, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        with without_torch_function():
            return exchange_rows(gradient, ctx.received, ctx.sent, ctx.group), None, None, None


@dataclass(frozen=True, kw_only=True)
class Route:
    """Rows between this rank and the others, sorted by expert where they leave."""

    sent: list[int]
    """Rows for each rank."""
    received: list[int]
    """Rows from each rank."""
    arrived: tuple[tuple[int, ...], ...]
    """For each rank that rows come from, how many are for each of this rank's experts."""
    group: str

    @property
    def rows(self) -> int:
        """Rows that arrive."""
        return sum(self.received)

    def there(self, x: torch.Tensor) -> torch.Tensor:
        """The rows that arrive for this rank's experts, by rank and then by expert."""
        return Exchange.apply(x, self.sent, self.received, self.group)  # type: ignore[no-any-return]

    def back(self, x: torch.Tensor) -> torch.Tensor:
        """The results of the rows that were sent, in their order."""
        return Exchange.apply(x, self.received, self.sent, self.group)  # type: ignore[no-any-return]


def find_route(counts: torch.Tensor, mesh: DeviceMesh) -> Route:
    """Tell each rank how many rows come for each of its experts, given this rank's rows for every expert."""
    _, ranks, group = place_in(mesh)
    own = len(counts) // ranks
    with without_torch_function():
        told = exchange_rows(counts, [own] * ranks, [own] * ranks, group)
    return Route(**_read_counts(counts, told, ranks), group=group)


def find_even_route(rows: int, experts: int, mesh: DeviceMesh, device: torch.device) -> Route:
    """The route of balanced routing, with the same message about counts."""
    _, ranks, group = place_in(mesh)
    own = experts // ranks
    with without_torch_function():
        exchange_rows(torch.zeros(experts, dtype=torch.int64, device=device), [own] * ranks, [own] * ranks, group)
    sent = spread(rows, ranks)
    return Route(sent=sent, received=sent, arrived=tuple(tuple(spread(part, own)) for part in sent), group=group)


def is_fake(mesh: DeviceMesh) -> bool:
    """Whether the other ranks do not exist."""
    return dist.get_backend(mesh.get_group()) == "fake"


def spread(total: int, parts: int) -> list[int]:
    """A number as a sum of parts that differ by one at most."""
    return [total // parts + (part < total % parts) for part in range(parts)]


def _read_counts(counts: torch.Tensor, told: torch.Tensor, ranks: int) -> dict[str, Any]:
    both = torch.stack([counts, told]).view(2, ranks, -1).tolist()  # one wait for the device
    leaving, arriving = both
    return {
        "sent": [sum(row) for row in leaving],
        "received": [sum(row) for row in arriving],
        "arrived": tuple(tuple(row) for row in arriving),
    }


def local_experts(arrived: Sequence[Sequence[int]], device: torch.device) -> torch.Tensor:
    """The number of the expert, among this rank's, for each row that arrived."""
    counts = [count for row in arrived for count in row]
    experts = [expert for row in arrived for expert in range(len(row))]
    return torch.repeat_interleave(
        torch.tensor(experts, device=device), torch.tensor(counts, device=device), output_size=sum(counts)
    )
