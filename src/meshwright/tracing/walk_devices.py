"""A step of `dp` as a walk. Fake tensors cannot be on several devices of one process, so it is put together.

Its first device does what one process alone does with a share of the samples, except that the loss is that of all
samples. Both are traced. Around them the model is copied to the other devices, and gradients come back.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from torch import Tensor, nn

from meshwright.assemble.check import check
from meshwright.facts.job import Job
from meshwright.facts.model import ModelFacts
from meshwright.facts.strategy import Strategy
from meshwright.facts.trace import Message
from meshwright.facts.walk import LOSS, PASSES, Visit, Walk
from meshwright.strategies import Place
from meshwright.torch_private.trees import tree_leaves
from meshwright.tracing.record_step import record_step
from meshwright.tracing.recorder import StepRecorder
from meshwright.tracing.walk import Follower


def walk_devices(job: Job, facts: ModelFacts, strategy: Strategy, devices: int) -> Walk:
    """What the first of the devices does in one optimizer step."""
    resolved = check(job, facts, strategy, Place(device="cuda", devices=devices, ranks=devices, local_ranks=1))
    alone = replace(resolved, data="single", data_size=None)
    size = resolved.micro_batch and -(-resolved.micro_batch // devices)
    share = _walk_alone(
        replace(job, global_batch=-(-job.global_batch // devices)), facts, replace(alone, micro_batch=size)
    )
    visits = _Composer(facts, devices, _walk_alone(job, facts, alone)).compose(share.visits())
    return Walk(rank=0, ranks=devices, visits=tuple(visits))


class _SizesToo(Follower):
    """A follower that also notes the bytes of a micro-batch and of the model's output."""

    given, returned = 0, 0

    def attach(self, models: Iterable[nn.Module], recorder: StepRecorder) -> None:
        models = list(models)
        for model in models:
            model.register_forward_pre_hook(self._note_given, with_kwargs=True)
            model.register_forward_hook(self._note_returned)
        super().attach(models, recorder)

    def _note_given(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        self.given = _bytes_in((args, kwargs))

    def _note_returned(self, model: nn.Module, args: Any, output: Any) -> None:
        self.returned = _bytes_in(output)


def _bytes_in(values: Any) -> int:
    return sum(leaf.numel() * leaf.element_size() for leaf in tree_leaves(values) if isinstance(leaf, Tensor))


def _walk_alone(job: Job, facts: ModelFacts, strategy: Strategy) -> _SizesToo:
    follower = _SizesToo(facts)
    record_step(job, facts, strategy, 1, 0, observer=follower)
    return follower


@dataclass
class _Composer:
    facts: ModelFacts
    devices: int
    whole: _SizesToo
    """Of all samples on one device."""

    def compose(self, visits: tuple[Visit, ...]) -> Iterator[Visit]:
        """The visits of one device's share, with copies, sums and the loss of all samples."""
        losses = self._losses()
        for (phase, between, _), group in groupby(visits, key=_pass_of):
            own = list(group)
            if between:
                yield from own
                continue
            if phase == "forward":
                yield self._between(own[0], self._copies())
            for visit in own:
                yield self._loss(visit, losses) if visit.module == LOSS else visit
            if phase == "backward":
                sums = self._message("reduce", self._bytes(trained=True), phase)
                yield self._between(own[-1], (sums,))

    def _losses(self) -> dict[tuple[str, int], Visit]:
        visits = (visit for visit in self.whole.visits() if visit.module == LOSS)
        return {(visit.phase, visit.micro_batch): visit for visit in visits}

    def _copies(self) -> tuple[Message, ...]:
        given = (self._message("scatter", self.whole.given, "forward"),) if self.whole.given else ()
        return (*given, self._message("broadcast", self._bytes(trained=False), "forward"))

    def _loss(self, visit: Visit, losses: dict[tuple[str, int], Visit]) -> Visit:
        """The loss of all samples, to which the outputs of all devices are brought, and their gradients back."""
        found = losses.get((visit.phase, visit.micro_batch))
        if found is None:
            return visit
        outputs = self._message("gather" if visit.phase == "forward" else "scatter", self.whole.returned, visit.phase)
        held = {**visit.held, **{cause: found.held.get(cause, 0) for cause in ("logits", "temporary")}}
        return replace(found, messages=(outputs,), held={cause: size for cause, size in held.items() if size})

    def _between(self, beside: Visit, messages: tuple[Message, ...]) -> Visit:
        return Visit(
            phase=beside.phase, module=PASSES, micro_batch=beside.micro_batch, messages=messages, held=beside.held
        )

    def _message(self, kind: str, size: float, phase: str) -> Message:
        return Message(kind=kind, bytes=size, axis="data", ranks=self.devices, phase=phase)

    def _bytes(self, *, trained: bool) -> int:
        chosen = [one for one in self.facts.parameters if one.trainable or not trained]
        return sum(one.count * one.itemsize for one in chosen)


def _pass_of(visit: Visit) -> tuple[str, bool, int]:
    return visit.phase, visit.module == PASSES, visit.micro_batch
