"""Defects that a strategy could have, planted into a trainer: `verify` must find each and say where it lies.

A plant spoils what one rank or all of them do. `PLANTED` says which job and strategy it is planted into, and what the
verdict must name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.optim import SGD

import tiny_jobs
from meshwright.assemble.batch import Batch, Share, Span, part
from meshwright.assemble.step import Trainer
from meshwright.assemble.world import World
from meshwright.strategies.norm import global_norm, local
from meshwright.verify.verdict import Verdict
from meshwright.verify.verify import verify
from shared_facts import facts_of, references_of

clipped = replace(
    tiny_jobs.transformer, optimizer=lambda params: SGD(params, lr=0.1, momentum=0.9, weight_decay=0.1), max_norm=0.5
)
"""With an optimizer that feels the scale of gradients."""
JOBS = {"clipped": clipped}

BLOCK = "blocks.1.up.weight"


@dataclass(frozen=True)
class Planted:
    """A defect, where it is planted, and what the verdict says of it."""

    plant: Callable[[Trainer], None]
    job: str
    strategy: str
    named: tuple[str, ...]


def verdict_on(world: World, name: str) -> Verdict:
    """For ranks: verify a job with a defect planted into its strategy."""
    planted = PLANTED[name]
    job = JOBS.get(planted.job) or getattr(tiny_jobs, planted.job)
    facts, references = facts_of(world, job), references_of(world, job)
    (verdict,) = verify(job, facts, [planted.strategy], world, plant=planted.plant, references=references)
    return verdict


def replaced(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    """Put what `make` makes of a method in its place."""
    setattr(owner, name, make(getattr(owner, name)))


def parameter(made: Trainer, name: str) -> Any:
    return dict(made.engine.parameters().named())[name]


def after_backward(made: Trainer, spoil: Callable[[], None]) -> None:
    """Spoil gradients when they are all there."""

    def wrap(forward_backward: Callable[[Any], None]) -> Callable[[Any], None]:
        def spoiled(batch: Any) -> None:
            forward_backward(batch)
            with torch.no_grad():
                spoil()

        return spoiled

    replaced(made, "forward_backward", wrap)


def before_update(made: Trainer, spoil: Callable[[], None]) -> None:
    def wrap(step: Callable[[], Any]) -> Callable[[], Any]:
        def spoiled() -> Any:
            with torch.no_grad():
                spoil()
            return step()

        return spoiled

    replaced(made.optimizer, "step", wrap)


def other_part(made: Trainer, change: Callable[[Batch, Any], Batch]) -> None:
    replaced(made, "_part", lambda own: lambda batch: change(own(batch), batch))


def scaled_up(made: Trainer) -> None:
    made.engine.gradient_scale *= made.world.ranks


def scaled_down(made: Trainer) -> None:
    made.engine.gradient_scale /= made.world.ranks


def scaled_block(made: Trainer) -> None:
    after_backward(made, lambda: parameter(made, BLOCK).grad.mul_(2))


def dropped_micro_batch(made: Trainer) -> None:
    def drop(own: Batch, batch: Any) -> Batch:
        *kept, last = own.pieces
        return replace(own, rounds=((*kept, replace(last, span=Span(last.span.first, 0))),))

    other_part(made, drop)


def sample_seen_twice(made: Trainer) -> None:
    def first_ranks(own: Batch, batch: Any) -> Batch:
        return part(batch, Share(ranks=made.axes.data_ranks, rank=0), made.cutter, nominal=made.job.global_batch)

    other_part(made, first_ranks)


def order_of_micro_batches(made: Trainer) -> None:
    """The second rank takes its micro-batches in another order: other samples meet in a BatchNorm."""

    def turned(own: Batch, batch: Any) -> Batch:
        return replace(own, rounds=(tuple(reversed(own.pieces)),)) if made.world.rank else own

    other_part(made, turned)


def unsynchronised(made: Trainer) -> None:
    """Every micro-batch is treated as if another followed."""
    accumulate = made.engine.accumulating
    made.engine.accumulating = lambda last: accumulate(False)  # type: ignore[method-assign]
    made.engine.finish = lambda: None  # type: ignore[method-assign]


def one_unsynchronised(made: Trainer) -> None:
    """One parameter keeps this rank's own gradient."""
    kept: list[torch.Tensor] = []
    chosen = parameter(made, BLOCK)
    chosen.register_hook(lambda gradient: kept.append(gradient.detach().clone()))
    after_backward(made, lambda: chosen.grad.copy_(kept.pop()))


def unsynchronised_statistics(made: Trainer) -> None:
    for module in made.engine.model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.__class__ = nn.BatchNorm2d


def statistics_of_one_rank(made: Trainer) -> None:
    if made.world.rank:
        made.engine.model.blocks[0].norm.momentum = 0.2  # type: ignore[index, union-attr, operator]


def unfilled_buffer(made: Trainer) -> None:
    made.engine.model.waves.zero_()  # type: ignore[operator, union-attr]


def unfilled_on_one_rank(made: Trainer) -> None:
    if made.world.rank:
        unfilled_buffer(made)


def norm_of_one_rank(made: Trainer) -> None:
    made.engine.norm = lambda own: global_norm([local(p.grad) for p in own if p.grad is not None])  # type: ignore[method-assign]


def clipped_by_own_norm(made: Trainer) -> None:
    replaced(made, "_scale_down_and_clip", lambda clip: lambda norm: clip(norm * (1 + made.world.rank)))


def not_clipped(made: Trainer) -> None:
    replaced(made, "_scale_down_and_clip", lambda clip: lambda norm: clip(0 * norm))


def norm_counts_twice(made: Trainer) -> None:
    replaced(made.engine, "norm", lambda norm: lambda own: norm(own) * 1.01)


def stale_copy(made: Trainer) -> None:
    made.engine.updated = lambda: None  # type: ignore[method-assign]


def untied(made: Trainer) -> None:
    """The head gets a weight of its own, as if initialisation had copied the tied one."""
    model: Any = made.engine.model
    model.head.weight = nn.Parameter(model.token.weight.detach().clone())


def wrong_weight(made: Trainer) -> None:
    def wrap(backward: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        return lambda *args: backward(*args) * torch.tensor([1.0, 1.5, 1.0], dtype=torch.float64)

    replaced(made.passes, "backward", wrap)


def loss_of_one_rank(made: Trainer) -> None:
    def wrap(backward: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        return lambda *args: backward(*args) * (made.world.ranks if made.world.is_main else 0)

    replaced(made.passes, "backward", wrap)


def scheduled_twice(made: Trainer) -> None:
    replaced(made.schedule, "step", lambda step: lambda *args: (step(*args), step(*args)))


def frozen_moves(made: Trainer) -> None:
    frozen = dict(made.engine.model.named_parameters())["blocks.0.up.weight"]
    before_update(made, lambda: frozen.mul_(0.999))


def unused_decays(made: Trainer) -> None:
    def zeros() -> None:
        unused = parameter(made, "unused.weight")
        unused.grad = torch.zeros_like(unused)

    after_backward(made, zeros)


def zeroed_gradient(made: Trainer) -> None:
    after_backward(made, lambda: parameter(made, "blocks.1.up.bias").grad.zero_())


def forgotten_gradient(made: Trainer) -> None:
    def forget() -> None:
        parameter(made, BLOCK).grad = None

    after_backward(made, forget)


def permuted_cut(made: Trainer) -> None:
    with torch.no_grad():
        own = parameter(made, BLOCK)
        own.copy_(own.flip(0))


def swapped_shards(made: Trainer) -> None:
    with torch.no_grad():
        own = local(parameter(made, BLOCK))
        own.copy_(own.roll(1, 0))


def off_at_the_start(made: Trainer) -> None:
    with torch.no_grad():
        parameter(made, BLOCK).view(-1)[0] += 1e-6


def lost_momentum(made: Trainer) -> None:
    before_update(made, lambda: made.optimizer.state.clear())


def on_one_rank(made: Trainer, **changes: Any) -> None:
    if made.world.rank:
        for group in made.optimizer.param_groups:
            group.update(changes)


def in_no_group(made: Trainer) -> None:
    chosen = parameter(made, BLOCK)
    for group in made.optimizer.param_groups:
        group["params"] = [p for p in group["params"] if p is not chosen]


def no_decay(made: Trainer) -> None:
    for group in made.optimizer.param_groups:
        group["weight_decay"] = 0.0


def skipped_update(made: Trainer) -> None:
    replaced(made.optimizer, "step", lambda step: lambda: step() if made.steps != 1 else None)


def never_updated(made: Trainer) -> None:
    made.optimizer.step = lambda: None  # type: ignore[method-assign, assignment]


def kept_gradients(made: Trainer) -> None:
    """Gradients of a step are added to those of the one before."""
    kept: dict[int, torch.Tensor] = {}

    def add() -> None:
        for own in made.engine.parameters():
            if own.grad is not None:
                own.grad.add_(kept.get(id(own), 0.0))
                kept[id(own)] = own.grad.clone()

    after_backward(made, add)


def unshared(made: Trainer) -> None:
    """Stages that share a parameter keep their own gradients of it."""
    made.engine._sum_shared = lambda name, group: None  # type: ignore[attr-defined]


def stage_not_updated(made: Trainer) -> None:
    if made.world.rank:
        never_updated(made)


STARTS = f"{BLOCK}: differs by"
COPY = "rank 1 holds another copy than rank 0"


def masks_of_another_seed(made: Trainer) -> None:
    passes: Any = made.passes
    passes._dropout = replace(passes._dropout, run_seed=passes._dropout.run_seed + made.world.rank)


PLANTED: dict[str, Planted] = {
    "gradients scaled by ranks": Planted(scaled_up, "masked", "ddp", ("it is 2 times the right one",)),
    "gradients divided by ranks": Planted(scaled_down, "masked", "fsdp", ("it is 0.5 times the right one",)),
    "one gradient scaled": Planted(scaled_block, "transformer", "zero1", (BLOCK, "it is 2 times the right one")),
    "masks of another seed": Planted(masks_of_another_seed, "transformer", "fsdp", ("gradient of token.weight",)),
    "a dropped micro-batch": Planted(dropped_micro_batch, "transformer", "ddp,mb=1", ("gradient of token.weight",)),
    "a sample seen twice": Planted(sample_seen_twice, "transformer", "zero2", ("gradient of token.weight",)),
    "another order of micro-batches": Planted(order_of_micro_batches, "convolutions", "ddp,mb=2", ("gradient of",)),
    "no synchronisation": Planted(unsynchronised, "transformer", "ddp", (f"token.weight: {COPY} after step 1",)),
    "one gradient not synchronised": Planted(one_unsynchronised, "transformer", "ddp", (f"gradient of {BLOCK}",)),
    "statistics not synchronised": Planted(unsynchronised_statistics, "convolutions", "ddp", ("gradient of stem",)),
    "statistics of one rank": Planted(statistics_of_one_rank, "convolutions", "ddp", ("blocks.0.norm.running", COPY)),
    "a buffer not filled": Planted(unfilled_buffer, "transformer", "ddp", ("waves (not saved): differs", "the start")),
    "a buffer not filled on one rank": Planted(unfilled_on_one_rank, "transformer", "fsdp", (f"waves: {COPY} before",)),
    "the norm of one rank": Planted(norm_of_one_rank, "clipped", "fsdp", ("grad_norm at step 1",)),
    "clipped by a rank's own norm": Planted(clipped_by_own_norm, "clipped", "ddp", (f"{COPY} after step 1",)),
    "not clipped": Planted(not_clipped, "clipped", "zero1", ("token.weight: differs", "after step 1")),
    "a norm that counts twice": Planted(norm_counts_twice, "masked", "ddp", ("grad_norm at step 1",)),
    "a stale copy": Planted(stale_copy, "transformer", "zero2", ("token.weight: rank 0 computes with a stale copy",)),
    "an untied weight": Planted(untied, "transformer", "ddp", ("gradient of token.weight",)),
    "a wrong weight of the loss": Planted(wrong_weight, "masked", "ddp", ("it is 0.6667 times the right one",)),
    "the loss of one rank": Planted(loss_of_one_rank, "transformer", "ddp", ("loss at step 1",)),
    "a schedule stepped twice": Planted(scheduled_twice, "clipped", "ddp", ("after step 3", "loss at step 3")),
    "a frozen parameter that moves": Planted(frozen_moves, "partial", "ddp", ("blocks.0.up.weight: differs", "step 1")),
    "decay of an unused parameter": Planted(unused_decays, "partial", "ddp", ("gradient of unused.weight", "zeros")),
    "a gradient of zeros": Planted(zeroed_gradient, "transformer", "ddp", ("blocks.1.up.bias", "0 times the right")),
    "a gradient that is lost": Planted(forgotten_gradient, "transformer", "ddp", (f"gradient of {BLOCK}", "none")),
    "a permuted cut": Planted(permuted_cut, "transformer", "tp=2", (STARTS, "at the start")),
    "rows of a shard in another order": Planted(swapped_shards, "transformer", "fsdp", (STARTS, "at the start")),
    "a weight that is 1e-6 off": Planted(off_at_the_start, "transformer", "ddp", (f"{STARTS} 1e-06 at the start",)),
    "momentum that is lost": Planted(lost_momentum, "convolutions", "ddp", ("after step 3",)),
    "betas altered on one rank": Planted(
        lambda made: on_one_rank(made, betas=(0.8, 0.99)), "transformer", "ddp", (f"{COPY} after step 3",)
    ),
    "eps altered on one rank": Planted(
        lambda made: on_one_rank(made, eps=1e-3), "transformer", "ddp", (f"{COPY} after step 1",)
    ),
    "a learning rate of one rank": Planted(
        lambda made: on_one_rank(made, lr=2e-3), "transformer", "zero1", ("token.weight: differs", "after step 1")
    ),
    "a parameter in no group": Planted(in_no_group, "transformer", "ddp", (STARTS, "after step 1")),
    "no weight decay": Planted(no_decay, "clipped", "ddp", ("token.weight: differs", "after step 1")),
    "an update that is skipped": Planted(skipped_update, "transformer", "fsdp", ("after step 3",)),
    "no update": Planted(never_updated, "transformer", "ddp", ("token.weight: differs", "after step 1")),
    "gradients that are kept": Planted(kept_gradients, "clipped", "ddp", ("after step 3", "grad_norm at step 2")),
    "a tied weight on two stages": Planted(unshared, "transformer", "pp=2:1f1b", ("token.weight",)),
    "a stage that is not updated": Planted(stage_not_updated, "transformer", "pp=2:1f1b", ("after step 1",)),
    "no synchronisation, in bf16": Planted(unsynchronised, "transformer", "ddp,bf16", (f"{COPY} after step 1",)),
    "no synchronisation, reduced in bf16": Planted(
        unsynchronised, "transformer", "ddp,bf16,reduce=bf16", (f"{COPY} after step 1",)
    ),
    "a sample seen twice, reduced in bf16": Planted(
        sample_seen_twice, "transformer", "zero2,bf16,reduce=bf16", ("token.weight: is", "after step 1")
    ),
    "gradients scaled by ranks, reduced in bf16": Planted(
        scaled_up, "clipped", "fsdp,bf16,reduce=bf16", ("grad_norm at step 1",)
    ),
    "no update, in bf16": Planted(never_updated, "transformer", "ddp,bf16", ("after step 1",)),
}
