"""What tests run on real ranks to see that dividing a model changes no number."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from meshwright import Job
from meshwright.assemble.precision import cast, cast_borders, cast_parameters
from meshwright.assemble.recompute import recompute_blocks
from meshwright.assemble.world import World
from meshwright.facts.tensor_plan import TensorPlan
from meshwright.recording.blueprint import record
from meshwright.strategies.cuts import Cuts
from meshwright.strategies.gather_whole import whole
from meshwright.strategies.tensor.layout import divided, part
from meshwright.strategies.tensor.matrix import SEQUENCE
from meshwright.strategies.tensor.mode import mode_of, tensor_region
from meshwright.strategies.tensor.replay import program_state
from meshwright.strategies.tensor.split import gathered_functions, split_tensors, to_plain
from shared_facts import found_once
from tensor_models import MODELS, job_of, plan_of, sample


def shared_plan(world: World, name: str) -> tuple[TensorPlan, tuple[str, ...]]:
    """A model's plan and blocks, found once."""
    found: tuple[TensorPlan, tuple[str, ...]] = found_once(world, ("plan", name), lambda: plan_of(job_of(name)))
    return found


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A divided model beside the whole one."""

    refused: str | None = None
    loss: float = 0.0
    whole_loss: float = 0.0
    worst: str = ""
    """The parameter whose gradient differs most."""
    difference: float = 0.0
    """By how much of its largest element."""
    gathered: dict[str, int] = field(default_factory=dict)
    local: float = 1.0
    """The share of all parameters that a rank holds."""
    replayed: int = 0
    """Blocks that ran as recorded programs."""
    unrecorded: list[str] = field(default_factory=list)
    """Why other blocks could not be recorded."""

    @property
    def equal(self) -> bool:
        return abs(self.loss - self.whole_loss) <= 1e-6 * abs(self.whole_loss) and self.difference <= 1e-5


def compare(world: World, name: str, options: Collection[str] = ()) -> Comparison:
    """Forward, loss and backward, whole and divided over all ranks, from the same weights.

    Options: sequence, recompute, bf16; ddp or fsdp on a data axis beside the tensor axis.
    """
    job = job_of(name)
    plan, blocks = shared_plan(world, name)
    data = 2 if {"ddp", "fsdp"} & set(options) else 1
    if reason := plan.refuse(world.ranks // data):
        return Comparison(refused=reason)
    axes = init_device_mesh("cpu", (data, world.ranks // data), mesh_dim_names=("data", "tensor"))
    mesh = axes["tensor"]
    reference = whole_model(job)
    model, cuts = divided_model(
        job, replace(plan, sequence=plan.sequence and "sequence" in options), mesh, blocks, reference
    )
    called = _under(options, model, blocks, axes["data"])
    if "bf16" in options:
        _lower(reference, blocks)
    batch = sample(2, seed=7)
    expected = _loss(job, reference, batch)
    expected.backward()
    mode_of(mesh).gathered.clear()
    # The first pass records the blocks' programs, the second one runs them.
    worst, difference = "", 0.0
    for _ in range(2):
        before = gathered_functions(mesh)
        model.zero_grad()
        with tensor_region(mesh):
            found = to_plain(_loss(job, called, batch), mesh)
            found.backward()
        worst, difference = max((worst, difference), _worst(model, reference, cuts), key=lambda pair: pair[1])
    again = {name: count - before.get(name, 0) for name, count in gathered_functions(mesh).items()}
    assert again == before or not before, (before, again)
    programs = [program_state(model.get_submodule(name)) for name in blocks]
    return Comparison(
        replayed=sum(any(bound.calls for bound in state.programs) for state in programs),
        unrecorded=sorted({state.reason for state in programs if state.reason}),
        loss=found.item(),
        whole_loss=expected.item(),
        worst=worst,
        difference=difference,
        gathered=before,
        local=sum(p.numel() for p in model.parameters()) / sum(p.numel() for p in reference.parameters()),
    )


def _under(options: Collection[str], model: nn.Module, blocks: tuple[str, ...], data: DeviceMesh) -> nn.Module:
    """The model under what a strategy lays over it, in the order in which `build` does."""
    modules = [model.get_submodule(name) for name in blocks]
    if "bf16" in options:
        _lower(model, blocks)
    if "recompute" in options:
        recompute_blocks(modules, "full")
    if "ddp" in options:
        return DistributedDataParallel(model, process_group=data.get_group())
    if "fsdp" in options:
        for module in (*modules, model):
            fully_shard(module, mesh=data)
    return model


def _lower(model: nn.Module, blocks: tuple[str, ...]) -> None:
    cast_parameters(model, torch.bfloat16)
    cast_borders(model, [model.get_submodule(name) for name in blocks], torch.bfloat16)


def _loss(job: Job, model: nn.Module, batch: Any) -> Tensor:
    total, _ = job.loss(cast(model(**job.inputs(batch)), torch.float32), batch)  # type: ignore[arg-type]
    return total


def whole_model(job: Job) -> nn.Module:
    torch.manual_seed(0)
    return job.model()


def divided_model(
    job: Job, plan: TensorPlan, mesh: DeviceMesh, blocks: tuple[str, ...], reference: nn.Module
) -> tuple[nn.Module, Cuts]:
    model = record(job.model, seed=0).model
    cuts = split_tensors(model, plan, mesh, blocks)
    fill(model, cuts, reference)
    return model, cuts


@torch.no_grad()
def fill(model: nn.Module, cuts: Cuts, reference: nn.Module) -> None:
    """Give a divided model on the meta device the weights of a whole one."""
    values = dict(reference.named_parameters(remove_duplicate=False))
    made: dict[int, nn.Parameter] = {}
    for name, module in model.named_modules():
        for attribute, parameter in list(module._parameters.items()):
            if parameter is None:
                continue
            full = f"{name}.{attribute}" if name else attribute
            if id(parameter) not in made:
                value = cuts[full].take(values[full]) if full in cuts else values[full].clone()
                assert value.shape == parameter.shape
                made[id(parameter)] = nn.Parameter(value, requires_grad=parameter.requires_grad)
            module._parameters[attribute] = made[id(parameter)]
        other = reference.get_submodule(name)
        module._buffers = {key: value if value is None else value.clone() for key, value in other._buffers.items()}
        for attribute, value in vars(other).items():
            if isinstance(value, Tensor):
                setattr(module, attribute, value)


def _worst(model: nn.Module, reference: nn.Module, cuts: Cuts) -> tuple[str, float]:
    wanted = {name: p.grad for name, p in reference.named_parameters()}
    # A gradient that is zero but for rounding, as that of a key's bias, is measured by the others.
    floor = 1e-2 * max(float(gradient.abs().max()) for gradient in wanted.values() if gradient is not None)
    found = [("", 0.0)]
    for name, parameter in model.named_parameters():
        expected = wanted[name]
        if expected is None or parameter.grad is None:
            found.append((name, 0.0 if (expected is None) == (parameter.grad is None) else float("inf")))
            continue
        gradient = whole(parameter.grad)
        gradient = cuts[name].join(gradient) if name in cuts else gradient
        found.append((name, float((gradient - expected).abs().max()) / max(float(expected.abs().max()), floor)))
    return max(found, key=lambda pair: pair[1])


def collectives(world: World, name: str) -> int:
    """How many collectives one forward and backward of a model take."""
    job = job_of(name)
    plan, blocks = shared_plan(world, name)
    mesh = init_device_mesh("cpu", (world.ranks,))
    model, _ = divided_model(job, replace(plan, sequence=False), mesh, blocks, whole_model(job))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile, tensor_region(mesh):
        to_plain(_loss(job, model, sample(2)), mesh).backward()
    return sum(event.name.startswith("gloo:") for event in profile.events())


def divides_a_stage(world: World) -> list[str]:
    """Divide a model of which only one block is there, as a pipeline's stage has it."""
    job = job_of("example")
    plan, blocks = shared_plan(world, "example")
    model = record(job.model, seed=0).model
    model.blocks[0] = nn.Identity()
    model.blocks[1].attention = nn.Identity()
    model.blocks[1].up._parameters["weight"] = None
    model.blocks[1].down._parameters["bias"] = None
    for name in ("token", "head"):
        del model._modules[name]
    return sorted(split_tensors(model, plan, init_device_mesh("cpu", (world.ranks,)), blocks))


def wire(world: World) -> bool:
    """A whole tensor's part along the sequence, and the divided tensor that is made from the part."""
    mesh = init_device_mesh("cpu", (world.ranks,))
    x = torch.randn(2, 8, 4, generator=torch.Generator().manual_seed(0), requires_grad=True)
    sent = part(x, SEQUENCE, mesh)
    received = divided(sent.detach().requires_grad_(), SEQUENCE, mesh)
    with tensor_region(mesh):
        again = part(received * 1, SEQUENCE, mesh)
    return sent.shape == (2, 8 // world.ranks, 4) and again.equal(sent) and to_plain(received, mesh).equal(x)


def cut_names(world: World, name: str) -> list[str]:
    """Every name under which a parameter of a model is cut."""
    plan, blocks = shared_plan(world, name)
    mesh = init_device_mesh("cpu", (world.ranks,), mesh_dim_names=("tensor",))
    return sorted(split_tensors(record(MODELS[name], seed=0).model, plan, mesh, blocks))
