"""Parameters of a block as its program reads them, and the layers outside of blocks that run as programs."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.assemble.step import Trainer
from meshwright.assemble.world import World, fake_world
from meshwright.describe.model import describe
from meshwright.describe.observe import make_batch
from meshwright.facts.strategy import Strategy
from meshwright.jobs.decoder import Shape, decoder_job
from meshwright.strategies.tensor import replay
from meshwright.strategies.tensor.block_parameters import block_parameters
from meshwright.strategies.tensor.product import are_adjacent
from meshwright.strategies.tensor.replay import program_state


@pytest.fixture
def world() -> Iterator[World]:
    world = fake_world(2, torch.device("cpu"))
    yield world
    replay.recording(True)
    world.leave()


def parameters(adjacent: bool) -> list[Tensor]:
    """A norm's weight and two weights of 3 and 2 rows."""
    buffer = torch.arange(20.0)
    weights = [buffer[:12].view(3, 4), buffer[12:].view(2, 4)]
    found = [torch.ones(4), *(weights if adjacent else [x.clone() for x in weights])]
    return [x.detach().requires_grad_() for x in found]


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize("adjacent", [False, True])
def test_gradients_are_those_of_the_parts(adjacent: bool) -> None:
    norm, *weights = parameters(adjacent)
    assert are_adjacent(weights) is adjacent
    gain, joint = block_parameters(dist.group.WORLD.group_name, 1, ((3, 2),), norm, *weights)
    assert torch.equal(joint, torch.arange(20.0).view(5, 4))
    assert (joint.untyped_storage().data_ptr() == weights[0].untyped_storage().data_ptr()) is adjacent
    factor = torch.arange(1.0, 21.0).view(5, 4)
    (joint * factor * gain).sum().backward()
    assert torch.equal(weights[0].grad, factor[:3]) and torch.equal(weights[1].grad, factor[3:])
    assert torch.equal(norm.grad, (factor * joint.detach()).sum(0))  # a fake sum is this rank's share


@pytest.mark.usefixtures("world")
def test_what_is_not_used_has_no_gradient() -> None:
    norm, *weights = parameters(True)
    gain, joint = block_parameters(dist.group.WORLD.group_name, 1, ((3, 2),), norm, *weights)
    joint.sum().backward(retain_graph=True)
    assert norm.grad is None and all(weight.grad is not None for weight in weights)
    for weight in weights:
        weight.grad = None
    gain.sum().backward()
    assert norm.grad is not None and all(weight.grad is None for weight in weights)


SHAPE = Shape(layers=2, width=16, heads=4, kv_heads=2, feed_forward=16, vocabulary=64, length=16)


@pytest.mark.parametrize("frozen", [(), ("blocks.0.attention.key.weight",), ("blocks.0.attention_norm.weight",)])
def test_a_step_in_16_bits_is_that_of_the_blocks_as_they_are(world: World, frozen: tuple[str, ...]) -> None:
    """Programs join copies of weights; also if one of them is frozen, and so lies elsewhere."""
    job = decoder_job(SHAPE, global_batch=4)
    facts, batch = describe(job), make_batch(job, 4)
    gradients = []
    for programs in (False, True):
        replay.recording(programs)
        trainer = Trainer(job, facts, Strategy.parse("tp=2,bf16").resolve(2), world, seed=0)
        for name, parameter in trainer.engine.model.named_parameters():
            parameter.requires_grad_(name not in frozen)
        trainer = _rebuilt(trainer)
        for _ in range(3):
            trainer.forward_backward(batch)
            gradients.append({n: p.grad for n, p in trainer.engine.model.named_parameters()})
            trainer.update()
    for plain, found in zip(gradients[:3], gradients[3:], strict=True):
        assert {n for n, g in found.items() if g is None} == {n for n, g in plain.items() if g is None} == {*frozen}
        for name, gradient in plain.items():
            if gradient is not None:
                torch.testing.assert_close(found[name], gradient, rtol=0.05, atol=0.02 * float(gradient.abs().max()))


def _rebuilt(trainer: Trainer) -> Trainer:
    """The trainer with copies of what is trained now."""
    from meshwright.assemble.low_copies import LowCopies

    trainer._low = LowCopies(trainer.engine.model, torch.bfloat16)
    return trainer


def test_embedding_norm_and_head_run_as_programs(world: World) -> None:
    job = decoder_job(SHAPE, global_batch=4)
    trainer = Trainer(job, describe(job), Strategy.parse("tp=2").resolve(2), world, seed=0)
    batch = make_batch(job, 4)
    for _ in range(3):
        trainer.step(batch)
    model = trainer.engine.model
    for outside in (model.token, model.norm, model.head):
        state = program_state(outside)  # type: ignore[arg-type]
        assert state.reason == "" and [bound.calls for bound in state.programs] == [2]
