"""Describe a job's model before any weight exists: the facts that strategies need."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import nn

from meshwright.describe.blocks import find_blocks, find_units, own_parameters
from meshwright.describe.calls import Call, TensorLeaf
from meshwright.describe.collectives_in_code import find_collectives
from meshwright.describe.draws import DrawWatcher, GeneratorLines, GeneratorWatch
from meshwright.describe.experts import MixtureWatch
from meshwright.describe.flow import Watcher
from meshwright.describe.head import HeadWatch
from meshwright.describe.loss_over import find_loss_over
from meshwright.describe.moved_state import StateWatch, Watches, find_moved, refuse_made
from meshwright.describe.observe import Observed, forward_passes, observe, trace
from meshwright.describe.optimizer import check_optimizer, couplings, optimizer_slots
from meshwright.describe.parameter_reads import OutsideReads
from meshwright.describe.pass_tensors import PassCache, is_small
from meshwright.describe.read_values import assumptions
from meshwright.describe.repeats import find_repeats
from meshwright.describe.shard_units import candidate_units, usable_units
from meshwright.describe.tensor_plan import find_tensor_plan
from meshwright.describe.value_reads import find_value_reads
from meshwright.errors import JobError
from meshwright.facts.job import Job
from meshwright.facts.model import CallFacts, DrawFacts, ModelFacts, ParameterFacts
from meshwright.importing import without_garbage_collection
from meshwright.recording.blueprint import Blueprint, record
from meshwright.recording.caches import forgetting
from meshwright.recording.memory import has_memory, names_of_parameters
from meshwright.torch_private.modules import BatchNorm
from meshwright.torch_private.tensors import storage_id


@without_garbage_collection()
@forgetting()
def describe(job: Job) -> ModelFacts:
    """The facts of a job's model. Raises JobError if the job's parts do not fit each other."""
    blueprint = record(job.model, seed=0, values=False)
    model = blueprint.model
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise JobError("The model has no trainable parameter; set requires_grad on what is to be trained.")
    check_optimizer(job, model)
    blocks = find_blocks(model, hint=job.blocks)
    pass_cache = PassCache(find_repeats(model, blocks))
    units = candidate_units(model, blocks, job.units)
    outside = OutsideReads(model, units)
    state, head, generators, mixtures = StateWatch(model), HeadWatch(model), GeneratorWatch(), MixtureWatch(model)
    watches = Watches(outside, state, head, generators, mixtures)
    observed, unseen = observe(job, blueprint, watches, pass_cache=pass_cache)
    refuse_made(state.made)
    if observed and job.blocks is None:  # parameters are gathered when a block is called
        blocks = tuple(name for name in blocks if name in observed.called)
    if observed:
        chosen = job.units is not None
        units = usable_units(units, blocks, observed.called, set(outside.found.values()), chosen=chosen)
    elif job.units is None:
        units = blocks  # what else reads a module around them is not known
    # A model that cannot be run is assumed to read values in its blocks, as a mixture of experts does.
    in_blocks, around_blocks = observed is None, False
    if observed and observed.by_value:
        values = is_small(model)
        in_blocks, around_blocks = find_value_reads(job, record(job.model, seed=0, values=values), blocks)
        observed = replace(observed, by_value=in_blocks or around_blocks)
    watcher = DrawWatcher(find_units(model, blocks, observed.called) if observed else (), model)
    flow, _ = trace(job, blueprint, watcher, pass_cache=pass_cache) if observed else (None, "")
    calls = flow.calls if flow else ()
    draws = (*watcher.draws, *(_other_draws(job, blueprint) if generators.moved else ()))
    loss_over = find_loss_over(job, sum(parameter.numel() for parameter in model.parameters()))
    return ModelFacts(
        parameters=parameter_facts(model, observed),
        blocks=blocks,
        shard_units=units,
        calls=tuple(CallFacts(name=c.name, flops=c.flops, reads=tuple(sorted(c.reads))) for c in calls),
        tokens=tokens_between(calls, blocks),
        optimizer_slots=optimizer_slots(job, model),
        couplings=couplings(job, model),
        batch_norms=batch_norm_names(model),
        weight_per_sample=observed.weight_per_sample if observed and loss_over.kind != "batch" else None,
        loss_over=loss_over.kind,
        mixed_output=loss_over.mixed,
        mixing_module=loss_over.module,
        loss_form=loss_over.form,
        tensor_plan=find_tensor_plan(job, blueprint, blocks, pass_cache, observed.read_elsewhere) if observed else None,
        experts=mixtures.experts() if observed else (),
        head=head.head if observed else None,
        read_elsewhere=tuple(sorted(observed.read_elsewhere | read_elsewhere(job, blueprint, pass_cache)))
        if observed
        else (),
        read_outside=tuple(sorted(name for name, unit in outside.found.items() if unit in units)),
        moved=find_moved(job, model, state.changed | state.appeared) if observed else (),
        aliased=aliased_parameters(model),
        evaluated=evaluated_modules(model),
        by_value=in_blocks or around_blocks,
        blocks_by_value=around_blocks,
        assumed=assumptions(observed.reads) if observed else (),
        drops=bool(watcher.draws),
        draws=draws,
        collectives=find_collectives(model, job.loss),
        unseen=unseen,
    )


def tokens_between(calls: Sequence[Call], blocks: Sequence[str]) -> tuple[int, ...]:
    """The numbers of tokens in what blocks return first, if that is (batch, tokens, width)."""
    first = [call.leaves[0] for call in calls if call.name in blocks and call.leaves]
    shapes = [leaf.shape for leaf in first if isinstance(leaf, TensorLeaf) and leaf.dtype.is_floating_point]
    return tuple(sorted({shape[1] for shape in shapes if len(shape) == 3}))


def _other_draws(job: Job, blueprint: Blueprint) -> tuple[DrawFacts, ...]:
    """Where a pass draws from Python's or numpy's generator."""
    lines = GeneratorLines(blueprint.model)
    forward_passes(job, blueprint, lines)
    return tuple(lines.draws)


def read_elsewhere(job: Job, blueprint: Blueprint, pass_cache: PassCache | None = None) -> frozenset[str]:
    """Names of parameters that operators read outside the modules that own them."""
    owners = frozenset(name for name, module in blueprint.model.named_modules() if name and own_parameters(module))
    flow = pass_cache.flows.get(owners) if pass_cache else None
    if flow is None:
        flow, _ = trace(job, blueprint, Watcher(owners), pass_cache=pass_cache)
    if flow is None:
        return frozenset()
    found = {source for sources in (flow.needs, *(call.needs for call in flow.calls)) for source in sources}
    names = {source for source in found if isinstance(source, str)}
    aliases = {group[0]: group for group in names_of_parameters(blueprint.model).values()}
    for call in flow.calls:
        names |= {n for n in call.reads if not any(alias.startswith(f"{call.name}.") for alias in aliases[n])}
    return frozenset(alias for name in names for alias in aliases[name])


def aliased_parameters(model: nn.Module) -> tuple[tuple[str, str], ...]:
    """Pairs of different parameters that share memory."""
    first: dict[int, str] = {}
    pairs = []
    for name, parameter in model.named_parameters():
        if parameter.numel() and has_memory(parameter):
            owner = first.setdefault(storage_id(parameter.untyped_storage()), name)
            pairs += [(owner, name)] if owner != name else []
    return tuple(pairs)


def evaluated_modules(model: nn.Module) -> tuple[str, ...]:
    """The outermost modules in eval mode; none if the whole model is, as after `from_pretrained`."""
    if not model.training:
        return ()
    found: list[str] = []
    for name, module in model.named_modules():
        if not module.training and not any(name.startswith(f"{outer}.") for outer in found):
            found.append(name)
    return tuple(found)


def batch_norm_names(model: nn.Module) -> tuple[str, ...]:
    return tuple(n for n, m in model.named_modules() if isinstance(m, BatchNorm))


def parameter_facts(model: nn.Module, observed: Observed | None) -> tuple[ParameterFacts, ...]:
    """Every parameter once, with all its names."""
    names = names_of_parameters(model)
    return tuple(
        ParameterFacts(
            names=tuple(names[id(parameter)]),
            shape=tuple(parameter.shape),
            itemsize=parameter.dtype.itemsize,
            trainable=parameter.requires_grad,
            used=observed is None or observed.by_value or not parameter.requires_grad or name in observed.used,
            contiguous=parameter.is_contiguous(),
        )
        for name, parameter in model.named_parameters()
    )
