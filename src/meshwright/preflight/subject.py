"""What the rules of a preflight look at, and what they return."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from torch import nn

from meshwright.assemble.check import micro_steps_of
from meshwright.errors import Refused
from meshwright.facts.finding import Level
from meshwright.facts.job import Job
from meshwright.facts.model import ModelFacts
from meshwright.facts.strategy import Strategy
from meshwright.preflight.places import NOWHERE, CodePlace, place_changed, place_made, place_of_function
from meshwright.preflight.trial import Trial, make_trial
from meshwright.recording.blueprint import model_to_read


@dataclass(frozen=True)
class Subject:
    """A described job."""

    job: Job
    facts: ModelFacts

    @cached_property
    def model(self) -> nn.Module:
        """The model without weights, built only if a place in its code is needed."""
        return model_to_read(self.job.model)

    @cached_property
    def trial(self) -> Trial:
        """What a pass on real tensors shows; empty for a large model."""
        return make_trial(self.job, self.size)

    @property
    def size(self) -> int:
        return sum(parameter.count for parameter in self.facts.parameters)

    def changed(self, name: str) -> CodePlace:
        """Where forward changes an attribute; where it is made if no such line is found."""
        found = place_changed(self.model, name)
        return found if found.line else self.made(name)

    def made(self, name: str) -> CodePlace:
        """Where a module, parameter or buffer is made; the builder if no class of the author's makes it."""
        found = place_made(self.model, name)
        return found if found.line else place_of_function(self.job.model)

    @property
    def loss(self) -> CodePlace:
        return place_of_function(self.job.loss)


@dataclass(frozen=True)
class Case:
    """A resolved strategy for a subject."""

    strategy: Strategy
    subject: Subject

    @cached_property
    def steps(self) -> int:
        """Micro-batches of a rank in a step."""
        try:
            return micro_steps_of(self.subject.job, self.strategy)
        except Refused:  # too few samples for the pipeline, which is refused elsewhere
            return self.strategy.stage_ranks

    @property
    def parts(self) -> int:
        """Parts that a global batch is cut into."""
        return self.strategy.data_ranks * self.steps

    @property
    def is_divided(self) -> bool:
        """Whether several ranks or micro-batches do what one process would do at once."""
        return self.parts > 1 or self.strategy.model_ranks > 1


@dataclass(frozen=True, kw_only=True)
class Issue:
    """A property of a job, and how serious it is in each case."""

    kind: str
    what: str
    level: Callable[[Case], Level | None]
    """None if it does not matter in a case."""
    do: str = ""
    module: str = ""
    place: CodePlace | Callable[[], CodePlace] = NOWHERE
    """Where it is; a function if finding out builds the model, which only a finding is worth."""


def always(case: Case) -> Level:
    """A level for likely mistakes in the model itself."""
    return "warning"


def listed(names: list[str]) -> str:
    """All names as part of a sentence."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def first_and_more(names: list[str]) -> str:
    """Names as part of a sentence: the first, and how many more there are."""
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
