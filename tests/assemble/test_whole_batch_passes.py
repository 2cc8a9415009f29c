"""Losses over the whole batch are those of one process, however the batch is cut."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import contrastive_jobs
from contrastive_jobs import clip, clip_loss, hf_clip, hf_siglip, inside, make, siglip
from meshwright.assemble.check import check
from meshwright.assemble.gathering import UnreadTensor
from meshwright.describe.loss_over import find_loss_over
from meshwright.describe.model import describe
from meshwright.errors import JobError, Refused
from meshwright.facts.job import Job
from meshwright.facts.strategy import Strategy
from meshwright.runtime.run import Run
from meshwright.strategies import Place
from meshwright.verify.plain_training import seeded_batch
from minimal import make_job, make_trainer, mlp
from rank_pool import RankPool
from rank_programs import whole_batch_steps

STEPS = 3


def plain_steps(job: Job, batches: list[Any]) -> tuple[list[float], dict[str, Tensor]]:
    """Losses, and the parameters in the end, of a plain loop."""
    torch.manual_seed(0)
    model = job.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    losses = []
    for batch in batches:
        total, weight = job.loss(model(*job.inputs(batch)), batch)
        optimizer.zero_grad()
        (total / weight).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(total.item() / float(weight))
    return losses, dict(model.state_dict())


def whole_batches(job: Job) -> list[Any]:
    return [seeded_batch(job, seed) for seed in range(STEPS)]


def loaded_batches() -> list[Any]:
    """What the loader gives, put together."""
    order = torch.randperm(22, generator=torch.Generator().manual_seed(0)).tolist()
    chosen = [order[first : first + 8] for first in range(0, 22, 8)]  # the last one is of 6
    return [torch.utils.data.default_collate([contrastive_jobs.item(i) for i in indices]) for indices in chosen]


def close(left: Any, right: Any) -> None:
    torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["clip", "siglip", "declared"])
@pytest.mark.parametrize("strategy", ["single", "single,mb=3"])
def test_micro_batches(name: str, strategy: str) -> None:
    job = getattr(contrastive_jobs, name)
    trainer = make_trainer(job, strategy)
    losses, state = plain_steps(job, whole_batches(job))
    close([trainer.step(batch).loss for batch in whole_batches(job)], losses)
    close(dict(trainer.engine.state()), state)
    close(trainer.evaluate(whole_batches(job)), make_trainer_at(job, state).evaluate(whole_batches(job)))


def make_trainer_at(job: Job, state: dict[str, Tensor]) -> Any:
    trainer = make_trainer(job)
    trainer.engine.model.load_state_dict(state)
    return trainer


def test_micro_batches_of_the_data() -> None:
    run = Run(make_trainer(siglip, "single,mb=2"))
    losses, _ = plain_steps(siglip, loaded_batches())
    close([run.step(batch).loss for batch in run.batches(steps=STEPS)], losses)


def test_micro_batches_draw_the_same_masks_twice() -> None:
    """Otherwise gradients would be those of outputs that nobody compared."""
    job = make(model=lambda: contrastive_jobs.Towers(dropout=0.5))
    trainer = make_trainer(job, "single,mb=4")
    seen: list[Tensor] = []
    trainer.engine.model.image.register_forward_hook(lambda module, args, output: seen.append(output.detach()))
    trainer.step(seeded_batch(job, 0))
    close(seen[:2], seen[2:])


STRATEGIES = {"clip": ["ddp", "zero1", "fsdp,mb=2", "tp=2"], "siglip": ["ddp,mb=2", "zero2,mb=2", "fsdp"]}


@pytest.mark.parametrize("name", STRATEGIES)
def test_two_ranks(name: str, two_ranks: RankPool) -> None:
    found, job = two_ranks(whole_batch_steps, [name], STRATEGIES[name], STEPS)[0], getattr(contrastive_jobs, name)
    losses, state = plain_steps(job, whole_batches(job))
    loaded, _ = plain_steps(job, loaded_batches())
    for strategy in STRATEGIES[name]:
        close(found[name, strategy, "whole"], (losses, state))
        close(found[name, strategy, "loaded"], loaded)


def test_hugging_face_models_on_two_ranks(two_ranks: RankPool) -> None:
    strategies = ["ddp", "fsdp,mb=1"]
    found = two_ranks(whole_batch_steps, ["hf_clip", "hf_siglip"], strategies, 2)[0]
    for name, job in (("hf_clip", hf_clip), ("hf_siglip", hf_siglip)):
        losses, state = plain_steps(job, whole_batches(job)[:2])
        for strategy in strategies:
            close(found[name, strategy, "whole"], (losses, state))


def contrast(output: Tensor, batch: Any) -> tuple[Tensor, int]:
    logits = output @ batch["y"].T
    return F.cross_entropy(logits, torch.arange(len(logits)), reduction="sum"), len(logits)


class Mixer(nn.Module):
    """Takes the mean over samples away."""

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


class Noisy(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.randn_like(x)


FOUND: dict[str, tuple[Job, str, str]] = {
    "a sum over samples": (make_job(), "samples", ""),
    "contrastive": (make_job(loss=contrast), "batch", ""),
    "a mean of weight 1": (make_job(loss=lambda output, batch: (F.mse_loss(output, batch["y"]), 1)), "batch", ""),
    "a scale among the outputs": (clip, "batch", ""),
    "inside the model": (inside, "model", 'output["loss"]'),
    "a model that mixes samples": (make_job(model=lambda: nn.Sequential(mlp(), Mixer())), "model", "output"),
    "BatchNorm": (make_job(model=lambda: nn.Sequential(mlp(), nn.BatchNorm1d(4))), "samples", ""),
    "dropout": (make_job(model=lambda: nn.Sequential(mlp(), nn.Dropout(0.5))), "samples", ""),
    "random numbers": (make_job(model=lambda: nn.Sequential(mlp(), Noisy())), "samples", ""),
    "declared": (make_job(loss_over="batch"), "batch", ""),
    "declared otherwise": (make_job(loss=contrast, loss_over="samples"), "samples", ""),
}


@pytest.mark.parametrize("name", FOUND)
def test_what_a_loss_is_over_is_found_by_trying(name: str) -> None:
    job, kind, mixed = FOUND[name]
    found = find_loss_over(job, 1)
    assert (found.kind, found.mixed) == (kind, mixed)


def test_a_large_model_is_not_tried() -> None:
    assert find_loss_over(make_job(loss=contrast), 1 << 30).kind == "samples"


def place(ranks: int) -> Place:
    return Place(device="cpu", devices=ranks, ranks=ranks, local_ranks=ranks)


@pytest.mark.parametrize(("strategy", "ranks"), [("ddp", 2), ("single,mb=4", 1)])
def test_a_model_that_computes_the_loss_itself_is_refused(strategy: str, ranks: int) -> None:
    facts = describe(inside)
    with pytest.raises(
        Refused, match=r'model\'s output\["loss"\] depends on which samples.*compute the loss.*Job\(loss='
    ):
        check(inside, facts, Strategy.parse(strategy), place(ranks))
    assert check(inside, facts, Strategy.parse("single"), place(1))
    allowed = replace(inside, loss_over="samples")
    assert check(allowed, describe(allowed), Strategy.parse(strategy), place(ranks))


flat = make_job(loss=contrast)  # DeepSpeed takes no parameters without dims


@pytest.mark.parametrize(
    ("strategy", "ranks", "said"),
    [("pp=2:gpipe", 2, "which stages cannot gather"), ("zero1,engine=deepspeed", 2, "DeepSpeed's engine cannot")],
)
def test_what_cannot_gather_is_refused(strategy: str, ranks: int, said: str) -> None:
    with pytest.raises(Refused, match=said):
        check(flat, describe(flat), Strategy.parse(strategy), place(ranks))


class Normed(contrastive_jobs.Towers):
    def __init__(self) -> None:
        super().__init__()
        self.image.append(nn.BatchNorm1d(contrastive_jobs.WIDTH))


class Counting(contrastive_jobs.Towers):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, image: Tensor, text: Tensor) -> dict[str, Tensor]:
        self.calls += 1
        return super().forward(image, text)


def test_state_that_would_move_twice_is_refused() -> None:
    with pytest.raises(Refused, match=r"BatchNorm \(image.4\) would count them twice; leave out mb"):
        check(make(model=Normed), describe(make(model=Normed)), Strategy.parse("single,mb=4"), place(1))
    job = make(model=Counting, loss_over="batch")
    with pytest.raises(JobError, match="changes its buffer calls in forward"):
        make_trainer(job, "single,mb=4").step(seeded_batch(job, 0))


class Pairs(contrastive_jobs.Towers):
    """Compares samples itself, and also gives a number of the batch."""

    def forward(self, image: Tensor, text: Tensor) -> dict[str, Tensor]:
        output = super().forward(image, text)
        return {**output, "logits": output["image"] @ output["text"].T, "mean": output["image"].mean()}


def of_pairs(output: Any, batch: Any) -> tuple[Tensor, int]:
    return output["logits"].logsumexp(1).sum(), len(output["logits"])


def of_mean(output: Any, batch: Any) -> tuple[Tensor, int]:
    return clip_loss(output, batch)[0] + output["mean"], len(output["image"])


def test_outputs_that_cannot_be_joined() -> None:
    """They are in the way of a loss only if it reads them; a declared loss is not tried, and told when it does."""
    unused, pairs, mean = (make(model=Pairs, loss=loss, loss_over="batch") for loss in (clip_loss, of_pairs, of_mean))
    batch = seeded_batch(clip, 0)
    with pytest.raises(JobError, match=r'reads output\["logits"\].*2 dims whose size is the number of samples'):
        make_trainer(pairs, "single,mb=4").step(batch)
    with pytest.raises(JobError, match=r'reads output\["mean"\].*computed over the batch by the model'):
        make_trainer(mean, "single,mb=4").step(batch)
    close(make_trainer(unused, "single,mb=4").step(batch).loss, make_trainer(unused).step(batch).loss)


def test_what_the_loss_does_not_read_is_not_there() -> None:
    seen: list[Any] = []

    def loss(output: Any, batch: Any) -> tuple[Tensor, int]:
        seen.append(batch)
        return contrastive_jobs.siglip_loss(output, batch)

    trainer = make_trainer(make(loss=loss, loss_over="batch"), "single,mb=4")
    seen.clear()
    trainer.step(seeded_batch(clip, 0))
    batch = seen[-1]
    assert isinstance(batch["image"], UnreadTensor)
    assert (batch["image"].shape, batch["image"].device.type, len(batch["text"])) == ((8, 4), "cpu", 8)
    assert not isinstance(batch["kind"], UnreadTensor)
    with pytest.raises(JobError, match=r'The loss reads batch\["image"\] of this batch'):
        batch["image"] + 1
