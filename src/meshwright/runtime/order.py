"""Which samples make up each global batch, and one rank's part of them.

The order of an epoch is a permutation drawn from (seed, epoch) alone, or that of the user's sampler, so every strategy
and world size sees the same global batches. A position is enough to continue at the exact next sample on any number of
ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, count
from typing import Any

import torch

from meshwright.assemble.batch import Rounds, Share, Span, has_stand_ins
from meshwright.errors import JobError
from meshwright.facts.position import DataPosition
from meshwright.runtime.checksum import checksum
from meshwright.runtime.user_order import UserOrder


@dataclass(frozen=True, kw_only=True)
class Order:
    """The samples of each global batch, and one rank's part of them."""

    samples: int | None
    """Samples of an epoch; None if they are not known before it ends."""
    global_batch: int
    seed: int
    share: Share = field(default_factory=Share)
    """One rank's part of each global batch."""
    drop_ragged: bool = False
    """Whether to skip a last batch that leaves some rank without samples (BatchNorm must not see stand-ins)."""
    drop_last: bool = False
    """Whether to skip an incomplete last batch."""
    user: UserOrder | None = None
    """The user's sampler or batch sampler; None for a permutation."""
    shuffled: bool = True
    """Evaluation reads samples in order."""

    def __post_init__(self) -> None:
        if self.samples is None:
            return
        if self.samples == 0:
            raise JobError("Job(data=...) has no samples.")
        if self.drop_ragged and self._has_stand_ins(min(self.samples, self.global_batch)):
            raise JobError(
                f"A batch of {min(self.samples, self.global_batch)} leaves one of {self.share.ranks} ranks without "
                "samples in some micro-step, and BatchNorm must not see stand-ins; use fewer ranks, or more samples in "
                "a batch."
            )

    @property
    def steps(self) -> int | None:
        """Steps of an epoch; None if unknown."""
        if self.user is not None and self.user.gives_batches:
            return self.user.length
        return None if self.samples is None else self._steps_of(self.samples)

    def _steps_of(self, samples: int) -> int:
        whole, rest = divmod(samples, self.global_batch)
        return whole + bool(rest and self.keeps(rest))

    @property
    def is_known(self) -> bool:
        """Whether it is known beforehand with which batch an epoch ends."""
        return self.samples is not None and self.user is None

    def completed(self, position: int) -> int:
        """Epochs that are complete at a position, in an order that is known. What is left out belongs to no epoch."""
        assert self.samples is not None
        epoch, start = divmod(position, self.samples)
        rest = self.samples - start
        return epoch + (start > 0 and rest < self.global_batch and not self.keeps(rest))

    def batches_until(self, epochs: int, position: int = 0) -> int:
        """The number of batches from a position to the end of that many epochs, in an order that is known."""
        assert self.samples is not None
        done, start = divmod(position, self.samples)
        if epochs <= done:
            return 0
        return (epochs - done - 1) * self._steps_of(self.samples) + self._steps_of(self.samples - start)

    def keeps(self, samples: int) -> bool:
        """Whether a batch of this size is trained on. A user's batch sampler may give batches of any size."""
        chosen = self.user is not None and self.user.gives_batches
        incomplete = self.drop_last and samples < self.global_batch and not chosen
        return not incomplete and not (self.drop_ragged and self._has_stand_ins(samples))

    def _has_stand_ins(self, samples: int) -> bool:
        return has_stand_ins(samples, self.share.ranks, self.share.micro_batch)

    def parts(self, position: int | DataPosition, *, epochs: int | None = None) -> Iterator[RankSamples]:
        """Yield this rank's parts from `position` on, until `epochs` epochs of the run are over, or without end."""
        place = self._placed(DataPosition(samples=position) if isinstance(position, int) else position)
        first, within, passed = place.epoch or 0, place.within, place.samples
        exact = True
        for epoch in range(first, epochs) if epochs is not None else count(first):
            handed = bool(within)
            for batch, digest, skipped in self._batches(epoch, within):
                if skipped:
                    exact = place.digest is None or digest == place.digest
                    continue
                passed, within = passed + len(batch), within + len(batch)
                if self.keeps(len(batch)):
                    handed = True
                    after = DataPosition(samples=passed, epoch=epoch, within=within, digest=digest)
                    yield self.part(batch, after, epoch=epoch, exact=exact)
                    exact = True
            if not handed:
                raise nothing_given(epoch)
            within = 0

    def _placed(self, position: DataPosition) -> DataPosition:
        """The epoch of a position that only counts samples."""
        if position.epoch is not None:
            return position
        if self.samples is not None:
            epoch, within = divmod(position.samples, self.samples)
        else:
            epoch, within = 0, position.samples
            while within and within >= (size := sum(len(batch) for batch, *_ in self._batches(epoch, 0))):
                epoch, within = epoch + 1, within - size
        return DataPosition(samples=position.samples, epoch=epoch, within=within)

    def _batches(self, epoch: int, within: int) -> Iterator[tuple[list[int], int | None, bool]]:
        """Batches of an epoch, each with a checksum of the epoch so far; first what is skipped, as one."""
        if self.user is None:
            order = self._permutation(epoch)
            for first in range(within, len(order), self.global_batch):
                yield order[first : first + self.global_batch], None, False
            return
        digest = 0
        for number, batch in enumerate(self.user.batches(epoch, within)):
            digest, skipped = checksum(batch, digest), bool(within) and number == 0
            if not skipped:
                self._refuse_large(batch)
            yield batch, digest, skipped

    def _refuse_large(self, batch: Sequence[int]) -> None:
        if len(batch) > self.global_batch:
            raise JobError(
                f"The DataLoader's batch sampler gave {len(batch)} samples, but a step has at most "
                f"global_batch={self.global_batch}; give the job the size of the largest batch."
            )

    def _permutation(self, epoch: int) -> list[int]:
        assert self.samples is not None
        if not self.shuffled:
            return list(range(self.samples))
        generator = torch.Generator().manual_seed((self.seed * 1_000_003 + epoch) % 2**63)
        return torch.randperm(self.samples, generator=generator).tolist()

    def part(self, batch: Sequence[int], after: DataPosition, *, epoch: int, exact: bool = True) -> RankSamples:
        """This rank's part of a batch."""
        rounds = self.share.rounds(len(batch))
        own = [batch[span.first : span.first + span.length] for round_ in rounds for span in round_]
        stand_in = next((indices[:1] for indices in own if indices), batch[:1])
        groups = tuple(tuple(indices or stand_in) for indices in own)
        return RankSamples(groups=groups, rounds=rounds, samples=len(batch), epoch=epoch, after=after, exact=exact)


def nothing_given(epoch: int) -> JobError:
    """Looking for a batch that never comes would hang every rank."""
    return JobError(
        f"Job(data=...) gave no batch to train on in epoch {epoch}: it has no samples, or all of them are in an "
        "incomplete last batch, which is left out. A stream must start again each time it is iterated."
    )


@dataclass(frozen=True, kw_only=True)
class RankSamples:
    """One rank's part of one global batch, as indices into the data set."""

    groups: tuple[tuple[int, ...], ...]
    """The samples of each micro-batch; one stand-in where the rank has none."""
    rounds: Rounds
    samples: int
    epoch: int
    after: DataPosition
    """The position after this batch."""
    exact: bool = True
    """False if the samples passed over before this batch are not those that the resumed run had seen."""

    @property
    def end(self) -> int:
        """Samples passed after this batch, counted through all epochs."""
        return self.after.samples

    @property
    def spans(self) -> tuple[Span, ...]:
        return tuple(chain.from_iterable(self.rounds))

    @property
    def places(self) -> tuple[tuple[int, ...], ...]:
        """Positions of each micro-batch's samples, counted through all epochs."""
        firsts = [self.end - self.samples + span.first for span in self.spans]
        return tuple(tuple(range(first, first + len(g))) for first, g in zip(firsts, self.groups, strict=True))

    @property
    def indices(self) -> tuple[int, ...]:
        """All samples of this rank; one stand-in where it has none."""
        return self._own(self.groups)

    @property
    def all_places(self) -> tuple[int, ...]:
        """Positions of the samples in `indices`."""
        return self._own(self.places)

    def _own(self, groups: tuple[tuple[int, ...], ...]) -> tuple[Any, ...]:
        own = [one for group, span in zip(groups, self.spans, strict=True) if span.length for one in group]
        return tuple(own) or groups[0]
