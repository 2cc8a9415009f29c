"""Match foreign tensor names to those a job's model expects: add or remove a prefix, resolve ties, report leftovers."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import nn

from meshwright.checkpoint.foreign.source import Source
from meshwright.checkpoint.hugging_face import is_obsolete
from meshwright.describe.model import parameter_facts
from meshwright.errors import WrongCheckpoint
from meshwright.facts.job import Job
from meshwright.facts.model import ModelFacts
from meshwright.jobs.load import load_job
from meshwright.recording.blueprint import record


@dataclass(frozen=True)
class ExpectedState:
    """A job's model without weights."""

    job: Job
    model: nn.Module
    facts: ModelFacts
    """Only its parameters: no step was traced."""
    buffers: dict[str, tuple[int, ...]]
    """Shapes of the persistent buffers."""

    @property
    def names(self) -> set[str]:
        """Every name in its `state_dict`; tied parameters have several."""
        return {name for p in self.facts.parameters for name in p.names} | self.buffers.keys()

    @property
    def tied(self) -> dict[str, str]:
        """Further names of tied parameters, each mapped to the first."""
        return {alias: p.name for p in self.facts.parameters for alias in p.names[1:]}


def expected_by(job: str) -> ExpectedState:
    """Load a job as written on the command line. Nothing is computed, so no sample is needed."""
    with redirect_stdout(sys.stderr):  # a job may print, and stdout is reserved for the JSON document
        loaded = load_job(job)
        model = record(loaded.model, seed=0, values=False).model
    parameters = parameter_facts(model, None)
    known = {name for p in parameters for name in p.names}
    buffers = {
        name: tuple(tensor.shape)
        for name, tensor in model.state_dict().items()
        if name not in known and isinstance(tensor, torch.Tensor)
    }
    return ExpectedState(loaded, model, ModelFacts(parameters=parameters, blocks=()), buffers)


@dataclass(frozen=True)
class Prefix:
    """The prefix to remove from the source's names, and the one to add instead."""

    off: str = ""
    on: str = ""

    def apply(self, name: str) -> str:
        return self.on + name.removeprefix(self.off)


WRAPPERS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
"""Parts of names that torch.compile, FSDP and activation checkpointing put around a module, at any depth."""


@dataclass(frozen=True)
class Match:
    """The source's tensors for a job, under the checkpoint's names."""

    tensors: dict[str, torch.Tensor]
    prefix: Prefix
    left_out: tuple[str, ...]
    """Tensors that transformers ignores, too."""
    wrappers: tuple[str, ...] = ()
    """Parts of names that were removed."""
    renamed: Mapping[str, str] = field(default_factory=dict)
    """The job's names for names of the source that differ in more than a prefix."""

    def rename(self, name: str) -> str:
        """The job's name for a name of the source."""
        return self.renamed.get(name) or self.prefix.apply(unwrapped(name, self.wrappers))


def match_to(source: Source, expected: ExpectedState) -> Match:
    """Match every tensor of the job; the error names what is missing, left over or has another shape."""
    wrappers = _wrappers_inside(source.tensors, expected.names)
    prefix = find_prefix([unwrapped(name, wrappers) for name in source.tensors], expected.names)
    match = Match({}, prefix, (), wrappers)
    found: dict[str, torch.Tensor] = {}
    for name, tensor in source.tensors.items():
        if match.rename(name) in found:
            raise WrongCheckpoint(f"{source.path} has {match.rename(name)} twice, with and without {prefix.off!r}.")
        found[match.rename(name)] = tensor
    extra = [name for name in found if name not in expected.names]
    left_out = tuple(name for name in extra if is_obsolete(expected.model, name))
    _refuse(source.path, "has", [name for name in extra if name not in left_out], "which the job's model does not have")
    shapes = {p.names: p.shape for p in expected.facts.parameters}
    shapes |= {(name,): shape for name, shape in expected.buffers.items()}
    missing = [names[0] for names in shapes if not any(name in found for name in names)]
    _refuse(source.path, "lacks", missing, "which the job's model has")
    tensors = {names[0]: _one_of(source.path, names, found, shape) for names, shape in shapes.items()}
    return replace(match, tensors=tensors, left_out=left_out)


def unwrapped(name: str, wrappers: Collection[str]) -> str:
    """A name without the parts that wrappers added."""
    return ".".join(part for part in name.split(".") if part not in wrappers) if wrappers else name


def _wrappers_inside(found: Collection[str], wanted: Collection[str]) -> tuple[str, ...]:
    """Wrappers that are inside of names; one in front of all names is a prefix."""
    inside = {part for name in found for part in name.split(".")[1:] if part in WRAPPERS}
    return tuple(sorted(inside - {part for name in wanted for part in name.split(".")}))


def find_prefix(found: Collection[str], wanted: Collection[str]) -> Prefix:
    """The prefix that makes most names match: a wrapper adds one, and a submodel lacks one."""
    tails: dict[str, list[str]] = {}
    for name in wanted:
        for head, tail in _splits(name):
            tails.setdefault(tail, []).append(head)
    fits: Counter[Prefix] = Counter()
    for name in found:
        fits.update(Prefix(on=head) for head in tails.get(name, ()))
        fits.update(Prefix(off=head) for head, tail in _splits(name) if tail in wanted and head)
    plain = Prefix()
    best = max(fits, key=lambda prefix: fits[prefix], default=plain)
    return best if fits[best] > fits[plain] else plain


def _splits(name: str) -> Iterator[tuple[str, str]]:
    """All ways to split a name at a dot, the empty head first."""
    parts = name.split(".")
    for at in range(len(parts)):
        yield "".join(f"{part}." for part in parts[:at]), ".".join(parts[at:])


def _one_of(
    path: Path, names: tuple[str, ...], found: Mapping[str, torch.Tensor], shape: tuple[int, ...]
) -> torch.Tensor:
    """The tensor with any of these names; tied ones must be equal."""
    there = [name for name in names if name in found]
    for name in there:
        if tuple(found[name].shape) != tuple(shape):
            raise WrongCheckpoint(
                f"{path} has {name} of shape {tuple(found[name].shape)}, but in the job's model it is {shape}."
            )
        if not _same(found[there[0]], found[name]):
            raise WrongCheckpoint(
                f"{path} has {there[0]} and {name} with different values, but in the job's model they are tied."
            )
    return found[there[0]]


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one is other or (one.dtype == other.dtype and torch.equal(one, other))


def _refuse(path: Path, verb: str, names: list[str], why: str) -> None:
    if names:
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        raise WrongCheckpoint(f"{path} {verb} {', '.join(names[:3])}{more}, {why}.")
