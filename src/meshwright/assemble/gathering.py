"""Gather the data ranks' parts of a global batch on every rank, in the order of the samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from meshwright.assemble.batch import Share, Span
from meshwright.describe.batch_layout import Layout, Rows
from meshwright.describe.structure import tensors_of, to_device
from meshwright.errors import JobError
from meshwright.recording.report_as_cpu import tensors_in
from meshwright.strategies.collectives import all_gather
from meshwright.torch_private.tensors import make_wrapper


@dataclass(frozen=True)
class Gathering:
    """The data ranks, and how a batch is split over them."""

    share: Share
    group: dist.ProcessGroup | None
    """None for one rank."""

    def spans(self, samples: int) -> list[list[Span]]:
        shares = [replace(self.share, rank=rank) for rank in range(self.share.ranks)]
        return [[span for round_ in share.rounds(samples) for span in round_] for share in shares]

    def whole(self, layout: Layout, parts: Sequence[Any], samples: int, *, regular: bool) -> Any:
        """The value for the whole batch; `parts` are this rank's, one per span.

        All ranks know the shapes of tensors in regular batches. Anything else is sent as an object.
        """
        spans = self.spans(samples)
        own = [part for part, span in zip(parts, spans[self.share.rank], strict=True) if span.length]
        if self.group is None:
            return layout.joined(own)
        if regular and isinstance(layout, Rows):
            everyone = self._gather_rows(layout, own or [layout.take(parts[0], 0, 0, 1)], spans)
            return layout.joined(_in_order(everyone, spans))
        return layout.joined(self.everything(parts, samples))

    def everything(self, parts: Sequence[Any], samples: int) -> list[Any]:
        """The parts of all ranks in the order of their samples, sent as objects."""
        spans = self.spans(samples)
        own = [part for part, span in zip(parts, spans[self.share.rank], strict=True) if span.length]
        if self.group is None:
            return own
        everyone = self.values(to_device(own, torch.device("cpu")))
        device = next((tensor.device for tensor in tensors_of(own)), torch.device("cpu"))
        return [to_device(part, device) for part in _in_order(everyone, spans)]

    def values(self, value: Any) -> list[Any]:
        """The values of all ranks, sent as objects."""
        if self.group is None:
            return [value]
        everyone: list[Any] = [None] * self.share.ranks
        dist.all_gather_object(everyone, value, group=self.group)
        return everyone

    def _gather_rows(self, layout: Rows, own: list[torch.Tensor], spans: list[list[Span]]) -> list[list[torch.Tensor]]:
        """Gather as bytes, because not every backend sends every dtype; shorter parts are padded with zeros."""
        mine = torch.cat(own, layout.dim).movedim(layout.dim, 0).contiguous()
        counts = [sum(span.length for span in row) for row in spans]
        filled = mine.new_zeros((max(counts), *mine.shape[1:]))
        filled[: len(mine)] = mine
        sent = filled.view(-1).view(torch.uint8)
        received = sent.new_empty(len(spans) * sent.numel())
        all_gather(received, sent, group=self.group)
        ranks = received.view(len(spans), -1).view(mine.dtype).view(len(spans), *filled.shape)
        return [_split(layout, rows, row) for rows, row in zip(ranks, spans, strict=True)]


def _split(layout: Rows, rows: torch.Tensor, spans: list[Span]) -> list[torch.Tensor]:
    lengths = [span.length for span in spans if span.length]
    return [part.movedim(0, layout.dim) for part in rows[: sum(lengths)].split(lengths)] if lengths else []


def _in_order(everyone: list[list[Any]], spans: list[list[Span]]) -> list[Any]:
    placed = [
        (span.first, part)
        for row, held in zip(spans, everyone, strict=True)
        for span, part in zip([span for span in row if span.length], held, strict=True)
    ]
    return [part for _, part in sorted(placed, key=lambda pair: pair[0])]


class UnreadTensor(torch.Tensor):
    """Placeholder for a tensor that a loss over the whole batch does not read; reading it raises with the reason."""

    why: str

    @staticmethod
    def __new__(cls, shape: Sequence[int], like: torch.Tensor, why: str) -> UnreadTensor:
        dtype = torch.float32 if like.is_floating_point() else like.dtype
        made = make_wrapper(cls, shape, dtype=dtype, device=like.device)
        made.why = why
        return made

    def __init__(self, *args: Any) -> None:
        pass

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Unread({tuple(self.shape)})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise JobError(next(tensor.why for tensor in tensors_in((args, kwargs)) if isinstance(tensor, UnreadTensor)))
