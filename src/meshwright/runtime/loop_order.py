"""What ranks do one after another in a user's loop, compared, so that a rank that leaves a step out is named.

A loop that decides on one rank alone (`if not loss.isfinite(): continue`) leaves ranks in different collectives, where
they would wait for each other until the group's timeout. So each rank announces what it does next: one small message,
which nobody waits for until the next one, except where a collective of the step follows that could hang.
"""

from __future__ import annotations

from datetime import timedelta
from enum import IntEnum
from itertools import count

import torch
import torch.distributed as dist

from meshwright.assemble.axes import host_group
from meshwright.assemble.world import World
from meshwright.describe.code_lines import CodeLine, running_line
from meshwright.errors import JobError
from meshwright.facts.strategy import Strategy

PATIENCE = timedelta(minutes=30)
"""How long a rank waits for the others, which may evaluate or save first: as long as PyTorch's own groups do."""
PATIENCE_FOR_LINES = timedelta(seconds=5)
"""How long ranks that differ wait for each other's line, which is only told."""
LONGEST_NOTE = 200
COMPARED_EVALUATIONS = 3
FIRST_CALLS = 5
"""Training calls in which ranks wait for each other's message, so that all of them name an early mistake."""
CALLS = 2**16
MODELS = 2**10


class Event(IntEnum):
    """What a rank does with a model that the other ranks must do, too."""

    CALL = 1
    PASS = 2
    NORM = 3
    STEP = 4
    EVALUATION = 5
    STATE = 6


_TEXTS = {
    Event.CALL: "called the model again",
    Event.PASS: "ran the backward pass of another call",
    Event.NORM: "asked for a norm of gradients",
    Event.STEP: "called optimizer.step()",
    Event.EVALUATION: "called the model without gradients",
    Event.STATE: "saved or loaded the model's state",
}
_models = count()


class LoopOrder:
    """Compares the order of events of one model over all ranks. All ranks must make one together."""

    def __init__(self, strategy: Strategy, world: World, *, compares: bool) -> None:
        self._strategy, self._world, self._compares = strategy, world, compares and world.ranks > 1 and not world.fake
        self._model = next(_models) % MODELS
        self.calls_together = self.evaluates_together = False
        """Whether ranks wait for each other in training calls, and in calls without gradients."""
        self._calls = self._evaluations = 0
        self._unanswered, self._stepped = False, True
        """Whether the last training call had no backward pass yet, and whether a step followed the last reduction."""
        self._called_at: CodeLine | None = None
        self._note = ""
        self._pending: tuple[torch.Tensor, dist.Work] | None = None
        self._group = small_messages(world) if self._compares else None

    def begin_call(self, *, trains: bool) -> None:
        """Note a call, before it gathers weights. The next backward pass compares how many train the model."""
        if not self._compares:
            return
        if trains:
            self._begin_training()
        else:
            self._begin_evaluation()

    def _begin_training(self) -> None:
        if self.calls_together:
            self.announce(Event.CALL)
            if self._unanswered or not self._stepped or self._calls < FIRST_CALLS:
                self.settle()
        self._calls, self._unanswered, self._called_at = self._calls + 1, True, running_line()

    def _begin_evaluation(self) -> None:
        """Compare the first calls without gradients, if ranks run them together."""
        if self.evaluates_together and self._evaluations < COMPARED_EVALUATIONS:
            self._evaluations += 1
            self.announce(Event.EVALUATION)
            self.settle()

    def begin_pass(self) -> None:
        """Announce a backward pass. If no step followed the last reduced one, ranks compare it before they reduce."""
        self.announce(Event.PASS)
        self._unanswered = False
        if not self._stepped:
            self.settle()

    def reduced(self) -> None:
        """Note that gradients are reduced, so that a step can follow."""
        self._stepped = False

    def announce(self, event: Event) -> None:
        """Tell the other ranks what comes next, after what they told before was compared."""
        if not self._compares:
            return
        self.settle()
        self._stepped = self._stepped or event is Event.STEP
        self._note = self._noted(event)
        told = torch.zeros(self._world.ranks, dtype=torch.int64)
        # Passes of different calls are different events: one rank left a pass out.
        calls = self._calls % CALLS if event is Event.PASS else 0
        told[self._world.rank] = event + len(Event) * 2 * (self._model + MODELS * calls)
        work = dist.all_reduce(told, group=self._group, async_op=True)
        assert work is not None
        self._pending = told, work

    def settle(self) -> None:
        """Raise if ranks have announced different events."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        told, work = pending
        try:
            work.wait(PATIENCE)
        except RuntimeError as error:
            raise JobError(
                f"This rank {self._note} under {self._strategy}, but another one did not, or has ended. {_ADVICE}"
            ) from error
        if len(codes := set(told.tolist())) > 1:
            self._refuse(told.tolist(), codes)

    def _noted(self, event: Event) -> str:
        if event is Event.PASS:  # by the call: the backward pass itself may run in a thread of autograd's
            return f"ran the backward pass of its call {self._calls}{_at(self._called_at)}"
        return f"{_TEXTS[event]}{_at(running_line())}"

    def _refuse(self, told: list[int], codes: set[int]) -> None:
        notes = self._gathered() or [self._note if code == told[self._world.rank] else "" for code in told]
        did = []
        for code in sorted(codes, key=told.index):
            ranks = [rank for rank, one in enumerate(told) if one == code]
            note = next((notes[rank] for rank in ranks if notes[rank]), _TEXTS[Event(code % (len(Event) * 2))])
            others = f" and {len(ranks) - 1} others" * (len(ranks) > 1)
            did.append(f"rank {ranks[0]}{others} {note}")
        text = ", but ".join(did)
        raise JobError(f"{text[0].upper()}{text[1:]}, under {self._strategy}. {_ADVICE}")

    def _gathered(self) -> list[str]:
        """The ranks' notes; none if one of them hangs elsewhere or has ended."""
        own = torch.zeros(LONGEST_NOTE, dtype=torch.uint8)
        encoded = list(self._note.encode()[:LONGEST_NOTE])
        own[: len(encoded)] = torch.tensor(encoded, dtype=torch.uint8)
        rows = [torch.empty_like(own) for _ in range(self._world.ranks)]
        try:
            work = dist.all_gather(rows, own, self._group, async_op=True)
            assert work is not None
            work.wait(PATIENCE_FOR_LINES)
        except RuntimeError:
            return []
        return [bytes(row[row != 0].tolist()).decode(errors="replace") for row in rows]


def _at(line: CodeLine | None) -> str:
    return "" if line is None else f" ({line})"


_ADVICE = (
    "All ranks must do the same with a laid-out model: decide from numbers that all of them have, for example after "
    "torch.distributed.all_reduce."
)


def small_messages(world: World) -> dist.ProcessGroup | None:
    """A group of all ranks for small messages on the host. All ranks must call it.

    It is apart from the others: where a rank is missing, its next collective would be taken for the answer.
    """
    return host_group(world, "a loop's small messages")
