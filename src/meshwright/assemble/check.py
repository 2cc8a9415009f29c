"""Refuse strategies that cannot run, before any process starts, with the reason and what to do instead."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from meshwright.assemble.batch import has_stand_ins, micro_steps
from meshwright.assemble.float8 import gpus_have_float8
from meshwright.describe.batch_layout import Rows, pairs_of
from meshwright.describe.learnt_layout import learn_layout
from meshwright.describe.observe import make_batch
from meshwright.describe.structure import tensors_of
from meshwright.errors import NotBuiltYet, Refused
from meshwright.facts.job import Job, NamedParameters
from meshwright.facts.model import ModelFacts
from meshwright.facts.model_axis import MODEL_AXES
from meshwright.facts.precision import FORMATS
from meshwright.facts.strategy import Strategy
from meshwright.recording.blueprint import model_to_read
from meshwright.strategies import DATA_STRATEGIES, Place, data_strategy, model_axis
from meshwright.strategies.deepspeed.user_config import refuse_contradictions, without_job
from meshwright.strategies.float8 import refuse_float8_axes
from meshwright.strategies.graphs import refuse_cut_losses, refuse_graphs
from meshwright.strategies.inside_data import refuse_inside_data
from meshwright.strategies.moved_state import refuse_moved
from meshwright.strategies.pieced_loss import refuse_pieced
from meshwright.strategies.pipeline.sizes import count_micro_batches, is_pipelined


def check(job: Job, facts: ModelFacts, strategy: Strategy, place: Place) -> Strategy:
    """Resolve the strategy for the place's ranks; raise `Refused` if the job cannot run under it."""
    resolved = check_strategy(facts, strategy, place)
    if reason := (
        _refuse_batch(job, facts, resolved)
        or refuse_whole_batch(job, facts, resolved)
        or refuse_cut_losses(resolved, facts, resolved.data_ranks * micro_steps_of(job, resolved))
        or refuse_pieced(facts, resolved)
        or _refuse_scatter(job, resolved)
        or refuse_optimizer(facts.couplings, resolved)
        or (facts.moved and refuse_moved(resolved, facts, micro_steps_of(job, resolved)))
        or _refuse_model_axes(job, facts, resolved)
        or _refuse_on_deepspeed(job, resolved)
    ):
        raise Refused(reason)
    return resolved


def micro_steps_of(job: Job, strategy: Strategy) -> int:
    """Micro-batches of a rank in one step of a resolved strategy."""
    if is_pipelined(strategy):
        return count_micro_batches(strategy, job.global_batch)
    return micro_steps(job.global_batch, strategy.data_ranks, strategy.micro_batch)


def check_strategy(facts: ModelFacts, strategy: Strategy, place: Place) -> Strategy:
    """`check` for a model without a job."""
    refuse_unbuilt(strategy)
    resolved = strategy.resolve(place.ranks)
    refuse_missing_gpus(place)
    reason = data_strategy(resolved).refuse(resolved, facts, place) or _refuse_offload(resolved)
    reason = reason or _refuse_float8(resolved, place)
    reason = reason or refuse_graphs(resolved, facts) or _refuse_graphs_on_cpu(resolved, place)
    if reason := reason or _refuse_compile(resolved, facts):
        raise Refused(reason)
    return resolved


def check_engine_config(config: Mapping[str, Any], job: Job, strategy: Strategy) -> dict[str, Any]:
    """The part of a user's configuration that goes to DeepSpeed; raises if it contradicts the run."""
    if strategy.engine != "deepspeed":
        raise Refused(f"A DeepSpeed configuration was given, but {strategy} does not use it; add engine=deepspeed.")
    model = model_to_read(job.model)
    parameters = NamedParameters((name, p) for name, p in model.named_parameters() if p.requires_grad)
    refuse_contradictions(config, strategy, job, job.optimizer(parameters))
    return without_job(config)


def refuse_missing_gpus(place: Place) -> None:
    if place.device == "cuda" and place.local_ranks > place.devices:
        raise Refused(
            f"{place.local_ranks} ranks need as many GPUs, but this machine has {place.devices}; "
            f"use --ranks {place.devices} or fewer, or --device cpu."
        )


def refuse_unbuilt(strategy: Strategy) -> None:
    """Refuse terms that are in the grammar but that no engine runs."""
    unbuilt = {
        "auto": strategy.auto,
        f"offload=nvme:{strategy.nvme}": strategy.offload == "nvme" and strategy.engine == "torch",
    }
    for term, asked in unbuilt.items():
        if asked:
            raise NotBuiltYet(
                f"{term} is a strategy term, but no engine here runs it yet; these run: {', '.join(DATA_STRATEGIES)}, "
                f"{', '.join(MODEL_AXES)}, with {', '.join(FORMATS)}, ac, offload=optimizer|params, mb, compile and "
                "graphs; engine=deepspeed runs zero3,offload=nvme:DIR, too."
            )


def _refuse_compile(strategy: Strategy, facts: ModelFacts) -> str | None:
    if strategy.compile and strategy.recompute != "none" and facts.batch_norms:
        return (
            f"torch.compile cannot go through a block that is recomputed and has BatchNorm ({facts.batch_norms[0]}); "
            f"drop compile or ac={strategy.recompute}."
        )
    if strategy.compile and strategy.recompute == "selective" and strategy.inner_axes:
        word = strategy.inner_axes[0].word
        return f"ac=selective is not built for compile with {word}; use ac=full, or drop compile or ac=selective."
    return None


def _refuse_float8(strategy: Strategy, place: Place) -> str | None:
    if not strategy.number_format.factors:
        return None
    if place.device == "cuda" and not gpus_have_float8():
        return (
            f"{strategy.precision} needs GPUs that multiply float8 matrices (Ada, Hopper or later), and those of this "
            f"machine do not; use bf16 in place of {strategy.precision}."
        )
    return refuse_float8_axes(strategy)


def _refuse_graphs_on_cpu(strategy: Strategy, place: Place) -> str | None:
    if strategy.graphs and place.device != "cuda":
        return f"graphs needs a GPU, and this would run on the {place.device.upper()}; drop it from {strategy}."
    return None


def _refuse_on_deepspeed(job: Job, strategy: Strategy) -> str | None:
    if job.on_gradient is not None and strategy.engine == "deepspeed":
        return "Job(on_gradient=...) cannot run under engine=deepspeed, which clips and updates by itself."
    if job.ema is not None and strategy.offload == "nvme":
        return f"Job(ema=...) averages masters, and {strategy} keeps them in DeepSpeed's files; use offload=params."
    return None


def _refuse_offload(strategy: Strategy) -> str | None:
    if strategy.offload == "params" and not strategy.traits.gathers:
        return f"offload=params streams sharded parameters, so it needs fsdp or hsdp; {strategy} keeps them whole."
    return None


def refuse_optimizer(couplings: Sequence[str], strategy: Strategy) -> str | None:
    """Why an optimizer with these couplings cannot update what the strategy would give it; None if it can."""
    if couplings and strategy.engine == "deepspeed":
        return (
            "The optimizer's update of one element depends on others (norms or factors of one tensor or of all), and "
            "DeepSpeed gives it flat parts; drop engine=deepspeed."
        )
    if couplings and strategy.splits_tensors:
        return (
            "The optimizer's update of one element depends on the rest of its tensor (norms or factors of it), and "
            f"{strategy} gives it parts of tensors; use ddp, zero1 or fsdp, pp, or an optimizer like AdamW."
        )
    if "parameters" in couplings and strategy.stage_axis:
        return (
            "The optimizer's update of one parameter depends on others (a norm over all of them), and a stage of "
            f"{strategy} has only some; use ddp, zero1 or fsdp, or an optimizer like AdamW."
        )
    return None


def _refuse_model_axes(job: Job, facts: ModelFacts, strategy: Strategy) -> str | None:
    if reason := refuse_inside_data(strategy):
        return reason
    for term in strategy.axes:
        if strategy.compile and not term.traits.compiles:
            return f"compile is not built for {term.word}; drop it from {strategy}."
        if strategy.autocast and not term.traits.autocast:
            return (
                f"autocast does not reach into the layers that {term.word} divides; use {strategy.precision}, which "
                f"means the same under every strategy, or drop {term} from {strategy}."
            )
        axis = model_axis(term)
        reason = axis.refuse(term, strategy, facts, job.global_batch) or axis.refuse_job(term, strategy, facts, job)
        if reason:
            return reason
    return None


def _refuse_batch(job: Job, facts: ModelFacts, strategy: Strategy) -> str | None:
    ranks = strategy.data_ranks
    if job.global_batch < ranks:
        return (
            f"The job's global batch of {job.global_batch} is smaller than the {ranks} data ranks; "
            f"use at most {job.global_batch} ranks or a larger global batch."
        )
    largest = -(-job.global_batch // ranks)
    if is_pipelined(strategy):
        return None
    if strategy.micro_batch is not None and strategy.micro_batch > largest:
        return (
            f"mb={strategy.micro_batch} is more than the {largest} samples that each of {ranks} data ranks gets from "
            f"a global batch of {job.global_batch}; use mb={largest} or less."
        )
    if facts.batch_norms and has_stand_ins(job.global_batch, ranks, strategy.micro_batch):
        return (
            f"A global batch of {job.global_batch} leaves one of {ranks} ranks without samples in some micro-step, "
            f"which BatchNorm ({facts.batch_norms[0]}) would see; use a global batch that {ranks} divides."
        )
    return None


def refuse_whole_batch(job: Job, facts: ModelFacts, strategy: Strategy) -> str | None:
    """Refuse to cut a batch if the loss is over the whole batch or the model mixes its samples."""
    steps = micro_steps_of(job, strategy)
    if facts.loss_over == "samples" or strategy.data_ranks * steps == 1:
        return None
    cut = f"{strategy} cuts a batch of {job.global_batch} into {strategy.data_ranks * steps} parts"
    if facts.loss_over == "model":
        return (
            f"{cut}, but the model's {facts.mixed_output} depends on which samples share a batch. Return one result "
            "per sample (embeddings, say), and compute the loss over the batch in Job(loss=...); "
            'or treat each part as a separate batch with Job(loss_over="samples").'
        )
    if facts.loss_over == "backward":
        return (
            f"{cut}, but the gradient of {facts.mixed_output} depends on which samples share a batch (a router's "
            "auxiliary loss, which is a mean over all tokens; a hook that clips or scales it; an autograd function; "
            "Embedding(scale_grad_by_freq=True)); drop that, or treat each "
            'part as a separate batch with Job(loss_over="samples").'
        )
    if is_pipelined(strategy):
        return f"{cut}, but the loss is over the whole batch, which stages cannot gather; use a data strategy."
    if strategy.engine == "deepspeed":
        return f"{cut}, but the loss is over the whole batch, which DeepSpeed's engine cannot gather; use engine=torch."
    if facts.batch_norms and steps > 1:
        return (
            f"{cut}, and a loss over the whole batch runs micro-batches forward twice, so BatchNorm "
            f"({facts.batch_norms[0]}) would count them twice; leave out mb."
        )
    return None


def _refuse_scatter(job: Job, strategy: Strategy) -> str | None:
    """Refuse inputs that `nn.DataParallel` would cut wrongly: it cuts every tensor along dim 0."""
    if not strategy.traits.many_devices or strategy.data_ranks == 1:
        return None
    draws = [(samples, job.inputs(make_batch(job, samples))) for samples in (2, 3, 5)]
    pairs = pairs_of(learn_layout(draws, "inputs"), draws[0][1])
    odd = [layout.path for layout, value in pairs if tensors_of(value) and layout != Rows(layout.path, 0)]
    if not odd:
        return None
    return f"{strategy.data} cuts all model inputs along dim 0, but {odd[0]} has no samples there; use ddp."
