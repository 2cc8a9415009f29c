"""Loops with several models, loops that resume, and loops with mistakes, for `mw.parallelize` on real ranks."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from contextlib import chdir, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import StepLR

import meshwright as mw
from loop_programs import STEPS, Net, Side, batch, sgd
from meshwright.assemble.world import World
from meshwright.errors import BadInput
from minimal import Blocks
from optimizers_of_users import Lamb

Models = dict[str, nn.Module]


class Critic(nn.Module):
    """Looks at what another model made."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(3, 6)
        self.score = nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.score(torch.tanh(self.hidden(x)))


class ActorCritic(nn.Module):
    """Two heads on one trunk."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(5, 8)
        self.policy, self.value = nn.Linear(8, 3), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = torch.tanh(self.trunk(x))
        return self.policy(hidden), self.value(hidden)


def gan(models: Models, parts: list[tuple[Tensor, Tensor]]) -> None:
    """The generator's gradient comes through the critic, which is stepped, clamped and frozen in turn."""
    generator, critic = models["generator"], models["critic"]
    of_generator, of_critic = sgd(generator.parameters()), sgd(critic.parameters())
    for noise, real in parts:
        of_critic.zero_grad()
        loss = F.softplus(critic(generator(noise).detach())).mean() + F.softplus(-critic(real)).mean()
        loss.backward()
        of_critic.step()
        for parameter in critic.parameters():
            parameter.requires_grad_(False)
        of_generator.zero_grad()
        F.softplus(-critic(generator(noise))).mean().backward()
        torch.nn.utils.clip_grad_norm_(generator.parameters(), 0.05)
        of_generator.step()
        for parameter in critic.parameters():
            parameter.requires_grad_(True)


def distillation(models: Models, parts: list[tuple[Tensor, Tensor]]) -> None:
    student, teacher = models["student"], models["teacher"].eval()
    optimizer = sgd(student.parameters())
    for x, y in parts:
        with torch.no_grad():
            wanted = teacher(x)
        (F.mse_loss(student(x), wanted) + 0.1 * F.mse_loss(student(x), y)).backward()
        optimizer.step()
        optimizer.zero_grad()


def actor_and_critic(models: Models, parts: list[tuple[Tensor, Tensor]]) -> None:
    """Two losses, two backward passes, two optimizers, one of them over both models."""
    actor, critic = models["actor"], models["judge"]
    first = sgd([*actor.parameters(), *critic.parameters()])
    second = SGD([p for name, p in actor.named_parameters() if name.startswith("value")], lr=0.01)
    for x, y in parts:
        policy, value = actor(x)
        (policy * (y - value.detach())).mean().backward(retain_graph=True)
        F.mse_loss(value, critic(policy.detach())).backward()
        both = [*actor.parameters(), *critic.parameters()]
        torch.nn.utils.clip_grad_norm_(both, 0.1)
        first.step()
        second.step()
        first.zero_grad()


def teacher() -> nn.Module:
    return Net().requires_grad_(False)


SCENES: dict[str, tuple[Callable[..., None], dict[str, Callable[[], nn.Module]]]] = {
    "gan": (gan, {"generator": Net, "critic": Critic}),
    "distillation": (distillation, {"student": Net, "teacher": teacher}),
    "actor_and_critic": (actor_and_critic, {"actor": ActorCritic, "judge": Critic}),
}


def scenes_plainly() -> dict[str, dict[str, dict[str, Tensor]]]:
    found = {}
    for name, (play, builders) in SCENES.items():
        models = {}
        for seed, (role, build) in enumerate(builders.items()):
            torch.manual_seed(seed)
            models[role] = build()
        play(models, [batch(step) for step in range(STEPS)])
        found[name] = {role: copy.deepcopy(model.state_dict()) for role, model in models.items()}
    return found


def scenes(world: World, strategy: str, other: str) -> dict[str, dict[str, dict[str, Tensor]]]:
    """The same with the first model under one strategy and the second under another."""
    found = {}
    for name, (play, builders) in SCENES.items():
        models: Models = {}
        for seed, (role, build) in enumerate(builders.items()):
            models[role] = mw.parallelize(build, other if seed else strategy, seed=seed, world=world)
        side = Side(models[next(iter(builders))], world.rank, world.ranks)
        play(models, [side.part(batch(step)) for step in range(STEPS)])
        found[name] = {role: model.state_dict() for role, model in models.items()}
    return found


def adam(parameters: Any) -> Optimizer:
    return AdamW(parameters, lr=1e-2, eps=1e-2)


def halving(optimizer: Optimizer) -> StepLR:
    return StepLR(optimizer, 1, gamma=0.5)


def steps(model: Any, optimizer: Optimizer, scheduler: Any, numbers: range) -> None:
    side = Side(model, getattr(model, "data_rank", 0), getattr(model, "data_ranks", 1))
    for step in numbers:
        side.loss(*side.part(batch(step))).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()


def resumed_plainly() -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = Net()
    optimizer = adam(model.parameters())
    steps(model, optimizer, halving(optimizer), range(4))
    return model.state_dict()


def resumed(world: World, strategy: str, other: str, folder: str) -> tuple[dict[str, Tensor], int, int]:
    """Two steps under one strategy, then two under another from the checkpoint; the state, step and position."""
    options: Any = {"world": world, "sample": batch(0)[0], "tensor_plan": {"leave": "whole"}}
    made = mw.parallelize(Net, strategy, optimizer=adam, scheduler=halving, **options)
    steps(*made, range(2))
    made[0].save(Path(folder), samples=24)
    # A model that exists, with its optimizer and scheduler, as scripts have them.
    torch.manual_seed(5)
    model = Net()
    optimizer = adam(model.parameters())
    again = mw.parallelize(model, other, optimizer=optimizer, scheduler=halving(optimizer), **options)
    assert again[1] is optimizer
    loaded = again[0].load(Path(folder))
    steps(*again, range(2, 4))
    return again[0].state_dict(), loaded.step, loaded.samples


def squares(output: Tensor, batch: Any) -> tuple[Tensor, int]:
    return F.mse_loss(output, batch["y"], reduction="sum"), batch["y"].numel()


def whole_batch(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {"x": torch.randn(8, 4, generator=generator), "y": torch.randn(8, 4, generator=generator)}


def whole_batches_plainly() -> tuple[list[float], dict[str, Tensor]]:
    torch.manual_seed(0)
    model = Blocks()
    optimizer = sgd(model.parameters())
    told = []
    for step in range(STEPS):
        data = whole_batch(step)
        for scale in (0.5, 0.25):  # two passes add up
            loss = F.mse_loss(model(data["x"]), data["y"])
            (loss * scale).backward()
            told.append(loss.item())
        told.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)))
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        told.append(float(F.mse_loss(model(whole_batch(9)["x"]), whole_batch(9)["y"])))
    return told, model.state_dict()


def whole_batches(world: World, strategy: str) -> tuple[list[float], dict[str, Tensor]]:
    model, optimizer = mw.parallelize(
        Blocks,
        strategy,
        optimizer=sgd,
        sample=whole_batch(0),
        inputs=lambda data: (data["x"],),
        loss=squares,
        world=world,
    )
    told = []
    for step in range(STEPS):
        for scale in (0.5, 0.25):
            told.append(float(model.forward_backward(whole_batch(step), scale=scale)))
        told.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)))
        optimizer.step()
        optimizer.zero_grad()
    told.append(model.evaluate([whole_batch(9)]))
    return told, model.state_dict()


def overflow(world: World, strategy: str) -> tuple[list[bool], bool, float]:
    """Which steps were skipped if one rank's gradient overflows in the second, whether that kept the weights."""
    model, optimizer = mw.parallelize(Net, strategy, optimizer=sgd, world=world)
    side, skipped, kept = Side(model, world.rank, world.ranks), [], False
    model.loop.loss_scale.value = 1024.0
    for step in range(STEPS):
        before = model.state_dict()
        loss = side.loss(*side.part(batch(step)))
        (loss * (1e30 if step == 1 and world.rank == 1 else 1.0)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        skipped.append(model.step_was_skipped)
        if step == 1:
            kept = all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    return skipped, kept, model.loop.loss_scale.value


def scaled_by_user(world: World, strategy: str) -> dict[str, Tensor]:
    """A loop that keeps its own GradScaler."""
    model, optimizer = mw.parallelize(Net, strategy, optimizer=sgd, world=world)
    side, scaler = Side(model, world.rank, world.ranks), torch.amp.GradScaler("cpu", init_scale=8.0)
    if model.loop.loss_scale is not None:
        model.loop.loss_scale.value = 64.0
    for x, y in side.batches():
        scaler.scale(side.loss(x, y)).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return model.state_dict()


def step_of_this_rank_alone(model: Any, side: Side) -> None:
    optimizer = sgd(model.parameters())
    with model.no_sync():
        side.loss(*side.part(batch(0))).backward()
    optimizer.step()


def zeroed_before_reduced(model: Any, side: Side) -> None:
    optimizer = sgd(model.parameters())
    side.loss(*side.part(batch(0))).backward()
    optimizer.step()
    with model.no_sync():
        side.loss(*side.part(batch(0))).backward()
        optimizer.zero_grad()


def mean_of_uneven_parts(model: Any, side: Side) -> None:
    optimizer = sgd(model.parameters())
    side.loss(*side.part(batch(0, 7))).backward()
    optimizer.step()


def uneven_parts_of_one_sum(model: Any, side: Side) -> None:
    """Seven samples on each rank, in another order: 4 and 3, 3 and 4."""
    optimizer = sgd(model.parameters())
    x, y = (tensor[:7] for tensor in side.part(batch(0, 14)))
    sizes = [4, 3] if side.rank == 0 else [3, 4]
    for part in zip(x.split(sizes), y.split(sizes), strict=True):
        with model.no_sync() if len(part[0]) == sizes[0] else nullcontext():
            (side.loss(*part) / 2).backward()
    optimizer.step()


def optimizer_of_inner_model(model: Any, side: Side) -> None:
    optimizer = sgd(model.module.parameters())
    side.loss(*side.part(batch(0))).backward()
    optimizer.step()


def unfrozen_too_late(model: Any, side: Side) -> None:
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    side.loss(*side.part(batch(0)))


def samples_divided_over_all_ranks(model: Any, side: Side) -> None:
    side.loss(*batch(model.world.rank))


def coupled_optimizer(model: Any, side: Side) -> None:
    optimizer = Lamb([p for p in model.parameters() if p.requires_grad])
    side.loss(*side.part(batch(0))).backward()
    optimizer.step()


def half(model: Any, side: Side) -> None:
    model.half()


def copied(model: Any, side: Side) -> None:
    copy.deepcopy(model)


MISTAKES = [
    step_of_this_rank_alone,
    zeroed_before_reduced,
    mean_of_uneven_parts,
    uneven_parts_of_one_sum,
    optimizer_of_inner_model,
    unfrozen_too_late,
    samples_divided_over_all_ranks,
    coupled_optimizer,
    half,
    copied,
]


def mistakes(world: World, strategy: str) -> dict[str, str]:
    """What each mistake is told; empty where it is none under this strategy."""
    options: Any = {"sample": batch(0)[0], "tensor_plan": {"leave": "whole"}} if "tp" in strategy else {}
    found = {}
    for mistake in MISTAKES:
        model = mw.parallelize(Net, strategy, world=world, **options)
        try:
            mistake(model, Side(model, model.data_rank, model.data_ranks))
            found[mistake.__name__] = ""
        except BadInput as error:
            found[mistake.__name__] = str(error)
    return found


def run_script(world: World, script: str, folder: str) -> dict[str, Tensor]:
    """Run a script as torchrun would have started it, and return the state of its `model`."""
    ranks = {"RANK": world.rank, "LOCAL_RANK": world.rank, "WORLD_SIZE": world.ranks, "LOCAL_WORLD_SIZE": world.ranks}
    meeting = {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}  # they have met already
    names: dict[str, Any] = {}
    with patch.dict(os.environ, {key: str(value) for key, value in ranks.items()} | meeting), chdir(folder):
        exec(script, names)
    state: dict[str, Tensor] = names["model"].state_dict()
    return state


def gpt2() -> nn.Module:
    """A model of transformers: tied weights, the loss among its outputs, `generate`."""
    from transformers import GPT2Config, GPT2LMHeadModel

    drops = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    sizes = {"n_layer": 2, "n_head": 2, "n_embd": 16, "vocab_size": 32, "n_positions": 16}
    return GPT2LMHeadModel(GPT2Config(**sizes, **drops, bos_token_id=0, eos_token_id=1))


def words(step: int) -> Tensor:
    return torch.randint(0, 32, (4, 8), generator=torch.Generator().manual_seed(step))


def train_and_generate(model: Any, rank: int = 0, ranks: int = 1) -> list[int]:
    optimizer = sgd(model.parameters())
    model.train()
    for step in range(STEPS):
        own = words(step).chunk(ranks)[rank]
        model(input_ids=own, labels=own).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    made: list[int] = model.generate(words(9)[:1], max_new_tokens=4, do_sample=False).flatten().tolist()
    return made


def generated_plainly() -> tuple[list[int], dict[str, Tensor]]:
    torch.manual_seed(0)
    model = gpt2()
    return train_and_generate(model), model.state_dict()


def generated(world: World, strategy: str) -> tuple[list[int], dict[str, Tensor]]:
    options: Any = {"sample": {"input_ids": words(0), "labels": words(0)}} if "tp" in strategy else {}
    model = mw.parallelize(gpt2, strategy, world=world, **options)
    return train_and_generate(model, model.data_rank, model.data_ranks), model.state_dict()
