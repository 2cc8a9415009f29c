"""What `mw.parallelize` returns in one process, and what it refuses; loops on ranks are in tests/ranks."""

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adagrad, AdamW
from torch.optim.lr_scheduler import StepLR

import meshwright as mw
import minimal
from meshwright.assemble.world import World, alone
from meshwright.errors import CheckpointError, JobError, Refused
from meshwright.runtime import parallelize as module_of_parallelize
from meshwright.runtime import place


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    made = alone(minimal.CPU)
    yield made
    made.leave()


def sgd(parameters: Any) -> SGD:
    return SGD(parameters, lr=0.1)


def loss(model: nn.Module) -> torch.Tensor:
    batch = minimal.sample(4)
    return (model(batch["x"]) - batch["y"]).square().mean()


def test_it_returns_what_it_was_given(world: World) -> None:
    alone = mw.parallelize(minimal.mlp, "single", world=world)
    assert isinstance(alone, mw.Parallel) and isinstance(alone, nn.Module)
    _, optimizer = mw.parallelize(minimal.mlp, "single", optimizer=sgd, world=world)
    assert type(optimizer) is SGD
    _, optimizer, scheduler = mw.parallelize(
        minimal.mlp, "single", optimizer=sgd, scheduler=lambda made: StepLR(made, 1), world=world
    )
    assert scheduler.optimizer is optimizer


def test_it_looks_like_the_model(world: World) -> None:
    plain = minimal.Blocks()
    state = {name: value.clone() for name, value in plain.state_dict().items()}
    model = mw.parallelize(plain, "single", world=world)
    assert isinstance(model.module, minimal.Blocks) and model.blocks[0].norm is model.module.blocks[0].norm
    assert dict(model.named_parameters()).keys() == state.keys()
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    model.eval()
    assert not model.module.blocks[0].training
    model.load_state_dict({name: value + 1 for name, value in state.items()})
    assert torch.equal(model.enter.bias, state["enter.bias"] + 1)
    with pytest.raises(AttributeError, match="nothing_like_it"):
        _ = model.nothing_like_it
    with pytest.raises(JobError, match=r"lacks enter\.bias"):
        model.load_state_dict({name: value for name, value in state.items() if name != "enter.bias"})


def test_an_optimizer_that_exists(world: World) -> None:
    """Its parameters are replaced in their groups, and a scheduler of it stays with it."""
    plain = minimal.mlp()
    optimizer = AdamW([{"params": plain[0].parameters(), "lr": 0.5}, {"params": plain[2].parameters()}])
    scheduler = StepLR(optimizer, 1)
    model, same, schedule = mw.parallelize(plain, "single,bf16", optimizer=optimizer, scheduler=scheduler, world=world)
    assert same is optimizer and schedule is scheduler
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    assert [id(parameter) for parameter in held] == [id(parameter) for parameter in model.parameters()]
    before = model.state_dict()
    loss(model).backward()
    optimizer.step()
    assert not torch.equal(before["0.weight"], model.state_dict()["0.weight"])


def test_a_model_without_an_optimizer_of_its_own_is_checked_at_its_first_step(world: World) -> None:
    plain = minimal.mlp()
    early = sgd(plain.parameters())
    old = [nn.Parameter(parameter.detach().clone()) for parameter in plain.parameters()]
    model = mw.parallelize(plain, "single", world=world)
    loss(model).backward()
    early.step()  # laid out in place, they are still the model's
    assert not torch.equal(old[0], model.state_dict()["0.weight"])


@pytest.mark.parametrize(
    ("strategy", "options", "told"),
    [
        ("ddp,mb=2", {}, "mb=2 divides batches in our loop"),
        ("zero1,engine=deepspeed", {}, "runs the optimizer itself"),
        ("tp=2", {}, "sample=..."),
        ("pp=2:1f1b", {"sample": torch.ones(4, 4)}, "give loss=..."),
        ("pp=2:1f1b,offload=optimizer", {"sample": torch.ones(4, 4)}, "offload=optimizer with stages"),
        ("single", {"scheduler": StepLR}, "without its optimizer"),
        ("single", {"optimiser": sgd}, "has no option optimiser"),
        ("single", {"optimizer": lambda parameters: parameters}, "takes a torch optimizer"),
        ("single", {"optimizer": Adagrad(minimal.mlp().parameters())}, "has state already"),
        ("single", {"optimizer": sgd(minimal.mlp().parameters())}, "that is not the model's"),
        ("single", {"optimizer": sgd, "scheduler": StepLR(sgd(minimal.mlp().parameters()), 1)}, "another optimizer"),
    ],
)
def test_what_is_refused(world: World, strategy: str, options: dict[str, Any], told: str) -> None:
    with pytest.raises((JobError, Refused)) as error:
        mw.parallelize(minimal.mlp, strategy, world=world, **options)
    assert told in str(error.value)


def test_a_call_that_needs_the_loss(world: World) -> None:
    model = mw.parallelize(minimal.mlp, "single", world=world)
    with pytest.raises(JobError, match=r"model\.forward_backward computes the loss"):
        model.forward_backward(minimal.sample(4))


def test_a_closure_in_fp16(world: World) -> None:
    model, optimizer = mw.parallelize(minimal.mlp, "single,fp16", optimizer=sgd, world=world)
    with pytest.raises(JobError, match="without a closure"):
        optimizer.step(lambda: float(loss(model)))


def test_a_failed_pass_does_not_hide_the_next(world: World) -> None:
    model = mw.parallelize(minimal.mlp, "single", world=world)
    seen: list[list[int]] = []
    model.loop.watch.ended = seen.append
    hook = next(model.parameters()).register_hook(lambda _: 1 / 0)  # type: ignore[arg-type, return-value]
    with pytest.raises(ZeroDivisionError):
        loss(model).backward()
    hook.remove()
    loss(model).backward()
    assert seen == [[4]]


def test_a_checkpoint_forgets_no_optimizer(world: World, tmp_path: Path) -> None:
    model = mw.parallelize(minimal.mlp, "single", world=world)
    optimizer = sgd(model.parameters())
    loss(model).backward()
    optimizer.step()
    with pytest.raises(CheckpointError, match="not given to mw"):
        model.save(tmp_path / "a")
    model.save(tmp_path / "a", weights_only=True)
    other, _ = mw.parallelize(minimal.mlp, "single", optimizer=sgd, seed=1, world=world)
    other.load(tmp_path / "a", weights_only=True)
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in other.state_dict().items())
    with pytest.raises(CheckpointError, match="none was given"):
        model.load(tmp_path / "a")


def test_layers_over_devices_of_one_process(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine with one device, which stands for two."""
    for module in (module_of_parallelize, place):
        monkeypatch.setattr(module, "devices_for", lambda layers, first: [minimal.CPU] * layers)
    torch.manual_seed(0)
    plain = minimal.Blocks()
    model, optimizer = mw.parallelize(minimal.Blocks, "layers=2", optimizer=sgd, sample=torch.ones(4, 4), world=world)
    reference = sgd(plain.parameters())
    for one, update in ((plain, reference), (model, optimizer)):
        loss(one).backward()
        torch.nn.utils.clip_grad_norm_(one.parameters(), 0.1)
        update.step()
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], value)


def test_nothing_is_said_in_one_process(world: World) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loss(mw.parallelize(minimal.mlp, "single", world=world)).backward()
