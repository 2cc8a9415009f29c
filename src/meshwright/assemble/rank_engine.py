"""The engine of one rank under the model axes: its pipeline stages and its cuts of the parameters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from meshwright.assemble.apply import model_region
from meshwright.assemble.axes import Axes
from meshwright.facts.job import NamedParameters
from meshwright.strategies import inner_axis
from meshwright.strategies.cuts import Cut, Cuts
from meshwright.strategies.engine import Engine, HeldTensor, Read
from meshwright.strategies.model_axis import InnerAxis
from meshwright.strategies.norm import global_square, local


@dataclass(frozen=True, kw_only=True)
class Holders:
    """Which stages hold which parameters, and which pipeline ranks run the stages."""

    held: tuple[frozenset[str], ...]
    """By stage: names of parameters, the first of each tied group."""
    ranks: tuple[int, ...]
    """By stage: its rank on the pipeline axis."""
    own: tuple[int, ...]
    """The stages of this rank, in the order of its engines."""
    buffers: Mapping[str, int] = field(default_factory=dict)
    """The stage that changes each buffer, for buffers that change."""

    def owner(self, name: str) -> int:
        """The first stage that holds a parameter. The norm and checkpoints use its copy."""
        return self.stages_of(name)[0]

    def shared(self) -> list[str]:
        """Parameters that several stages hold, in the same order on all ranks."""
        counts = Counter(name for names in self.held for name in names)
        return sorted(name for name, count in counts.items() if count > 1)

    def stages_of(self, name: str) -> list[int]:
        return [stage for stage, names in enumerate(self.held) if name in names]


class RankEngine(Engine):
    """Combines the engines of this rank's stages (one without a pipeline), whose parameters may be cut."""

    def __init__(
        self,
        engines: list[Engine],
        axes: Axes,
        *,
        cuts: Cuts,
        pristine: nn.Module | None = None,
        holders: Holders | None = None,
    ) -> None:
        models = [engine.model for engine in engines]
        super().__init__(models[0] if len(models) == 1 else nn.ModuleList(models), engines[0].module)
        self.engines, self.axes, self.cuts, self.holders = engines, axes, cuts, holders
        self.gradient_scale, self.averages_scaled = engines[0].gradient_scale, engines[0].averages_scaled
        self.updates_copies = engines[0].updates_copies
        self._pristine = pristine
        self._groups = self._groups_of_shared() if holders else {}
        self._whole, self._cut = self._norm_parameters()

    def _groups_of_shared(self) -> dict[str, dist.ProcessGroup | None]:
        """For each shared parameter, this rank's group of its holders; None if no other rank is in it."""
        assert self.holders is not None
        groups: dict[tuple[int, ...], dist.ProcessGroup | None] = {}
        found = {}
        for name in self.holders.shared():
            members = tuple(sorted({self.holders.ranks[stage] for stage in self.holders.stages_of(name)}))
            if members not in groups:
                groups[members] = self.axes.stage_group(members) if len(members) > 1 else None
            found[name] = groups[members]
        return found

    def region(self) -> AbstractContextManager[Any]:
        return model_region(self.axes)

    @contextmanager
    def accumulating(self, last: bool) -> Iterator[None]:
        with ExitStack() as stack:
            for engine in self.engines:
                stack.enter_context(engine.accumulating(last))
            yield

    def backward(self, loss: torch.Tensor) -> None:
        self.engines[0].backward(loss)

    def finish(self) -> None:
        for engine in self.engines:
            engine.finish()
        for term, mesh in self.axes.inner:
            axis = inner_axis(term)
            if type(axis).finish is not InnerAxis.finish:  # finding the parameters walks over the model
                axis.finish(self.parameters(), mesh)
        for name, group in self._groups.items():
            self._sum_shared(name, group)

    def leaves(self) -> list[nn.Parameter]:
        return [leaf for engine in self.engines for leaf in engine.leaves()]

    def reduces(self, asked: bool) -> bool:
        return all([engine.reduces(asked) for engine in self.engines])

    def begin_backward(self) -> None:
        for engine in self.engines:
            engine.begin_backward()

    def end_backward(self, *, reduced: bool, factor: float) -> None:
        for engine in self.engines:
            engine.end_backward(reduced=reduced, factor=factor)

    def attach_used_elsewhere(self, output: torch.Tensor) -> torch.Tensor:
        return self.engines[0].attach_used_elsewhere(output)

    def follow_requires_grad(self) -> None:
        for engine in self.engines:
            engine.follow_requires_grad()

    def parameters(self) -> NamedParameters:
        return NamedParameters(pair for engine in self.engines for pair in engine.parameters().named())

    @torch.no_grad()
    def norm(self, own: NamedParameters) -> torch.Tensor:
        device = next(iter(own or self.model.parameters())).device  # a rank's stages may be frozen
        square = global_square(_gradients(self._whole)).to(device)
        for _, mesh in self.axes.inner:
            part = global_square(_gradients(self._cut.get(mesh, []))).to(device)
            dist.all_reduce(part, group=mesh.get_group())
            square = part + square
        if self.axes.stages is not None:
            dist.all_reduce(square, group=self.axes.stages.get_group())
        return square.sqrt()

    def counted(self) -> set[int]:
        return {id(parameter) for own in (self._whole, *self._cut.values()) for parameter in own}

    def _norm_parameters(self) -> tuple[list[nn.Parameter], dict[DeviceMesh, list[nn.Parameter]]]:
        """Parameters whose squares this rank adds to the norm: whole ones, and cut ones by their mesh.

        A parameter that several stages share counts on its first stage only.
        """
        whole: list[nn.Parameter] = []
        cut: dict[DeviceMesh, list[nn.Parameter]] = {}
        for engine, stage in zip(self.engines, self.holders.own if self.holders else [0], strict=True):
            for name, parameter in engine.parameters().named():
                if self.holders is None or self.holders.owner(name) == stage:
                    own = cut.setdefault(self.cuts[name].mesh, []) if name in self.cuts else whole
                    own.append(parameter)
        return whole, cut

    def updated(self) -> None:
        for engine in self.engines:
            engine.updated()

    def forget_gradients(self) -> None:
        for engine in self.engines:
            engine.forget_gradients()

    def resident(self) -> dict[str, list[torch.Tensor]]:
        found: dict[str, list[torch.Tensor]] = {}
        for engine in self.engines:
            for kind, tensors in engine.resident().items():
                found.setdefault(kind, []).extend(tensors)
        return found

    def collect(self, read: Read, names: Container[str] | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        if self.holders is None or self._pristine is None:
            for name, tensor in self.engines[0].collect(read, names):
                yield name, self._join(name, tensor)
            return
        owners = self._owners(self._pristine, self.holders)
        for stage in range(len(self.holders.held)):
            own = [name for name, owner in owners.items() if owner == stage and (names is None or name in names)]
            yield from self._collect_stage(stage, own, read)

    def held(self) -> Iterator[HeldTensor]:
        if self.holders is None or self._pristine is None:
            for held in self.engines[0].held():
                yield replace(held, cut=self.cut_of(held.name))
            return
        owners = self._owners(self._pristine, self.holders)
        parameters = {name for name, _ in self._pristine.named_parameters(remove_duplicate=False)}
        for engine, stage in zip(self.engines, self.holders.own, strict=True):
            for held in engine.held():
                current = held.name in parameters or owners[held.name] == stage
                yield replace(held, cut=self.cut_of(held.name), current=current)

    def cut_of(self, name: str) -> Cut | None:
        return self.cuts.get(name)

    def loaded(self) -> None:
        for engine in self.engines:
            engine.loaded()

    def _owners(self, pristine: nn.Module, holders: Holders) -> dict[str, int]:
        """The stage that holds the current value, for every name in the unsplit model's state."""
        first = {id(p): name for name, p in pristine.named_parameters()}
        owners = {}
        for name, tensor in pristine.state_dict(keep_vars=True).items():
            if id(tensor) in first:
                owners[name] = holders.owner(first[id(tensor)])
            elif isinstance(tensor, torch.Tensor):
                near = next((holders.owner(first[id(p)]) for p in _nearest_parameters(pristine, name)), 0)
                owners[name] = holders.buffers.get(name, near)
        return owners

    def _collect_stage(self, stage: int, names: list[str], read: Read) -> Iterator[tuple[str, torch.Tensor]]:
        """Broadcast a stage's tensors to all ranks of the pipeline."""
        assert self.holders is not None and self.axes.stages is not None and self._pristine is not None
        group, source = self.axes.stages.get_group(), self.holders.ranks[stage]
        device = next(self.model.parameters()).device
        if stage in self.holders.own:
            engine = self.engines[self.holders.own.index(stage)]
            for name, part in engine.collect(read, names):
                tensor = self._join(name, part).contiguous()
                dist.broadcast(tensor, group_src=source, group=group)
                yield name, tensor
            return
        like = self._pristine.state_dict(keep_vars=True)
        for name in names:
            # With `pure` the unsplit model's parameters were cast like the masters.
            tensor = torch.empty(like[name].shape, dtype=like[name].dtype, device=device)
            dist.broadcast(tensor, group_src=source, group=group)
            yield name, tensor

    def _join(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        return self.cuts[name].join(tensor) if name in self.cuts else tensor

    @torch.no_grad()
    def _sum_shared(self, name: str, group: dist.ProcessGroup | None) -> None:
        """Sum the gradients of a shared parameter over all stages that hold it."""
        assert self.holders is not None
        own = [e for e, stage in zip(self.engines, self.holders.own, strict=True) if name in self.holders.held[stage]]
        parameters = [p for e in own for n, p in e.parameters().named() if n == name]
        if not parameters:
            return
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        gradients = [local(p.grad) for p in parameters if p.grad is not None]
        total = torch.stack(gradients).sum(0) if len(gradients) > 1 else gradients[0]
        if group is not None:
            dist.all_reduce(total, group=group)
        for gradient in gradients:
            if gradient is not total:
                gradient.copy_(total)


def _gradients(parameters: list[nn.Parameter]) -> list[torch.Tensor]:
    return [p.grad for p in parameters if p.grad is not None]


def _nearest_parameters(model: nn.Module, name: str) -> Iterator[nn.Parameter]:
    """Parameters in a buffer's module, then in the modules around it, from the inside out."""
    while name:
        name = name.rpartition(".")[0]
        yield from model.get_submodule(name).parameters()
