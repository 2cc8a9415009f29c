"""One optimizer step in one process, against a loop written by hand."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import StepLR

from meshwright.assemble.batch import Share, part
from meshwright.assemble.step import Trainer
from meshwright.errors import JobError
from minimal import WIDTH, Blocks, make_job, make_trainer, mlp, sample, squares

SEED = 5


def close(left: Any, right: Any) -> None:
    torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-7)


def plain_model(build: Any = mlp) -> nn.Module:
    torch.manual_seed(SEED)
    return build()


def weights(trainer: Trainer) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in trainer.engine.state()}


def masked(output: Tensor, batch: Any) -> tuple[Tensor, Tensor]:
    """A mean over the numbers that count, of which every sample has another number."""
    counts = batch["x"] > 0
    return ((output - batch["y"]).square() * counts).sum(), counts.sum()


def test_a_step_is_what_a_plain_loop_does() -> None:
    job = make_job(optimizer=lambda params: AdamW(params, lr=0.01))
    trainer, model = make_trainer(job, seed=SEED), plain_model()
    optimizer = AdamW(model.parameters(), lr=0.01)
    for index in range(3):
        batch = sample(8, seed=index)
        loss = F.mse_loss(model(batch["x"]), batch["y"], reduction="sum") / 8
        optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.get_total_norm([p.grad for p in model.parameters()])
        optimizer.step()
        result = trainer.step(batch)
        assert (result.step, result.samples, result.lr, result.skipped) == (index + 1, 8, 0.01, False)
        assert result.loss == pytest.approx(loss.item(), rel=1e-6)
        assert result.grad_norm == pytest.approx(norm.item(), rel=1e-5)
    close(weights(trainer), dict(model.state_dict()))


@pytest.mark.parametrize("strategy", ["single,mb=1", "single,mb=3", "single,ac=full", "single,offload=optimizer"])
@pytest.mark.parametrize("loss", [squares, masked])
@pytest.mark.parametrize("samples", [8, 5])
def test_policies_do_not_change_the_step(strategy: str, loss: Any, samples: int) -> None:
    job = make_job(model=Blocks, loss=loss, optimizer=lambda params: SGD(params, lr=0.1, momentum=0.9), max_norm=0.5)
    whole, cut = make_trainer(job), make_trainer(job, strategy)
    for index in range(2):
        expected, result = (trainer.step(sample(samples, seed=index)) for trainer in (whole, cut))
        assert result.loss == pytest.approx(expected.loss, rel=1e-5)
        assert result.grad_norm == pytest.approx(expected.grad_norm, rel=1e-5)
    close(weights(cut), weights(whole))


def test_a_weight_that_depends_on_data() -> None:
    """The mean is over all that counts in the global batch, not a mean of the micro-batches' means."""
    trainer, model = make_trainer(make_job(loss=masked), "single,mb=1", seed=SEED), plain_model()
    batch = sample(8)
    counts = batch["x"] > 0
    loss = (model(batch["x"]) - batch["y"]).square()[counts].mean()
    loss.backward()
    trainer.forward_backward(batch)
    for own, hand in zip(trainer.engine.model.parameters(), model.parameters(), strict=True):
        close(own.grad, hand.grad)
    assert trainer.update().loss == pytest.approx(loss.item(), rel=1e-6)


def test_a_float_weight_of_any_size() -> None:
    """Thirds cannot be written exactly, and 5 thirds must still count as 5 samples of a third each."""
    job = make_job(loss=lambda output, batch: (squares(output, batch)[0], len(output) / 3))
    whole = make_trainer(make_job())
    expected = whole.step(sample(5)).loss
    assert make_trainer(job).step(sample(5)).loss == pytest.approx(3 * expected, rel=1e-6)


def odd(output: Tensor, batch: Any) -> tuple[Tensor, int]:
    """A number that neither follows from the samples nor is said to depend on the data."""
    return output.sum(), len(output) if len(output) < 3 else 1


def test_a_weight_that_depends_on_data_but_is_a_number() -> None:
    """Unless it was tried that it does not add up over samples: then it is of the whole batch."""
    with pytest.raises(JobError, match="Return a weight that depends on the data as a tensor"):
        make_trainer(make_job(loss=odd, loss_over="samples")).step(sample(8))
    found, expected = make_trainer(make_job(loss=odd)), plain_model()(sample(8)["x"]).sum()
    assert make_trainer(found.job, "single,mb=2", seed=SEED).step(sample(8)).loss == pytest.approx(expected.item())


def test_a_sum_of_one_element() -> None:
    job = make_job(loss=lambda output, batch: (squares(output, batch)[0].reshape(1), len(output)))
    assert make_trainer(job).step(sample(4)).loss == pytest.approx(make_trainer(make_job()).step(sample(4)).loss)


@pytest.mark.parametrize("max_norm", [1e-3, 1.0, 1e3])
def test_clipping(max_norm: float) -> None:
    trainer, model = make_trainer(make_job(max_norm=max_norm), seed=SEED), plain_model()
    batch = sample(8)
    (squares(model(batch["x"]), batch)[0] / 8).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.1 * parameter.grad
    assert trainer.step(batch).grad_norm == pytest.approx(norm.item(), rel=1e-5)
    close(weights(trainer), dict(model.state_dict()))


def test_the_schedule_moves_once_a_step() -> None:
    job = make_job(schedule=lambda optimizer: StepLR(optimizer, 1, gamma=0.5))
    trainer = make_trainer(job, "single,mb=2")
    assert [trainer.step(sample(8)).lr for _ in range(3)] == [0.1, 0.05, 0.025]


@pytest.mark.parametrize("loss", [squares, masked])
def test_a_wish_to_stop_comes_back_and_changes_nothing(loss: Any) -> None:
    trainer, other = (make_trainer(make_job(loss=loss), "single,mb=3") for _ in range(2))
    other.wish_to_stop = True
    plain, stopping = trainer.step(sample(8)), other.step(sample(8))
    assert (plain.stop, stopping.stop) == (False, True)
    assert (plain.loss, plain.grad_norm) == (stopping.loss, stopping.grad_norm)
    assert trainer.evaluate([sample(8)]) == other.evaluate([sample(8)])


def test_gradients_are_forgotten_after_an_update() -> None:
    trainer = make_trainer(make_job())
    trainer.forward_backward(sample(4))
    assert all(p.grad is not None for p in trainer.engine.model.parameters())
    trainer.update()
    assert all(p.grad is None for p in trainer.engine.model.parameters())


def test_an_overflow_skips_the_step_and_lowers_the_scale() -> None:
    trainer = make_trainer(make_job(schedule=lambda o: StepLR(o, 1, gamma=0.5)), "single,fp16")
    assert trainer.loss_scale is not None
    trainer.loss_scale.value = 2.0**40
    before = weights(trainer)
    result = trainer.step(sample(4))
    assert result.skipped
    assert trainer.loss_scale.value == 2.0**39
    assert trainer.steps == 1
    for name, value in weights(trainer).items():
        assert torch.equal(value, before[name])
    trainer.loss_scale.value = 64.0
    result = trainer.step(sample(4))
    assert not result.skipped
    assert result.lr == 0.1, "a skipped step must not move the schedule"
    assert not torch.equal(weights(trainer)["0.weight"], before["0.weight"])


@pytest.mark.parametrize("strategy", ["single,bf16", "single,fp16", "single,bf16:pure"])
def test_small_dtypes_come_near(strategy: str) -> None:
    job = make_job(model=Blocks, max_norm=1.0)
    exact, rounded = make_trainer(job), make_trainer(job, strategy)
    if rounded.loss_scale:
        rounded.loss_scale.value = 64.0
    for index in range(3):
        expected, result = (trainer.step(sample(8, seed=index)) for trainer in (exact, rounded))
        assert result.loss == pytest.approx(expected.loss, rel=0.02)
        assert result.grad_norm == pytest.approx(expected.grad_norm, rel=0.05)
    assert {t.dtype for t in weights(rounded).values()} == {torch.bfloat16 if "pure" in strategy else torch.float32}


@pytest.mark.parametrize("strategy", ["single", "single,mb=2"])
@pytest.mark.parametrize("loss", [squares, masked])
def test_evaluate(strategy: str, loss: Any) -> None:
    trainer = make_trainer(make_job(model=lambda: nn.Sequential(mlp(), nn.Dropout(0.5)), loss=loss), strategy)
    before = weights(trainer)
    batches = [sample(8), sample(3, seed=1)]
    model = copy.deepcopy(trainer.engine.model).eval()
    sums, counts = zip(*(loss(model(batch["x"]), batch) for batch in batches), strict=True)
    assert trainer.evaluate(batches) == pytest.approx((sum(sums) / sum(counts)).item(), rel=1e-6)
    assert trainer.engine.model.training
    for name, value in weights(trainer).items():
        assert torch.equal(value, before[name])


def test_update_needs_a_gradient() -> None:
    trainer = make_trainer(make_job())
    with pytest.raises(JobError, match=r"forward_backward\(batch\)"):
        trainer.update()
    trainer.step(sample(4))
    with pytest.raises(JobError, match=r"forward_backward\(batch\)"):
        trainer.update()


def test_an_empty_batch() -> None:
    with pytest.raises(JobError, match="without samples"):
        make_trainer(make_job()).step({"x": torch.empty(0, WIDTH), "y": torch.empty(0, WIDTH)})


def test_a_part_of_a_batch_is_taken_as_it_is() -> None:
    whole, parted = make_trainer(make_job()), make_trainer(make_job())
    assert parted.step(part(sample(6), Share(), parted.cutter, nominal=8)).loss == whole.step(sample(6)).loss


def masks(strategy: str, samples: int, *, seed: int = 0, steps: int = 1) -> list[list[float]]:
    """What dropout let through in each micro-batch, step after step."""
    job = make_job(model=lambda: nn.Sequential(mlp(), nn.Dropout(0.5)))
    trainer = make_trainer(job, strategy, seed=seed)
    seen: list[list[float]] = []
    trainer.engine.model[1].register_forward_hook(lambda module, args, y: seen.append((y != 0).flatten().tolist()))
    torch.manual_seed(1234 + samples)  # what others drew before must not matter
    for _ in range(steps):
        trainer.step(sample(samples))
    return seen


def test_dropout_depends_on_seed_step_and_place() -> None:
    seen = masks("single,mb=2", 8, steps=2)
    assert seen == masks("single,mb=2", 8, steps=2)
    assert len({str(mask) for mask in seen}) == 8, "every step and place has its own"
    assert masks("single,mb=2", 4) == seen[:2], "the same place has the same in a smaller batch"
    assert masks("single,mb=2", 8, seed=1) != seen[:4]


@pytest.mark.parametrize("strategy", ["single", "single,offload=optimizer"])
def test_an_optimizer_finds_what_the_builder_put_on_parameters(strategy: str) -> None:
    def build() -> nn.Module:
        model = mlp()
        for name, parameter in model.named_parameters():
            parameter.decay = 0.0 if name.endswith("bias") else 0.1  # type: ignore[attr-defined]
        return model

    def optimizer(params: Any) -> SGD:
        return SGD([{"params": [parameter], "weight_decay": parameter.decay} for parameter in params], lr=0.1)

    made = make_trainer(make_job(model=build, optimizer=optimizer), strategy)
    assert [group["weight_decay"] for group in made.optimizer.param_groups] == [0.1, 0.0, 0.1, 0.0]
