"""Where a model is cut into stages, what crosses each cut, and which parameters each stage holds."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, pairwise

import torch
from torch import nn
from torch.torch_version import TorchVersion

from meshwright.describe.calls import GLUE, Flow, Inside, Source, StrangeLeaf, TensorLeaf, Value
from meshwright.errors import Refused
from meshwright.facts.model import ModelFacts

SENDS_INTEGERS = TorchVersion(torch.__version__) >= "2.13"
"""Older stages need a gradient of everything they receive."""
COST_UNITS = 1 << 40
"""Costs are compared as whole numbers of 1 / COST_UNITS, so that equal blocks cost exactly the same."""


@dataclass(frozen=True)
class Stages:
    """The consecutive calls of each stage."""

    starts: tuple[int, ...]
    """The first call of each stage; `starts[0]` is 0."""
    calls: int

    def __len__(self) -> int:
        return len(self.starts)

    def calls_of(self, stage: int) -> range:
        return range(self.starts[stage], (*self.starts, self.calls)[stage + 1])

    def stage_of(self, call: int) -> int:
        return bisect_right(self.starts, call) - 1

    def is_last(self, stage: int) -> bool:
        return stage == len(self) - 1


def cut_stages(facts: ModelFacts, count: int, hint: Sequence[str] | None = None) -> Stages:
    """Cut at block borders such that the most expensive stage is as cheap as possible, or where the hint says."""
    if not facts.calls:
        raise Refused(
            "The model's modules could not be traced on fake tensors, so it cannot be cut into stages"
            f" ({facts.unseen or 'no module with parameters was called'}); use fsdp, or tp with Job(tensor_plan=...)."
        )
    if hint is not None:
        return Stages(_hinted(facts, count, hint), len(facts.calls))
    borders = _borders(facts)
    if len(borders) < count - 1:
        known = _listed(list(facts.blocks) or [call.name for call in facts.calls])
        raise Refused(
            f"The model cannot be cut into {count} stages, because it has {len(borders) + 1} blocks ({known}); "
            f"use at most {len(borders) + 1} stages, or name the first module of each stage in Job(stages=[...])."
        )
    until = [0, *accumulate(round(cost * COST_UNITS) for cost in _costs(facts))]

    @cache
    def best(start: int, stages: int) -> tuple[float, tuple[int, ...]]:
        """The cost of the most expensive stage if the calls from `start` make `stages` stages, and the later starts."""
        if stages == 1:
            return until[-1] - until[start], ()
        found: tuple[float, tuple[int, ...]] = (float("inf"), ())
        for border in borders[bisect_right(borders, start) :]:
            first = until[border] - until[start]
            if first > found[0]:
                break  # later borders make the first stage even longer
            highest, later = best(border, stages - 1)
            found = min(found, (max(first, highest), (border, *later)))
        return found

    return Stages((0, *best(0, count)[1]), len(facts.calls))


def _borders(facts: ModelFacts) -> list[int]:
    """Calls that a stage after the first may begin with: blocks, or any call if the model has no blocks."""
    if len(facts.blocks) > 1:
        return [index for index, call in enumerate(facts.calls) if call.name in facts.blocks][1:]
    return list(range(1, len(facts.calls)))


def _costs(facts: ModelFacts) -> list[float]:
    """The cost of each call: its share of the FLOPs plus its share of the parameters."""
    sizes = {p.name: p.count * p.itemsize for p in facts.parameters}
    held = [sum(sizes[name] for name in call.reads if name in sizes) for call in facts.calls]
    computed, total = sum(call.flops for call in facts.calls) or 1.0, sum(held) or 1
    return [call.flops / computed + size / total for call, size in zip(facts.calls, held, strict=True)]


def _hinted(facts: ModelFacts, count: int, hint: Sequence[str]) -> tuple[int, ...]:
    names = [call.name for call in facts.calls]
    starts = []
    for wanted in hint:
        found = next((i for i, name in enumerate(names) if name == wanted or name.startswith(f"{wanted}.")), None)
        if found is None:
            raise Refused(f"Job(stages=...) names {wanted!r}, where no stage can begin; these can: {_listed(names)}.")
        starts.append(found)
    if starts and starts[0] != 0:
        starts.insert(0, 0)
    if len(starts) != count or any(a >= b for a, b in pairwise(starts)):
        raise Refused(
            f"Job(stages=...) must name the first modules of {count} stages in the order of their calls, "
            f"but it names {_listed(list(hint))}."
        )
    return tuple(starts)


def _listed(names: list[str]) -> str:
    return ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")


@dataclass(frozen=True)
class Crossings:
    """The values that cross each cut, and the parameters that each stage reads."""

    values: tuple[tuple[Value, ...], ...]
    """Over the cut before each stage; empty for the first."""
    parameters: tuple[frozenset[str], ...]
    """Read by each stage, in its calls and in the glue code between them."""


def find_crossings(flow: Flow, stages: Stages) -> Crossings:
    """Find what must be sent so that every stage can run its calls; refused if that is impossible."""
    _refuse_other_calls(flow, stages)
    _refuse_hidden(flow)
    _refuse_shapes(flow)
    _refuse_moved(flow, stages)
    _refuse_strange_outputs(flow, stages)
    needs = [_needs(flow, stages, stage) for stage in range(len(stages))]
    for stage, sources in enumerate(needs):
        _refuse_insides(flow, stages, stage, sources)
    values = [_crossing(needs[stage:], stages.starts[stage]) for stage in range(len(stages))]
    _refuse_dtypes(flow, {value for crossing in values for value in crossing})
    return Crossings(tuple(values), tuple(_reads(flow, stages, stage) for stage in range(len(stages))))


def _needs(flow: Flow, stages: Stages, stage: int) -> frozenset[Source]:
    sources = frozenset[Source]().union(*(flow.calls[call].needs for call in stages.calls_of(stage)))
    return sources | flow.needs if stages.is_last(stage) else sources


def _reads(flow: Flow, stages: Stages, stage: int) -> frozenset[str]:
    glue = frozenset(source for source in _needs(flow, stages, stage) if isinstance(source, str))
    return glue.union(*(flow.calls[call].reads for call in stages.calls_of(stage)))


def _crossing(later: list[frozenset[Source]], start: int) -> tuple[Value, ...]:
    needed = {source for sources in later for source in sources if isinstance(source, Value)}
    return tuple(sorted((v for v in needed if v.call < start), key=lambda v: (v.call, v.leaf)))


def _refuse_insides(flow: Flow, stages: Stages, stage: int, sources: frozenset[Source]) -> None:
    own = stages.calls_of(stage)
    for source in sources:
        if isinstance(source, Inside) and source.call not in own:
            reader = next((flow.calls[c].name for c in own if source in flow.calls[c].needs), "the loss")
            raise Refused(
                f"{reader} reads a tensor that {flow.calls[source.call].name} keeps to itself (in a cache, an "
                "attribute or a hook, say) instead of returning it, so they cannot be on two stages; switch it off, "
                "or give Job(stages=...) other borders."
            )


def _refuse_other_calls(flow: Flow, stages: Stages) -> None:
    if len(flow.calls) != stages.calls:
        raise Refused(
            f"The model makes {len(flow.calls)} calls of its modules for a batch of these shapes and {stages.calls} "
            "for other shapes; a pipeline needs a model that calls its modules in the same order for every batch."
        )


def _refuse_hidden(flow: Flow) -> None:
    if flow.hidden is not None:
        raise Refused(
            f"The model calls {flow.hidden} inside an autograd function (checkpoint(..., use_reentrant=True), say), "
            "which hides gradients of tensors that cross a cut; pass use_reentrant=False, or use ac=full instead."
        )


def _refuse_shapes(flow: Flow) -> None:
    """Refuse shapes that depend on values, because receive buffers have fixed shapes."""
    if flow.shaped is not None:
        where = f"after calling {flow.shaped}" if flow.shaped else "before it calls its first module"
        raise Refused(
            f"A tensor's shape depends on values {where} (as with `x[mask]`, `nonzero` and `unique`), so what stages "
            "would have to receive changes from batch to batch; use tp, op or a data strategy."
        )


def _refuse_moved(flow: Flow, stages: Stages) -> None:
    for name, calls in flow.moved.items():
        if GLUE in calls:
            raise Refused(
                f"The model changes {name} between the calls of its modules, which not every stage would see; change "
                "it in the forward of a module that has parameters, or use tp, op or a data strategy."
            )
        if len({stages.stage_of(call) for call in calls}) > 1:
            first, *_, last = (flow.calls[call].name for call in sorted(calls))
            raise Refused(
                f"{first} and {last} change {name}, which they share, so they cannot be on two stages; give "
                "Job(stages=...) other borders, or use tp, op or a data strategy."
            )


def _refuse_strange_outputs(flow: Flow, stages: Stages) -> None:
    """Refuse outputs that a later stage, which skips the call, cannot imitate."""
    for call in flow.calls[: stages.starts[-1]]:
        strange = next((leaf.kind for leaf in call.leaves if isinstance(leaf, StrangeLeaf)), None)
        if strange:
            raise Refused(
                f"{call.name} returns a {strange}, which stages that skip the call cannot imitate; "
                "return tensors (in tuples, lists, dicts, or a class that torch.export.register_dataclass knows)."
            )


def _refuse_dtypes(flow: Flow, values: set[Value]) -> None:
    for value in values:
        leaf, name = flow.calls[value.call].leaves[value.leaf], flow.calls[value.call].name
        if not isinstance(leaf, TensorLeaf):
            continue
        crosses = f"Output {value.leaf} of {name} ({leaf.dtype}) would cross a cut"
        if leaf.dtype.is_complex:
            raise Refused(
                f"{crosses}, but PyTorch's pipelines send no complex tensors; return torch.view_as_real(...) of it, "
                "or give Job(stages=...) other borders."
            )
        if not leaf.dtype.is_floating_point and not SENDS_INTEGERS:
            raise Refused(
                f"{crosses}, but torch {torch.__version__} sends floating tensors only; use torch 2.13, or give "
                "Job(stages=...) other borders."
            )


def held_parameters(model: nn.Module, flow: Flow, stages: Stages, crossings: Crossings) -> list[frozenset[str]]:
    """Names (first of each tied group) that each stage holds: those it reads, and unread ones of its modules."""
    first = {id(p): name for name, p in model.named_parameters()}
    held = [set(names) for names in crossings.parameters]
    everywhere = set().union(*held)
    for stage, unread in _unread(model, flow, stages, first):
        if unread not in everywhere:
            held[stage].add(unread)
            everywhere.add(unread)
    held[0] |= set(first.values()) - everywhere
    return [frozenset(names) for names in held]


def _unread(model: nn.Module, flow: Flow, stages: Stages, first: dict[int, str]) -> Iterator[tuple[int, str]]:
    for stage in range(len(stages)):
        for call in stages.calls_of(stage):
            module = model.get_submodule(flow.calls[call].name)
            yield from ((stage, first[id(parameter)]) for parameter in module.parameters())
