"""What loops do to a laid-out model that nobody planned for, in plain PyTorch and under a strategy on real ranks.

Each program is right (the weights and numbers of plain PyTorch), refused (one of our errors), or fails loudly with an
error of PyTorch's. What must not happen is another result without a word.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Adam
from torch.optim.lr_scheduler import StepLR
from torch.utils.checkpoint import checkpoint

import meshwright as mw
from loop_programs import LOOPS, Net, Side, batch, plain, sgd
from meshwright.assemble.world import World
from meshwright.errors import MeshwrightError

ROUNDING = 2e-6
SMALL_DTYPES = 0.03


def step_without_backward(side: Side) -> None:
    optimizer = Adam(side.model.parameters(), lr=1e-2)
    optimizer.step()
    for x, y in side.batches():
        side.loss(x, y).backward()
        optimizer.step()
        optimizer.zero_grad()
        optimizer.step()


def two_steps_of_one_gradient(side: Side) -> None:
    optimizer = sgd(side.model.parameters())
    for x, y in side.batches():
        side.loss(x, y).backward()
        optimizer.step()
        optimizer.step()
        optimizer.zero_grad()


def backward_twice(side: Side) -> None:
    for x, y in side.batches():
        loss = side.loss(x, y)
        loss.backward()
        loss.backward()


def retained_graph(side: Side) -> None:
    optimizer = sgd(side.model.parameters())
    for x, y in side.batches():
        loss = side.loss(x, y)
        loss.backward(retain_graph=True)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def loss_without_graph(side: Side) -> None:
    with torch.no_grad():
        loss = side.loss(*next(side.batches()))
    loss.backward()


def scheduler_before_optimizer(side: Side) -> list[float]:
    optimizer = sgd(side.model.parameters())
    scheduler, rates = StepLR(optimizer, 1, gamma=0.5), []
    for x, y in side.batches():
        side.loss(x, y).backward()
        scheduler.step()
        optimizer.step()
        optimizer.zero_grad()
        rates.append(optimizer.param_groups[0]["lr"])
    return rates


def forgotten_update(side: Side) -> list[float]:
    """The weights stay, and gradients grow."""
    norms = []
    for x, y in side.batches():
        side.loss(x, y).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(side.model.parameters(), 1e9)))
    return norms


def mean_loss_logged(side: Side) -> list[float]:
    optimizer, losses = sgd(side.model.parameters()), []
    for x, y in side.batches():
        total = F.mse_loss(side.model(x), y, reduction="sum") / 3
        loss = side.mean(total, len(x))
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def state_saved_by_hand(side: Side) -> None:
    """Goes on from a copy of all states, which each rank made."""
    optimizer = sgd(side.model.parameters())
    kept: Any = None
    for step, (x, y) in enumerate(side.batches()):
        side.loss(x, y).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 1:
            kept = copy.deepcopy((side.model.state_dict(), optimizer.state_dict()))
    side.model.load_state_dict(kept[0])
    optimizer.load_state_dict(kept[1])
    side.loss(*side.part(batch(7))).backward()
    optimizer.step()


def optimizer_state_of_plain_training(side: Side) -> None:
    """Goes on with the whole optimizer state of a script that ran in one process."""
    torch.manual_seed(0)
    other = Net()
    before = Adam(other.parameters(), lr=1e-2, eps=1e-2)
    F.mse_loss(other(batch(0)[0]), batch(0)[1]).backward()
    before.step()
    side.model.load_state_dict(other.state_dict())
    optimizer = Adam(side.model.parameters(), lr=1e-2, eps=1e-2)
    optimizer.load_state_dict(before.state_dict())
    for x, y in side.batches():
        side.loss(x, y).backward()
        optimizer.step()
        optimizer.zero_grad()


def optimizer_state_of_rank_0(side: Side) -> None:
    """What rank 0 saved, loaded by all."""
    import torch.distributed as dist

    optimizer = sgd(side.model.parameters())
    for x, y in side.batches():
        side.loss(x, y).backward()
        optimizer.step()
        optimizer.zero_grad()
    kept = [copy.deepcopy(optimizer.state_dict())]
    if dist.is_initialized():
        dist.broadcast_object_list(kept)
    optimizer.load_state_dict(kept[0])
    side.loss(*side.part(batch(7))).backward()
    optimizer.step()


def compiled_before(side: Side) -> None:
    """The inner model compiled by the user, after the layout."""
    inner: Any = side.model.module if isinstance(side.model, mw.Parallel) else side.model
    inner.blocks[0].compile(backend="eager")
    plain(side)


def module_replaced(side: Side) -> None:
    """A new head after the layout, as for fine-tuning, and an optimizer of what is there."""
    torch.manual_seed(3)
    inner: Any = side.model.module if isinstance(side.model, mw.Parallel) else side.model
    inner.leave = nn.Linear(8, 3)
    optimizer = sgd(inner.parameters())
    for x, y in side.batches():
        side.loss(x, y).backward()
        optimizer.step()
        optimizer.zero_grad()


def parameter_replaced(side: Side) -> None:
    torch.manual_seed(3)
    inner: Any = side.model.module if isinstance(side.model, mw.Parallel) else side.model
    inner.temperature = nn.Parameter(torch.tensor(0.5))
    optimizer = sgd(inner.parameters())
    for x, y in side.batches():
        side.loss(x, y).backward()
        optimizer.step()
        optimizer.zero_grad()


def data_replaced(side: Side) -> None:
    """`p.data = ...` of the same shape."""
    optimizer = sgd(side.model.parameters())
    for x, y in side.batches():
        side.loss(x, y).backward()
        optimizer.step()
        optimizer.zero_grad()
        for parameter in side.model.parameters():
            parameter.data = parameter.data * 0.9


def clipped_by_hand(side: Side) -> None:
    """The norm of all gradients, computed in the loop."""
    optimizer = sgd(side.model.parameters())
    for x, y in side.batches():
        side.loss(x, y).backward()
        gradients = [p.grad for p in side.model.parameters() if p.grad is not None]
        norm = sum(float(gradient.square().sum()) for gradient in gradients) ** 0.5
        for gradient in gradients:
            gradient.mul_(min(1.0, 0.05 / norm))
        optimizer.step()
        optimizer.zero_grad()


def noise_of_each_rank(side: Side) -> None:
    """Changes gradients by other numbers on each rank."""
    optimizer = sgd(side.model.parameters())
    for x, y in side.batches():
        side.loss(x, y).backward()
        for parameter in side.model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(1 + side.rank)
        optimizer.step()
        optimizer.zero_grad()


def gradients_cleared_by_hand(side: Side) -> None:
    optimizer = sgd(side.model.parameters())
    for step, (x, y) in enumerate(side.batches()):
        side.loss(x, y).backward()
        optimizer.step()
        for parameter in side.model.parameters():
            if step % 2:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.zero_()


def gradients_by_autograd(side: Side) -> None:
    """`torch.autograd.grad` instead of `backward`."""
    trained = [p for p in side.model.parameters() if p.requires_grad]
    optimizer = sgd(trained)
    for x, y in side.batches():
        for parameter, gradient in zip(trained, torch.autograd.grad(side.loss(x, y), trained), strict=True):
            parameter.grad = gradient
        optimizer.step()


def gradient_penalty(side: Side) -> None:
    """A gradient of a gradient, as in WGAN-GP."""
    optimizer = sgd(side.model.parameters())
    for x, y in side.batches():
        x = x.clone().requires_grad_()
        output = side.model(x)
        (slope,) = torch.autograd.grad(output.sum(), x, create_graph=True)
        (F.mse_loss(output, y) + slope.square().sum(1).mean()).backward()
        optimizer.step()
        optimizer.zero_grad()


def gradient_of_the_input(side: Side) -> None:
    """An adversarial step, whose pass reaches no parameter that is asked for."""
    optimizer = sgd(side.model.parameters())
    for x, y in side.batches():
        x = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(side.loss(x, y), x)
        side.loss((x + 0.1 * slope.sign()).detach(), y).backward()
        optimizer.step()
        optimizer.zero_grad()


def loose_parameter(side: Side) -> None:
    """A trained number beside the model, in the model's optimizer."""
    scale = nn.Parameter(torch.tensor(1.0))
    optimizer = sgd([*side.model.parameters(), scale])
    for x, y in side.batches():
        F.mse_loss(side.model(x) * scale, y).backward()
        optimizer.step()
        optimizer.zero_grad()


def plain_module_beside(side: Side) -> None:
    """A second module that nobody laid out, with its own optimizer."""
    torch.manual_seed(5)
    head = nn.Linear(3, 3)
    optimizer, other = sgd(side.model.parameters()), sgd(head.parameters())
    for x, y in side.batches():
        F.mse_loss(head(side.model(x)), y).backward()
        optimizer.step()
        other.step()
        optimizer.zero_grad()
        other.zero_grad()


def group_added_later(side: Side) -> None:
    named = dict(side.model.named_parameters())
    optimizer = sgd([p for name, p in named.items() if name.startswith("blocks")])
    for step, (x, y) in enumerate(side.batches()):
        if step == 1:
            optimizer.add_param_group({"params": [p for n, p in named.items() if n.startswith("leave")], "lr": 0.01})
        side.loss(x, y).backward()
        optimizer.step()
        side.model.zero_grad()


def checkpointed(side: Side, reentrant: bool = False) -> None:
    """Recomputes the whole model in the backward pass."""
    optimizer = sgd(side.model.parameters())
    for x, y in side.batches():
        x = x.clone().requires_grad_()
        F.mse_loss(checkpoint(side.model, x, use_reentrant=reentrant), y).backward()
        optimizer.step()
        optimizer.zero_grad()


def checkpointed_reentrant(side: Side) -> None:
    checkpointed(side, reentrant=True)


def inner_model_called(side: Side) -> None:
    inner: Any = side.model.module if isinstance(side.model, mw.Parallel) else side.model
    optimizer = sgd(side.model.parameters())
    for x, y in side.batches():
        F.mse_loss(inner(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()


def parts_called(side: Side) -> None:
    """Calls the model's modules one by one, past its `forward`."""
    model: Any = side.model
    optimizer = sgd(side.model.parameters())
    for x, y in side.batches():
        hidden = model.enter(x)
        for block in model.blocks:
            hidden = block(hidden)
        F.mse_loss(model.leave(hidden), y).backward()
        optimizer.step()
        optimizer.zero_grad()


def functional(side: Side) -> None:
    optimizer = sgd(side.model.parameters())
    for x, y in side.batches():
        output = torch.func.functional_call(side.model, dict(side.model.named_parameters()), (x,))
        F.mse_loss(output, y).backward()
        optimizer.step()
        optimizer.zero_grad()


def calls_in_flight(side: Side) -> None:
    """Two calls, an evaluation between them, and their passes in the other order."""
    optimizer = sgd(side.model.parameters())
    for x, y in side.batches():
        first = side.loss(x, y)
        with torch.no_grad():
            side.model(batch(99)[0])
        second = side.loss(-x, y)
        second.backward()
        first.backward()
        optimizer.step()
        optimizer.zero_grad()


def stepped_between(side: Side) -> None:
    """A step between forward and backward."""
    optimizer = sgd(side.model.parameters())
    for x, y in side.batches():
        first, second = side.loss(x, y), side.loss(-x, y)
        first.backward()
        optimizer.step()
        optimizer.zero_grad()
        second.backward()
        optimizer.step()
        optimizer.zero_grad()


def compiled_by_user(side: Side) -> None:
    model = torch.compile(side.model, backend="eager")
    optimizer = sgd(side.model.parameters())
    for x, y in side.batches():
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()


def copy_of_the_inner_model(side: Side) -> list[float]:
    """A moving average of the weights, in a copy that is called."""
    inner: Any = side.model.module if isinstance(side.model, mw.Parallel) else side.model
    average = copy.deepcopy(inner)
    optimizer, told = sgd(side.model.parameters()), []
    for x, y in side.batches():
        side.loss(x, y).backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for old, new in zip(average.parameters(), inner.parameters(), strict=True):
                old.lerp_(new, 0.5)
            told.append(float(average(batch(99)[0]).square().mean()))
    return told


def moving_average(side: Side) -> None:
    """A moving average of `named_parameters` in plain tensors, as scripts keep it."""
    average = {name: parameter.detach().clone() for name, parameter in side.model.named_parameters()}
    optimizer = sgd(side.model.parameters())
    for x, y in side.batches():
        side.loss(x, y).backward()
        optimizer.step()
        optimizer.zero_grad()
        for name, parameter in side.model.named_parameters():
            average[name].lerp_(parameter.detach(), 0.5)
    with torch.no_grad():
        for name, parameter in side.model.named_parameters():
            parameter.copy_(average[name])
    side.loss(*side.part(batch(5))).backward()  # the average is loaded
    optimizer.step()


def wrapped_in_ddp(side: Side) -> None:
    model: Any = side.model
    if isinstance(side.model, mw.Parallel):
        model = nn.parallel.DistributedDataParallel(side.model)
    optimizer = sgd(side.model.parameters())
    for x, y in side.batches():
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()


def toggled(side: Side) -> None:
    """Freezes norms by `eval()`, and switches back and forth."""
    optimizer = sgd(side.model.parameters())
    for x, y in side.batches():
        side.model.eval()
        loss = side.loss(x, y)
        side.model.train()
        loss.backward()
        optimizer.step()
        side.model.zero_grad(set_to_none=False)


def under_inference_mode(side: Side) -> list[float]:
    optimizer, told = sgd(side.model.parameters()), []
    for x, y in side.batches():
        with torch.inference_mode():
            told.append(float(side.model(batch(99)[0]).square().mean()))
        side.loss(x, y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return told


def hooked_gradients(side: Side) -> None:
    """A hook of the user on each parameter, which changes its gradient."""
    for parameter in side.model.parameters():
        if parameter.requires_grad:
            parameter.register_hook(lambda gradient: gradient * 0.5)
    optimizer = sgd(side.model.parameters())
    for x, y in side.batches():
        side.loss(x, y).backward()
        optimizer.step()
        optimizer.zero_grad()


def closure(side: Side) -> None:
    """A closure, which computes the gradient inside of the step."""
    optimizer = sgd(side.model.parameters())
    for x, y in side.batches():

        def compute(x: Tensor = x, y: Tensor = y) -> Tensor:
            optimizer.zero_grad()
            loss = side.loss(x, y)
            loss.backward()
            return loss

        optimizer.step(compute)


def skipped_on_one_rank(side: Side) -> None:
    """A condition on this rank's numbers decides about a step, after the first ones."""
    optimizer = SGD(side.model.parameters(), lr=0.05)
    for step in range(8):
        side.loss(*side.part(batch(step))).backward()
        if step != 6 or _rank_of(side) == 0:
            optimizer.step()
        optimizer.zero_grad()


def skipped_before_backward(side: Side) -> None:
    """`if not loss.isfinite(): continue` on one rank."""
    optimizer = SGD(side.model.parameters(), lr=0.05)
    for step in range(8):
        loss = side.loss(*side.part(batch(step)))
        if step == 6 and _rank_of(side) == 1:
            continue
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def skipped_before_clipping(side: Side) -> None:
    optimizer = SGD(side.model.parameters(), lr=0.05)
    for step in range(8):
        side.loss(*side.part(batch(step))).backward()
        if step != 6 or _rank_of(side) == 0:
            torch.nn.utils.clip_grad_norm_(side.model.parameters(), 0.1)
            optimizer.step()
        optimizer.zero_grad()


def saved_on_one_rank(side: Side) -> None:
    """`if rank == 0: torch.save(model.state_dict(), ...)`, as scripts do."""
    optimizer = SGD(side.model.parameters(), lr=0.05)
    for step, (x, y) in enumerate(side.batches()):
        side.loss(x, y).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 1 and _rank_of(side) == 0:
            side.model.state_dict()


def evaluated_on_one_rank(side: Side) -> None:
    optimizer = SGD(side.model.parameters(), lr=0.05)
    for step, (x, y) in enumerate(side.batches()):
        side.loss(x, y).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 1 and _rank_of(side) == 0:
            with torch.no_grad():
                side.loss(*batch(99))


def _rank_of(side: Side) -> int:
    return side.model.world.rank if isinstance(side.model, mw.Parallel) else 0


def updated_by_hand(side: Side) -> None:
    """No optimizer: the loop itself moves the weights."""
    for x, y in side.batches():
        side.model.zero_grad()
        side.loss(x, y).backward()
        for parameter in side.model.parameters():
            if parameter.grad is not None:
                parameter.data.add_(parameter.grad, alpha=-0.05)


def stepped_after_a_call(side: Side) -> None:
    """A step after a call whose backward pass was left out."""
    optimizer = sgd(side.model.parameters())
    for step, (x, y) in enumerate(side.batches()):
        loss = side.loss(x, y)
        if step != 1:
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def loss_kept_on_the_model(side: Side) -> None:
    """The loss is an attribute that the model sets, and no output."""
    inner: Any = side.model.module if isinstance(side.model, mw.Parallel) else side.model

    def keep(module: nn.Module, args: Any, output: Tensor) -> None:
        vars(inner)["kept"] = output.square().mean()

    inner.leave.register_forward_hook(keep)
    optimizer = sgd(side.model.parameters())
    for x, _ in side.batches():
        side.model(x)
        inner.kept.backward()
        optimizer.step()
        optimizer.zero_grad()


def evaluated_on_parts(side: Side) -> list[float]:
    """Each rank evaluates other samples, and the loop averages."""
    import torch.distributed as dist

    ranks = dist.get_world_size() if dist.is_initialized() else 1
    rank = dist.get_rank() if dist.is_initialized() else 0
    x, y = (tensor.chunk(ranks)[rank] for tensor in batch(99))
    with torch.no_grad():
        total = side.loss(x, y) / ranks
    if ranks > 1:
        dist.all_reduce(total)
    return [float(total)]


NEW = [
    step_without_backward, two_steps_of_one_gradient, backward_twice, retained_graph, loss_without_graph,
    scheduler_before_optimizer, forgotten_update, mean_loss_logged, state_saved_by_hand,
    optimizer_state_of_plain_training, optimizer_state_of_rank_0, module_replaced, parameter_replaced,
    data_replaced, clipped_by_hand,
    noise_of_each_rank, gradients_cleared_by_hand, gradients_by_autograd, gradient_penalty, gradient_of_the_input,
    loose_parameter, plain_module_beside, group_added_later, checkpointed, checkpointed_reentrant,
    inner_model_called, parts_called, functional, calls_in_flight, stepped_between, compiled_by_user, compiled_before,
    copy_of_the_inner_model, moving_average, wrapped_in_ddp, toggled, under_inference_mode, hooked_gradients,
    closure, skipped_on_one_rank, skipped_before_backward, skipped_before_clipping, saved_on_one_rank,
    evaluated_on_one_rank, evaluated_on_parts, stepped_after_a_call, loss_kept_on_the_model,
    updated_by_hand,
]  # fmt: skip
PROGRAMS: dict[str, Callable[[Side], Any]] = LOOPS | {program.__name__: program for program in NEW}

Outcome = tuple[str, Any, Any]
"""How it went ("done", "refused", "failed"), the state after it or the message, and what it told."""


def outcome_of(program: Callable[[Side], Any], side: Side) -> Outcome:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            told = program(side)
            return "done", {name: value.clone() for name, value in side.model.state_dict().items()}, told
    except MeshwrightError as error:
        return "refused", str(error), None
    except Exception as error:
        return "failed", f"{type(error).__name__}: {error}", None


def verdict(plain: Outcome, found: list[Outcome], strategy: str) -> str:
    """What became of a program on all ranks: "right", "refused", "fails" or "WRONG"."""
    kinds = {outcome for outcome, _, _ in found}
    if kinds != {"done"}:
        return "refused" if "refused" in kinds else "fails"
    return "right" if plain[0] == "done" and all(_is_right(plain, one, strategy) for one in found) else "WRONG"


def _is_right(plain: Outcome, found: Outcome, strategy: str) -> bool:
    low = "16" in strategy
    far = max(float((found[1][name] - value).abs().max()) for name, value in plain[1].items())
    told = max((abs(a - b) for a, b in zip(found[2] or (), plain[2] or (), strict=True)), default=0.0)
    return far < (SMALL_DTYPES if low else ROUNDING) and told < (SMALL_DTYPES if low else 1e-4)


def plainly(name: str) -> Outcome:
    """A program with nothing of ours in it."""
    torch.manual_seed(0)
    return outcome_of(PROGRAMS[name], Side(Net()))


def ready(world: World) -> None:
    """Nothing: the ranks are there."""


def under(world: World, strategy: str, name: str) -> Outcome:
    described: Any = {"sample": batch(0)[0], "tensor_plan": {"leave": "whole"}} if "=" in strategy else {}
    model = mw.parallelize(Net, strategy, seed=0, world=world, **described)
    if model.loop.loss_scale is not None:
        model.loop.loss_scale.value = 1024.0
    return outcome_of(PROGRAMS[name], Side(model, model.data_rank, model.data_ranks))
