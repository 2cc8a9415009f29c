"""Recorded programs of blocks: equal to them, used only while conditions hold, refused where they cannot be."""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.checkpoint import checkpoint

import minimal
import tensor_models
import tensor_programs
from meshwright.assemble.recompute import recompute_blocks
from meshwright.assemble.world import fake_world
from meshwright.errors import Refused
from meshwright.strategies.tensor import draft, replay
from meshwright.strategies.tensor.mode import tensor_region
from meshwright.strategies.tensor.replay import BlockState, program_state
from meshwright.strategies.tensor.split import to_plain

WIDTH, LENGTH = 8, 4
SCALE = 1.0


class Settings:
    scale = 1.0

    def __init__(self) -> None:
        self.shift = 0.0


SETTINGS = Settings()


class Block(nn.Module):
    """A block whose `habit` is what its author may do to an activation between the layers of a pair."""

    bend = 1.0

    def __init__(self, habit: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.drop, self.batch_norm = nn.Dropout(0.5), nn.BatchNorm1d(LENGTH)
        self.gain = nn.Parameter(torch.full((WIDTH,), 2.0))
        self.habit, self.factor, self.calls, self.seen = habit, 1.0, 0, []

    def forward(self, x: Tensor) -> Tensor:
        return x + self.habit(self, self.down(F.gelu(self.up(self.norm(x)))))


class Model(nn.Module):
    def __init__(self, habit: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(habit) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    world = fake_world(2, torch.device("cpu"))
    yield init_device_mesh("cpu", (2,), mesh_dim_names=("tensor",))
    replay.recording(True)
    world.leave()


@cache
def found_plan() -> tuple[Any, Any, tuple[str, ...]]:
    """The job of a model with a plain habit, its plan and its blocks, found once."""

    def sample(n: int) -> dict[str, Tensor]:
        return {"x": torch.linspace(-1, 1, n * LENGTH * WIDTH).view(n, LENGTH, WIDTH)}

    job = minimal.make_job(
        model=lambda: Model(plain_habit), sample=sample, loss=lambda output, batch: (output.sum(), len(batch["x"]))
    )
    return job, *tensor_models.plan_of(job)


def divide(habit: Callable[[Any, Tensor], Tensor], mesh: DeviceMesh) -> nn.Module:
    job, plan, blocks = found_plan()
    assert plan.for_ranks(2).divided and len(blocks) == 3
    model, _ = tensor_programs.divided_model(job, plan, mesh, blocks, tensor_programs.whole_model(job))
    for block in model.blocks:
        block.habit = habit
    return model


def plain_habit(block: Any, x: Tensor) -> Tensor:
    return x * block.factor


@dataclass
class Pass:
    loss: float
    gradients: dict[str, Tensor]
    buffers: dict[str, Tensor]
    random_state: Tensor

    def equals(self, other: "Pass", error: float = 1e-5) -> bool:
        """Whether another pass found the same; sums over rows in another order differ by `error` at most."""
        pairs = [(self.gradients, other.gradients), (self.buffers, other.buffers)]
        same = all(a.keys() == b.keys() and all(_near(a[name], b[name], error) for name in a) for a, b in pairs)
        near = _near(torch.tensor(self.loss), torch.tensor(other.loss), error)
        return same and near and torch.equal(self.random_state, other.random_state)


def _near(a: Tensor, b: Tensor, error: float) -> bool:
    return bool((a - b).abs().max() <= error * b.abs().max())


def run(model: nn.Module, mesh: DeviceMesh, samples: int = 2) -> Pass:
    torch.manual_seed(3)
    x = torch.linspace(-1, 2, samples * LENGTH * WIDTH).view(samples, LENGTH, WIDTH)
    model.zero_grad()
    with tensor_region(mesh):
        loss = to_plain(model(x), mesh).square().sum()
        if loss.requires_grad:
            loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    return Pass(loss.item(), gradients, buffers, torch.get_rng_state())


def as_it_is(model: nn.Module, mesh: DeviceMesh, samples: int = 2) -> Pass:
    replay.recording(False)
    found = run(model, mesh, samples)
    replay.recording(True)
    return found


def states(model: nn.Module) -> list[BlockState]:
    return [program_state(block) for block in model.blocks]  # type: ignore[union-attr]


def replayed(model: nn.Module) -> int:
    return sum(bound.calls for state in states(model) for bound in state.programs)


def no_grad_inside(block: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        scale = x.abs().amax(-1, keepdim=True) + 1
    return x / scale


def tensors_made_inside(block: Any, x: Tensor) -> Tensor:
    mask = torch.arange(x.shape[1])[None, :, None] < 2
    return x.masked_fill(mask, 0.0) * torch.tensor([2.0]) + torch.zeros_like(x)


def dropout(block: Any, x: Tensor) -> Tensor:
    return block.drop(x) + F.dropout(torch.ones(3)).sum()


def in_place(block: Any, x: Tensor) -> Tensor:
    y = torch.ones(3) * block.gain[:3]
    y += 1
    y[0] = 5.0
    return x * y.sum()


RECORDED = {
    "plain": plain_habit,
    "a tensor that no layer divides": lambda block, x: x * block.gain.exp(),
    "no_grad": no_grad_inside,
    "tensors made inside": tensors_made_inside,
    "dropout": dropout,
    "in place on a whole tensor": in_place,
    "statistics": lambda block, x: block.batch_norm(x),
    "several results": lambda block, x: (
        torch.cat([part * 2 for part in x.chunk(2, -1)][::-1], -1) + x.max(-1)[0][..., None]
    ),
}


@pytest.mark.parametrize("rewritten", [False, True])
@pytest.mark.parametrize("name", RECORDED)
def test_a_program_is_its_block(mesh: DeviceMesh, monkeypatch: Any, name: str, rewritten: bool) -> None:
    """To the bit as recorded; to rounding once it is rewritten."""
    if not rewritten:
        monkeypatch.setattr(draft, "rewrite", lambda program, mesh, held: program)
    model, other = divide(RECORDED[name], mesh), divide(RECORDED[name], mesh)
    for _ in range(4):
        assert run(model, mesh).equals(as_it_is(other, mesh), 1e-5 if rewritten else 0.0)
    assert [state.reason for state in states(model)] == [""] * 3
    assert replayed(model) == 9 and replayed(other) == 0


def test_blocks_that_are_alike_share_code(mesh: DeviceMesh) -> None:
    model = divide(plain_habit, mesh)
    run(model, mesh)
    first, *others = [state.programs[0] for state in states(model)[1:]]  # the first one's input needs no gradient
    assert all(other.run.__code__ is first.run.__code__ for other in others)
    assert all(other.program.same_as(first.program) for other in others)


def count_calls(block: Any, x: Tensor) -> Tensor:
    block.calls += 1
    return x * block.calls


def keep_result(block: Any, x: Tensor) -> Tensor:
    block.seen.append(1)
    return x


def look_at_values(block: Any, x: Tensor) -> Tensor:
    return x * 2 if x.sum() > 100 else x


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] * 3


FAR = torch.full((WIDTH,), 3.0)
UNRECORDED: dict[str, tuple[Callable[[Any, Tensor], Tensor], str]] = {
    "counts its calls": (count_calls, "changes attributes"),
    "fills a list": (keep_result, "changes attributes"),
    "branches on values": (look_at_values, "depends on values"),
    "a shape of values": (lambda block, x: x + x[x > 0].sum(), "depends on values"),
    "an autograd function": (lambda block, x: Doubled.apply(x), "autograd function"),
    "checkpointing": (lambda block, x: checkpoint(torch.sin, x, use_reentrant=False), "saved tensors"),
    "a tensor from elsewhere": (lambda block, x: x * FAR, "from elsewhere"),
    "Python's random numbers": (lambda block, x: x * random.random(), "random"),
    "memory that is not filled": (lambda block, x: x + torch.empty(WIDTH).fill_(1.0), "cannot repeat"),
    "a hook on a tensor": (lambda block, x: (x.register_hook(lambda g: g * 2), x * 2)[1], "register_hook"),
}


@pytest.mark.parametrize("name", UNRECORDED)
def test_what_a_program_could_not_repeat_runs_as_it_is(mesh: DeviceMesh, name: str) -> None:
    habit, reason = UNRECORDED[name]
    model, other = divide(habit, mesh), divide(habit, mesh)
    for step in range(3):
        random.seed(step)
        found = run(model, mesh)
        random.seed(step)
        assert found.equals(as_it_is(other, mesh))
    assert all(reason in state.reason for state in states(model)), states(model)
    assert replayed(model) == 0


def test_blocks_without_a_program_are_named_once(mesh: DeviceMesh) -> None:
    def count(block: Any, x: Tensor) -> Tensor:
        block.calls += 1
        return x

    model = divide(count, mesh)
    with pytest.warns(UserWarning) as told:
        for _ in range(replay.ATTEMPTS + 2):
            run(model, mesh)
    (warning,) = [str(each.message) for each in told if "recorded program" in str(each.message)]
    assert warning.startswith("Block runs without") and warning.endswith("it changes attributes of its modules.")


def test_a_cache_is_named_with_what_to_do(mesh: DeviceMesh) -> None:
    class DynamicCache:
        """An object as transformers passes it on to blocks."""

    class Caching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor, cache: object) -> Tensor:
            return self.layer(x)  # type: ignore[no-any-return]

    block, programs = Caching(), replay.BlockPrograms(mesh)
    with pytest.warns(UserWarning, match="an argument is a DynamicCache. Call the model with use_cache=False"):
        for _ in range(replay.ATTEMPTS):
            programs(block, block.forward, (torch.ones(1, WIDTH), DynamicCache()), {})


def set_global(model: Any) -> None:
    globals()["SCALE"] = 3.0


def set_object(model: Any) -> None:
    SETTINGS.shift = 0.5


def set_attribute(model: Any) -> None:
    model.blocks[1].factor = 2.0


def set_class(model: Any) -> None:
    Block.bend = 1.5


def freeze(model: Any) -> None:
    model.blocks[0].up.weight.requires_grad_(False)


def replace_parameter(model: Any) -> None:
    model.blocks[0].gain = nn.Parameter(torch.full((WIDTH,), 5.0))


def add_hook(model: Any) -> None:
    model.blocks[1].norm.register_forward_hook(lambda module, args, output: output * 2)


def add_hook_on_block(model: Any) -> None:
    model.blocks[1].register_forward_hook(lambda module, args, output: output * 2)


def replace_module(model: Any) -> None:
    model.blocks[1].norm = nn.Identity()


def replace_forward(model: Any) -> None:
    model.blocks[1].norm.forward = lambda x: x * 3


def change_list(model: Any) -> None:
    model.blocks[1].seen.append(2)


CHANGES = [
    *(set_global, set_object, set_attribute, set_class, freeze, replace_parameter, add_hook, add_hook_on_block),
    *(replace_module, replace_forward, change_list),
    lambda model: model.eval(),
    lambda model: model.blocks[2].eval(),
]


def many_reads(block: Any, x: Tensor) -> Tensor:
    x = x * block.factor * SCALE + SETTINGS.shift + len(block.seen)
    return block.drop(x) * block.gain * block.bend


@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_later_is_noticed(mesh: DeviceMesh, change: Callable[[Any], None]) -> None:
    before = SCALE, SETTINGS.shift, Block.bend
    try:
        model, other = divide(many_reads, mesh), divide(many_reads, mesh)
        for _ in range(2):
            first = run(model, mesh)
            assert first.equals(as_it_is(other, mesh))
        assert replayed(model) == 3
        change(model)
        change(other)
        for _ in range(3):
            found = run(model, mesh)
            assert found.equals(as_it_is(other, mesh))
        assert not found.equals(first) or change is freeze
    finally:
        globals()["SCALE"], SETTINGS.shift, Block.bend = before


def test_another_shape_and_no_gradients_are_other_programs(mesh: DeviceMesh) -> None:
    model, other = divide(plain_habit, mesh), divide(plain_habit, mesh)
    for samples in (2, 4, 2, 4):
        assert run(model, mesh, samples).equals(as_it_is(other, mesh, samples))
    assert [len(state.programs) for state in states(model)] == [2] * 3 and replayed(model) == 6
    with torch.no_grad():
        for _ in range(2):
            assert run(model, mesh).equals(as_it_is(other, mesh))
    assert [len(state.programs) for state in states(model)] == [3] * 3 and replayed(model) == 9


@pytest.mark.parametrize("kind", ["full", "selective"])
def test_a_recomputed_block_draws_the_same(mesh: DeviceMesh, kind: str) -> None:
    model, other, plain = (divide(dropout, mesh) for _ in range(3))
    for divided in (model, other):
        for block in divided.blocks:
            del block.batch_norm
        recompute_blocks(list(divided.blocks), kind)  # type: ignore[arg-type]
    for _ in range(4):
        found = run(model, mesh)
        assert found.equals(as_it_is(other, mesh))
        assert found.loss == pytest.approx(as_it_is(plain, mesh).loss)
    assert replayed(model) == 9, [state.reason for state in states(model)]


def test_recomputing_counts_a_batch_once(mesh: DeviceMesh) -> None:
    model, other = (divide(RECORDED["statistics"], mesh) for _ in range(2))
    recompute_blocks(list(model.blocks), "full")  # type: ignore[arg-type]
    for _ in range(3):
        assert run(model, mesh).equals(as_it_is(other, mesh))
    assert replayed(model) == 0, "both runs of a checkpointed block are those of its own code"


def test_a_checkpointed_block_that_changes_before_backward_is_refused(mesh: DeviceMesh) -> None:
    model = divide(plain_habit, mesh)
    for block in model.blocks:  # type: ignore[union-attr]
        del block.batch_norm
    recompute_blocks(list(model.blocks), "full")  # type: ignore[arg-type]
    for _ in range(2):
        run(model, mesh)
    x = torch.ones(2, LENGTH, WIDTH)
    with tensor_region(mesh), pytest.raises(Refused, match="Keep them until backward"):
        loss = to_plain(model(x), mesh).sum()
        model.blocks[1].factor = 3.0  # type: ignore[index]
        loss.backward()


def test_a_program_that_became_stale_is_found(mesh: DeviceMesh) -> None:
    model = divide(plain_habit, mesh)
    run(model, mesh)
    right = run(model, mesh)
    block = model.blocks[1]  # type: ignore[index]
    plant_blind_conditions(block)
    block.factor = 2.0
    assert run(model, mesh).equals(right), "the planted program does not see the change"
    with pytest.raises(Refused, match="MESHWRIGHT_PROGRAMS=0"):
        for _ in range(draft.CHECKED):
            run(model, mesh)


def plant_blind_conditions(block: Any) -> None:
    """Conditions that hold whatever the block's factor is."""
    bound = program_state(block).programs[0]
    match = bound.match

    def blind(args: Any, kwargs: Any) -> Any:
        factor, block.factor = block.factor, 1.0
        try:
            return match(args, kwargs)
        finally:
            block.factor = factor

    bound.match = blind


def test_a_profiler_is_left_alone(mesh: DeviceMesh) -> None:
    import cProfile

    model = divide(plain_habit, mesh)
    with cProfile.Profile():
        run(model, mesh)
        run(model, mesh)
    assert replayed(model) == 0 and [state.failures for state in states(model)] == [0] * 3
    run(model, mesh)
    run(model, mesh)
    assert replayed(model) == 3
