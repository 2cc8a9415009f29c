"""Fingerprints of frozen parameters, for checkpoints that hold only what is trained.

A job whose frozen weights come from its builder (`from_pretrained`) can make them again. `Job(save="trained")` stores a
fingerprint of each instead: a sum over elements of a mix of value and position. Any strategy computes it from the boxes
that its ranks hold, and all get the same number.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod
from typing import Any

import torch

from meshwright.checkpoint.parts import HeldParts, Part, held_parts
from meshwright.checkpoint.trained import Trained
from meshwright.errors import CheckpointError, WrongCheckpoint

PIECE = 1 << 22
"""Elements that are mixed at a time: each takes 8 bytes a few times."""
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_FIRST, _SECOND = -0x61C8864680B583EB, -0x4B47D0C5A1A2C5D3
"""Odd factors that spread bits over 64, as in a random number generator of the splitmix kind."""

Fingerprints = dict[str, str]
"""The dtype and the fingerprint of each frozen parameter, by its first name."""


def fingerprints(trainer: Trained, dtypes: Mapping[str, torch.dtype] | None = None) -> Fingerprints:
    """Collective: the fingerprints of all frozen parameters, as they are or cast to other dtypes."""
    own: dict[str, dict[tuple[int, ...], tuple[int, int]]] = {}
    kinds: dict[str, str] = {}
    frozen = {p.name for p in trainer.facts.parameters if not p.trainable}
    for held in trainer.engine.held():
        if held.name in frozen:
            parts = held_parts(held.tensor, held.cut)
            dtype = (dtypes or {}).get(held.name, parts.dtype)
            kinds[held.name] = str(dtype).removeprefix("torch.")
            own.setdefault(held.name, {}).update(
                {part.offsets: (part.tensor.numel(), _sum_of(part, parts, dtype)) for part in parts.parts}
            )
    sizes = {p.name: prod(p.shape) for p in trainer.facts.parameters}
    boxes: dict[str, dict[tuple[int, ...], tuple[int, int]]] = {}
    for held_there, kinds_there in trainer.world.gather((own, kinds)):
        kinds |= kinds_there
        for name, found in held_there.items():
            boxes.setdefault(name, {}).update(found)
    for name, found in boxes.items():
        if sum(elements for elements, _ in found.values()) != sizes[name]:
            raise CheckpointError(
                f"The frozen {name} has no fingerprint under {trainer.strategy}, whose ranks hold it in parts that "
                'overlap; leave out Job(save="trained").'
            )
    sums = {name: sum(one for _, one in found.values()) % 2**64 for name, found in boxes.items()}
    return {name: f"{kinds[name]}:{sums[name]:016x}" for name in sorted(sums)}


def refuse_changed(trainer: Trained) -> None:
    """Raise if frozen parameters are not those that the builder made. All ranks call it."""
    assert trainer.base is not None
    now = fingerprints(trainer)
    changed = [name for name, before in trainer.base.items() if now.get(name) != before]
    if changed:
        raise CheckpointError(
            f'Job(save="trained") leaves out frozen parameters, but {changed[0]} ({len(changed)} in all) is not what '
            'Job(model=...) made: it was changed or loaded since. Save everything with Job(save="all").'
        )


def match_base(trainer: Trained, saved: Mapping[str, Any]) -> None:
    """Raise if the run's frozen parameters are not those that a checkpoint was trained on. All ranks call it."""
    frozen = {p.name for p in trainer.facts.parameters if not p.trainable}
    if strange := sorted(set(saved) - frozen):
        raise WrongCheckpoint(
            f"The checkpoint holds the trained parameters only, without {strange[0]}, which was frozen then and is "
            "trained by this job; freeze it, or begin from whole weights."
        )
    own = {held.name: held.tensor.dtype for held in trainer.engine.held()}
    kinds = {name: getattr(torch, text.partition(":")[0]) for name, text in saved.items()}
    # A base that is rounded here to what was saved is the same base; one that was rounded then cannot be told.
    now = fingerprints(trainer, {name: kind for name, kind in kinds.items() if own.get(name) != kind})
    different = [name for name in saved if now.get(name) != saved[name]]
    if different:
        raise WrongCheckpoint(
            f"The checkpoint was trained on other frozen weights: {different[0]} ({len(different)} of {len(saved)}) "
            "differs from what Job(model=...) made; load the same base model, with the same seed."
        )


def _sum_of(part: Part, whole: HeldParts, dtype: torch.dtype) -> int:
    """The fingerprint of a box of a tensor."""
    total = 0
    for offset, piece in _pieces(part.tensor.detach()):
        bits = piece.to(dtype).contiguous().view(_BITS[dtype.itemsize]).long()
        offsets = (part.offsets[0] + offset, *part.offsets[1:]) if part.offsets else ()
        mixed = _mix(bits + _mix(_positions(offsets, piece, whole.shape)))
        total += int(mixed.sum())
    return total


def _pieces(tensor: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    """Slices of a tensor along its first dim, with their offsets."""
    if tensor.dim() == 0:
        yield 0, tensor
        return
    rows = max(1, PIECE // max(1, prod(tensor.shape[1:])))
    yield from ((at, tensor[at : at + rows]) for at in range(0, tensor.shape[0], rows))


def _positions(offsets: tuple[int, ...], piece: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Where each element of a box is in the whole tensor, counted along its rows."""
    found = torch.zeros((), dtype=torch.int64, device=piece.device)
    for dim, (offset, size) in enumerate(zip(offsets, piece.shape, strict=True)):
        along = torch.arange(offset, offset + size, device=piece.device) * prod(shape[dim + 1 :])
        found = found.unsqueeze(-1) + along
    return found


def _mix(values: torch.Tensor) -> torch.Tensor:
    """Spread each number over 64 bits; products wrap around."""
    values = (values ^ ((values >> 30) & 0x3FFFFFFFF)) * _FIRST
    values = (values ^ ((values >> 27) & 0x1FFFFFFFFF)) * _SECOND
    return values ^ ((values >> 31) & 0x1FFFFFFFF)
