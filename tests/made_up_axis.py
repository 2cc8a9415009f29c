"""A model axis in one file, as docs/design.md says, and what ranks do with it in tests/test_axis_extension.py."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import tiny_jobs
from checkpoint_programs import Arrival, Setup, go_on, train_and_save_twice
from made_up_strategy import registered
from meshwright.assemble.world import World
from meshwright.facts.costs import UnitCosts
from meshwright.facts.job import Job, NamedParameters
from meshwright.facts.model import ModelFacts
from meshwright.facts.model_axis import AxisTerm, AxisTraits
from meshwright.facts.strategy import Strategy
from meshwright.recording.wrap_forward import wrap_forward
from meshwright.strategies import InnerAxis
from meshwright.strategies.collectives import copy_in, gather
from meshwright.strategies.cuts import Cut, Cuts, narrow
from meshwright.strategies.model_axis import Division, Sent, UnitShare
from meshwright.verify.verdict import Verdict
from meshwright.verify.verify import verify


def wide_weights(facts: ModelFacts, ranks: int) -> set[str]:
    """Matrices that the ranks divide evenly and that no other module shares."""
    matrices = [p for p in facts.parameters if len(p.shape) == 2 and len(p.names) == 1]
    return {p.name for p in matrices if p.shape[0] % ranks == 0 and p.name not in facts.read_elsewhere}


class Wide(InnerAxis):
    summary = "each linear layer's outputs divided over the ranks and gathered right after"
    traits = AxisTraits(word="wide", mesh_name="wide", place=10, splits_tensors=True, autocast=False)

    def refuse(self, term: AxisTerm, strategy: Strategy, facts: ModelFacts, global_batch: int) -> str | None:
        if not wide_weights(facts, term.size):
            return f"{term} divides linear layers, and none has outputs that {term.size} divides; use ddp."
        return None

    def sizes(self, facts: ModelFacts, cluster: Any) -> range:
        return range(2, cluster.devices_per_node + 1)

    def show(self, term: AxisTerm, strategy: Strategy, facts: ModelFacts, job: Job) -> dict[str, Any]:
        return {"wide": sorted(wide_weights(facts, term.size))}

    def apply(self, model: nn.Module, facts: ModelFacts, mesh: DeviceMesh, plan: Any) -> Cuts:
        cuts: Cuts = {}
        for name, module in model.named_modules():
            if type(module) is nn.Linear and f"{name}.weight" in wide_weights(facts, mesh.size()):
                for attribute in [key for key, value in module._parameters.items() if value is not None]:
                    cuts[f"{name}.{attribute}"] = Cut(dim=0, mesh=mesh)
                    narrow(module, attribute, cuts[f"{name}.{attribute}"], {})
                wrap_forward(module, partial(gathered, mesh=mesh))
        return cuts

    def division(self, facts: ModelFacts, ranks: int) -> Division:
        return WideDivision(facts, ranks)


class Twice(InnerAxis):
    """Each rank computes everything and a share of the gradient: beside `tp` it has its own mesh and its own sum."""

    summary = "every rank does the same, and gradients are summed at the end"
    traits = AxisTraits(word="twice", mesh_name="twice", place=10)

    def apply(self, model: nn.Module, facts: ModelFacts, mesh: DeviceMesh, plan: Any) -> Cuts:
        wrap_forward(model, partial(sharing_gradient, ranks=mesh.size()))
        return {}

    def finish(self, parameters: NamedParameters, mesh: DeviceMesh) -> None:
        for parameter in parameters:
            dist.all_reduce(parameter.grad, group=mesh.get_group())


def sharing_gradient(module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any, *, ranks: int) -> Any:
    output = forward(*args, **kwargs)
    if output.requires_grad:
        output.register_hook(lambda gradient: gradient / ranks)
    return output


def gathered(module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any, *, mesh: DeviceMesh) -> Any:
    return gather(forward(copy_in(args[0], mesh)), -1, mesh)


class WideDivision(Division):
    def __init__(self, facts: ModelFacts, ranks: int) -> None:
        self._ranks, self._modules = ranks, {name.rpartition(".")[0] for name in wide_weights(facts, ranks)}

    def parts_of(self, names: tuple[str, ...]) -> int:
        return self._ranks if any(name.rpartition(".")[0] in self._modules for name in names) else 1

    def share(self, unit: UnitCosts, samples: int, stream: float) -> UnitShare:
        layers = len({name.rpartition(".")[0] for name in unit.parameters} & self._modules)
        if not layers:
            return UnitShare()
        return UnitShare(
            kernel_parts=lambda kernel: self._ranks if kernel.kind == "matmul" else 1,
            forward=(Sent(kind="all_gather", bytes=stream, times=layers),),
            backward=(Sent(kind="all_reduce", bytes=stream, times=layers),),
        )


def verdicts(world: World, facts: ModelFacts) -> list[Verdict]:
    with registered(Wide()):
        asked = ["wide=2", "wide=2,mb=1", "wide=2,bf16,ac=full"]
        return list(verify(tiny_jobs.transformer, facts, asked, world, steps=2))


def hybrids(world: World, facts: ModelFacts) -> list[Verdict]:
    with registered(Wide()), registered(Twice()):
        asked = ["fsdp=2,wide=2", "pp=2:1f1b,wide=2", "tp=2,twice=2"]
        return list(verify(tiny_jobs.transformer, facts, asked, world, steps=2))


def move(world: World, facts: ModelFacts, source: str, target: str, folder: str) -> Arrival:
    half, whole = (str(Path(folder, name)) for name in ("half", "whole"))
    with registered(Wide()):
        train_and_save_twice(world, Setup("transformer", facts, source), half, whole)
        return go_on(world, Setup("transformer", facts, target), [half], whole, folder)[0]
