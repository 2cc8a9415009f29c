"""Find how tensor parallelism can divide a model: from the job's hint, the model's own plan, or its structure.

One forward pass on fake tensors shows which linear layers feed each other. In a block, linear layers whose outputs
reach another linear layer through the author's code are divided by their outputs (columns), and that other layer by
its inputs (row). Between them every rank works on its own heads or its own part of the width, and only the row layer's
result is summed over ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from meshwright.describe.blocks import own_parameters
from meshwright.describe.calls import Call, Flow, TensorLeaf, Value
from meshwright.describe.flow import Watcher
from meshwright.describe.linear_layers import is_linear, output_dim, output_width
from meshwright.describe.observe import trace
from meshwright.describe.output_cuts import OutputCuts
from meshwright.describe.pass_tensors import PassCache
from meshwright.describe.tensor_hints import from_job, from_model
from meshwright.facts.job import Job
from meshwright.facts.tensor_plan import SOURCES, TensorPlan, TensorRow
from meshwright.recording.blueprint import Blueprint

NEVER_CALLED = "never called by itself"


def find_tensor_plan(
    job: Job,
    blueprint: Blueprint,
    blocks: Sequence[str],
    pass_cache: PassCache | None = None,
    read_elsewhere: frozenset[str] = frozenset(),
) -> TensorPlan:
    """The role of every layer with a weight matrix. Raises JobError for a hint that does not fit the model.

    `read_elsewhere` names parameters that are read, or whose shape is read, outside the modules that own them.
    """
    model = blueprint.model
    modules = model.named_modules()
    layers = {name: module for name, module in modules if is_linear(module) or isinstance(module, nn.Embedding)}
    owners = _owners(model)
    watcher = Watcher(owners)
    outputs = OutputCuts(watcher, layers)
    watcher.seen = outputs.look
    flow, unseen = trace(job, blueprint, watcher, pass_cache=pass_cache, observer=outputs)
    if pass_cache is not None and flow is not None:
        pass_cache.flows[frozenset(owners)] = flow
    given = from_model(model, layers) | from_job(job, layers)
    found = _Finder(model, layers, flow, frozenset(blocks), given, outputs, read_elsewhere)
    return TensorPlan(rows=tuple(found.rows(unseen)), sequence=found.has_sequence())


def _owners(model: nn.Module) -> list[str]:
    """Modules that own parameters and contain no other such modules: those would be hidden inside."""
    owners = [name for name, module in model.named_modules() if own_parameters(module)]
    above = {"" for name in owners if name}
    for name in owners:
        parts = name.split(".")
        above |= {".".join(parts[:count]) for count in range(1, len(parts))}
    return [name for name in owners if name not in above]


@dataclass
class _Finder:
    """Decides the roles of a model's layers, in the order of their calls."""

    model: nn.Module
    layers: dict[str, nn.Module]
    flow: Flow | None
    blocks: frozenset[str]
    given: dict[str, tuple[str, str]]
    outputs: OutputCuts
    read_elsewhere: frozenset[str] = frozenset()
    role: dict[str, str] = field(default_factory=dict)
    reason: dict[str, str] = field(default_factory=dict)
    feeds: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        self._names = {
            layer: [names[id(p)] for p in module._parameters.values() if p is not None]
            for layer, module in self.layers.items()
        }
        """The names of each layer's parameters; a tied parameter has the first of its names."""
        self._readers: dict[str, set[str]] = {}
        """The modules that read each parameter, in them or in the code before them; "" for the loss."""
        calls = self.flow.calls if self.flow else ()
        readers = [(call.name, call.reads | call.needs) for call in calls]
        for reader, sources in [*readers, ("", self.flow.needs if self.flow else frozenset())]:
            for source in sources:
                if isinstance(source, str):
                    self._readers.setdefault(source, set()).add(reader)
        self._called = {call.name for call in calls}
        self._call_blocks = [self._block(call.name) for call in calls]

    def rows(self, unseen: str) -> Iterator[TensorRow]:
        self.role |= {name: role for name, (role, _) in self.given.items()}
        self._refuse_what_cannot_be()
        if self.flow is None:
            self.reason |= dict.fromkeys(self.layers, f"a step on fake tensors could not be run: {unseen}")
        else:
            self._divide_vocabulary()
            self._pair()
        self._agree_on_tied()
        for name in self.layers:
            yield self._row(name)

    def has_sequence(self) -> bool:
        """Whether every row layer returns (batch, sequence, width).

        Conv1D does not count: it merges batch and sequence, so dividing the sequence would send more than it saves.
        """
        calls = [call for call in (self.flow.calls if self.flow else ()) if self.role.get(call.name) == "row"]
        shapes = [leaf.shape for call in calls for leaf in call.leaves if isinstance(leaf, TensorLeaf)]
        plain = all(isinstance(self.layers[call.name], nn.Linear) for call in calls)
        return bool(shapes) and plain and all(len(shape) == 3 for shape in shapes)

    def _refuse_what_cannot_be(self) -> None:
        """Keep layers whole that cannot be divided, such as those whose weight is read outside their call."""
        for name, module in self.layers.items():
            if reason := self._obstacle(name, module):
                self.role[name], self.reason[name] = "whole", reason

    def _obstacle(self, name: str, module: nn.Module) -> str:
        if isinstance(module, nn.Embedding) and (module.max_norm is not None or module.sparse):
            return "its rows are renormalised or its gradient is sparse"
        if self.flow is None:
            return ""
        if name not in self._called:
            return NEVER_CALLED
        for parameter in self._names[name]:
            outside = any(parameter not in self._names.get(reader, ()) for reader in self._readers.get(parameter, ()))
            if outside or parameter in self.read_elsewhere:
                return f"{parameter} is also read outside of it"
        return ""

    def _divide_vocabulary(self) -> None:
        """Divide the token embedding, and heads of its width whose output the loss needs."""
        assert self.flow is not None
        tables = {name: m for name, m in self.layers.items() if isinstance(m, nn.Embedding)}
        sizes = {table.num_embeddings for table in tables.values()}
        needed = {self.flow.calls[s.call].name for s in self.flow.needs if isinstance(s, Value)}
        heads = [
            n
            for n in self.layers
            if n in needed and is_linear(self.layers[n]) and output_width(self.layers[n]) in sizes
        ]
        vocabulary = {output_width(self.layers[name]) for name in heads} or {max(sizes, default=0)}
        for name in heads:
            if self.role.get(name) in (None, "column"):
                self.role[name] = "vocabulary"
        for name, table in tables.items():
            if table.num_embeddings in vocabulary:
                self.role.setdefault(name, "vocabulary")
            elif name not in self.role:
                self.role[name], self.reason[name] = "whole", "not the vocabulary"

    def _pair(self) -> None:
        """In call order, make a linear layer that others of its block feed a row, and those columns."""
        assert self.flow is not None
        seen: set[str] = set()
        for call in self.flow.calls:
            if call.name in seen or call.name not in self.layers or not is_linear(self.layers[call.name]):
                continue
            seen.add(call.name)
            sources, strange = self._sources(call)
            may_be_columns = sources and all(self.role.get(source) in (None, "column") for source in sources)
            if self.role.get(call.name) in (None, "row") and not strange and may_be_columns:
                self.role[call.name] = "row"
            if self.role.get(call.name) == "row":
                for source in sources:
                    if self.role.setdefault(source, "column") == "column":
                        self.feeds.setdefault(source, call.name)

    def _sources(self, call: Call) -> tuple[set[str], bool]:
        """Linear layers of the call's block that reach its input, and whether another kind of layer does.

        They may pass through layers whose parameters are vectors, such as normalisations. Embeddings are no obstacle:
        they return a bias over positions, which stays whole.
        """
        assert self.flow is not None
        linears: set[str] = set()
        strange = False
        waiting, block = list(call.needs), self._block(call.name)
        visited: set[int] = set()
        while waiting:
            source = waiting.pop()
            if not isinstance(source, Value) or source.call in visited:
                continue
            visited.add(source.call)
            other = self.flow.calls[source.call]
            if self._call_blocks[source.call] != block:
                strange |= not block  # blocks return the residual stream, which stays whole
                continue
            if other.name in self.layers:
                if is_linear(self.layers[other.name]):
                    linears.add(other.name)
            elif all(p.dim() < 2 for p in self.model.get_submodule(other.name).parameters()):
                waiting += other.needs
            else:
                strange = True
        return linears, strange

    def _block(self, name: str) -> str:
        """The block that contains a module; blocks never contain each other."""
        while name := name.rpartition(".")[0]:
            if name in self.blocks:
                return name
        return ""

    def _agree_on_tied(self) -> None:
        """Keep layers whole that share a weight but have different roles."""
        names: dict[int, list[str]] = {}
        for name, module in self.layers.items():
            names.setdefault(id(module.weight), []).append(name)
        for tied in names.values():
            roles = {self.role.get(name, "whole") for name in tied if self.reason.get(name) != NEVER_CALLED}
            self.role |= {name: role for name in tied for role in roles if self.reason.get(name) == NEVER_CALLED}
            if len(tied) > 1 and len(roles) > 1:
                for name in tied:
                    others = ", ".join(other for other in tied if other != name)
                    self.role[name], self.reason[name] = "whole", f"shares its weight with {others}, not divided alike"

    def _row(self, name: str) -> TensorRow:
        module: Any = self.layers[name]
        role = self.role.get(name, "whole")
        given, giver = self.given.get(name, ("", "found"))
        # A plan may call a head a column; here it divides the vocabulary.
        source = giver if role == given or (role, given) == ("vocabulary", "column") else "found"
        if role == "whole":
            return TensorRow(
                module=name, role=role, source=source, reason=self.reason.get(name) or self._unpaired(name)
            )
        if role == "column":
            pieces, heads = self.outputs.pieces.get(name, 1), self.outputs.heads.get(name)
            parts, what = (heads, "heads") if heads else (output_width(module) // pieces, "width")
            feeds = self.feeds.get(name, "")
            return TensorRow(module=name, role=role, parts=parts, what=what, pieces=pieces, feeds=feeds, source=source)
        dim = 0 if role == "vocabulary" else 1 - output_dim(module)
        what = "vocabulary" if role == "vocabulary" else "width"
        return TensorRow(module=name, role=role, parts=int(module.weight.shape[dim]), what=what, source=source)

    def _unpaired(self, name: str) -> str:
        if self.given.get(name, ("",))[0] == "whole":
            return SOURCES[self.given[name][1]]
        return "no partner: it feeds no linear layer of its block, and none feeds it alone"
