"""What tests of the context axis run on real ranks: gradients of a step, compared with plain PyTorch's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD

import architecture_jobs
import tensor_models
from meshwright import Job
from meshwright.assemble.check import check
from meshwright.assemble.step import Trainer
from meshwright.assemble.world import World
from meshwright.describe.observe import call_loss, call_model
from meshwright.errors import MeshwrightError
from meshwright.facts.strategy import Strategy
from meshwright.runtime.run import setup
from meshwright.strategies import Place
from meshwright.strategies.context.split import gathered_functions
from meshwright.verify.strategy_steps import whole_gradients
from shared_facts import facts_of

LENGTH = tensor_models.LENGTH


def sample(n: int) -> dict[str, Tensor]:
    text = torch.randint(tensor_models.VOCABULARY, (n, LENGTH + 1))
    return {"x": text[:, :-1], "y": text[:, 1:]}


def token_loss(logits: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    return F.cross_entropy(logits.flatten(0, 1), batch["y"].flatten(), reduction="sum"), batch["y"].numel()


def shifted_loss(logits: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    """The next token's, cut out of the logits, as older scripts do it."""
    rows, targets = logits[:, :-1], batch["x"][:, 1:]
    return F.cross_entropy(rows.reshape(-1, rows.shape[-1]), targets.reshape(-1), reduction="sum"), targets.numel()


class Mixing(tensor_models.ExampleGPT):
    """Mixes tokens without attention, reads weights in unusual ways, changes flattened tokens in place, and pools."""

    def __init__(self) -> None:
        super().__init__()
        width = tensor_models.WIDTH
        self.convolution = nn.Conv1d(width, width, 3, padding=1)
        self.own = nn.Linear(width, width, bias=False)
        self.gain = nn.Parameter(torch.full((width,), 0.1))
        self.seen = nn.BatchNorm1d(width, affine=True, track_running_stats=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.token(x) * (1.0 + self.gain.float())
        y = y + self.convolution(y.transpose(1, 2)).transpose(1, 2)
        y = y + tensor_models.Product.apply(y, self.own.weight)
        y = y + self.seen(y.transpose(1, 2)).transpose(1, 2)
        for block in self.blocks:
            y = block(y)
        y = y + y.cumsum(1) * 0.1 + y.mean(1, keepdim=True) + y.amax(1, keepdim=True) + y[:, :1]
        rows = y.reshape(-1, y.shape[-1])
        changed = torch.zeros_like(rows)
        changed.index_add_(0, torch.arange(0, len(rows), 3), rows[::3])
        changed.add_(rows)
        y = y + 0.1 * changed.view_as(y)
        y = y + torch.einsum("bsw,vw->bsv", y, self.own.weight) + y.flip(1) @ self.own.weight
        return F.linear(self.norm(y), self.token.weight) + self.gain.sum() * self.position.weight.sum()


def plain_job(model: Any, loss: Any = token_loss) -> Job:
    return Job(
        model=model,
        inputs=lambda batch: (batch["x"],),
        loss=loss,
        optimizer=lambda params: SGD(params, lr=0.02, momentum=0.9),
        sample=sample,
        global_batch=4,
    )


JOBS = {
    "GPT": plain_job(tensor_models.example_gpt),
    "shifted": plain_job(tensor_models.example_gpt, shifted_loss),
    "Mixing": plain_job(Mixing),
}


def find_job(name: str) -> Job:
    """For the judge, as plain as it is."""
    return JOBS[name] if name in JOBS else architecture_jobs.find_job(name)


def job_of(name: str) -> Job:
    job = replace(find_job(name), global_batch=4)
    return replace(job, model=lambda: job.model().double())


def plain_gradients(job: Job, batch: Any) -> tuple[float, dict[str, Tensor]]:
    """The mean loss and its gradients, with nothing of ours but how a batch is handed to a model."""
    torch.manual_seed(0)
    model = job.model().train()
    total, weight = call_loss(job, call_model(job, model, batch), batch)
    (total / weight).backward()
    return float(total / weight), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def differences(world: World, cases: Sequence[tuple[str, str]]) -> dict[tuple[str, str], Any]:
    """For each job and strategy the largest difference from plain PyTorch, relative to the gradient; or the refusal."""
    return {(name, text): difference(world, name, text) for name, text in cases}


def difference(world: World, name: str, text: str) -> Any:
    job = job_of(name)
    facts = facts_of(world, job_of_facts(name))
    strategy = Strategy.parse(text).resolve(world.ranks)
    torch.manual_seed(1)
    batch = job.sample(job.global_batch)
    batch = {key: value.double() if value.is_floating_point() else value for key, value in batch.items()}
    try:
        check(job, facts, strategy, Place(device="cpu", devices=8, ranks=world.ranks, local_ranks=world.ranks))
        trainer = Trainer(job, facts, strategy, world, seed=0)
        trainer.forward_backward(batch)
        found = whole_gradients(trainer)
        loss = float(trainer.take_totals().mean)
    except MeshwrightError as error:
        return str(error)
    if not world.is_main:
        return 0.0
    expected_loss, expected = plain_gradients(job, batch)
    worst = abs(loss - expected_loss) / abs(expected_loss)
    total = torch.stack([gradient.norm() for gradient in expected.values()]).norm().item()
    least = 0.05 if strategy.number_format.is_low else 1e-6  # a key's bias has no gradient but rounding
    for key, gradient in expected.items():
        size = max(gradient.norm().item(), least * total)
        worst = max(worst, ((found[key] - gradient).norm() / size).item()) if key in found else float("inf")
    return worst


_JOBS: dict[str, Job] = {}


def job_of_facts(name: str) -> Job:
    """The same object for each name, so that it is described once."""
    return _JOBS.setdefault(name, job_of(name))


def gathered(trainer: Trainer) -> dict[str, int]:
    """What a trainer's model has run on gathered tokens."""
    return gathered_functions(dict((term.word, mesh) for term, mesh in trainer.axes.inner)["cp"])


def gathered_by(world: World, name: str, text: str) -> dict[str, int]:
    """The functions that ran on gathered tokens in one step."""
    job = job_of(name)
    trainer = Trainer(
        job, facts_of(world, job_of_facts(name)), Strategy.parse(text).resolve(world.ranks), world, seed=0
    )
    torch.manual_seed(1)
    trainer.forward_backward(job.sample(job.global_batch))
    return gathered(trainer)


def moved(world: World, texts: Sequence[str], folder: str) -> tuple[list[float], list[float]]:
    """Losses of a run that changes its strategy after each two steps, and of one that does not."""
    job = job_of("GPT")
    facts, steps = facts_of(world, job_of_facts("GPT")), 2
    torch.manual_seed(1)
    batches = [job.sample(job.global_batch) for _ in range(steps * len(texts))]
    uninterrupted = setup(job, texts[0], facts=facts, world=world)
    expected = [float(uninterrupted.step(batch).loss) for batch in batches]
    found: list[float] = []
    for number, text in enumerate(texts):
        run = setup(job, text, facts=facts, world=world)
        if number:
            run.load(Path(folder, str(number - 1)))
        found += [float(run.step(batch).loss) for batch in batches[number * steps : (number + 1) * steps]]
        run.save(Path(folder, str(number)))
    return found, expected
