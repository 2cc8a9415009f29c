"""Blocks that are left out because they are alike change no fact; and those that are not alike are not left out."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from meshwright.describe import model as describing
from meshwright.describe.model import describe
from meshwright.describe.repeats import find_repeats
from meshwright.facts.job import Job
from meshwright.facts.model import ModelFacts
from minimal import make_job, squares

WIDTH, LAYERS, LENGTH = 8, 3, 3
RAN: list[nn.Module] = []
"""Blocks whose own forward pass ran."""


@pytest.fixture(autouse=True)
def nothing_ran() -> Iterator[None]:
    RAN.clear()
    yield
    RAN.clear()


class Block(nn.Module):
    """Attention and two linear layers, dropout between them."""

    def __init__(self, place: int = 0, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor, *others: Any) -> Any:
        RAN.append(self)
        return self.compute(x)

    def compute(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1))
        x = x + self.drop(self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)))
        return x + self.drop(self.down(F.gelu(self.up(x))))


class Model(nn.Module):
    """Blocks between two linear layers."""

    kind: Callable[..., nn.Module] = Block

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(self.kind(place) for place in range(LAYERS))
        self.leave = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return self.leave(x)


def sample(n: int) -> dict[str, Tensor]:
    return {"x": torch.randn(n, LENGTH, WIDTH), "y": torch.randn(n, LENGTH, WIDTH)}


def job_of(model: Callable[[], nn.Module], **parts: Any) -> Job:
    return make_job(model=model, sample=sample, loss=squares, **parts)


def the_long_way(job: Job, monkeypatch: pytest.MonkeyPatch) -> ModelFacts:
    with monkeypatch.context() as patch:
        patch.setattr(describing, "find_repeats", lambda model, blocks: find_repeats(model, ()))
        return describe(job)


class Dropping(Model):
    kind = staticmethod(lambda place: Block(place, dropout=0.1))


class Tied(Model):
    def __init__(self) -> None:
        super().__init__()
        self.leave.weight = self.enter.weight


class TiedInside(Block):
    """Every block is tied to itself in the same way."""

    def __init__(self, place: int) -> None:
        super().__init__()
        self.more = nn.Linear(WIDTH, WIDTH)
        self.more.weight = self.out.weight

    def compute(self, x: Tensor) -> Tensor:
        return self.more(super().compute(x))


class OneOfThemIsRead(Model):
    """The glue reads a weight of the third block."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.blocks[2].out.weight.sum()


class Frozen(Model):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[0].requires_grad_(False)


class PartlyUnused(Block):
    """`up` is called and thrown away, `drop` is not reached."""

    def compute(self, x: Tensor) -> Tensor:
        self.up(x)
        return x + self.out(x.detach()) + self.down.bias.sum()


class Detached(Model):
    """No gradient reaches the first block."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for place, block in enumerate(self.blocks):
            x = block(x.detach() if place == 1 else x)
        return self.leave(x)


class Skipping(Model):
    """The second block is never called, the last one twice; outputs go round each other."""

    def forward(self, x: Tensor) -> Tensor:
        first = self.blocks[0](self.enter(x))
        return self.leave(self.blocks[2](self.blocks[2](first) + first) + first)


class Recomputing(Model):
    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.leave(x)


class PostNorm(Block):
    """A block's output is that of a layer in it."""

    def compute(self, x: Tensor) -> Tensor:
        return self.norm(super().compute(x))


class CutsItsInput(Block):
    """What the block before gives is cut into heads at once."""

    def compute(self, x: Tensor) -> Tensor:
        return self.out(x.unflatten(-1, (4, -1)).transpose(-1, -2).flatten(2))


class GivesMore(Block):
    """A tuple with a constant, its own input, and a tensor without a gradient."""

    def compute(self, x: Tensor) -> Any:
        return super().compute(x), None, x, (x > 0)


class TakesMore(Model):
    kind = GivesMore

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x, _, before, mask = block(x, "word", None)
            x = x + before * mask
        return self.leave(x)


class Numbered(Block):
    def __init__(self, place: int) -> None:
        super().__init__()
        self.place = place


ALIKE = {
    "plain": Model,
    "dropout": Dropping,
    "tied": Tied,
    "tied inside": type("Model", (Model,), {"kind": TiedInside}),
    "read from outside": OneOfThemIsRead,
    "frozen": Frozen,
    "unused": type("Model", (Model,), {"kind": PartlyUnused}),
    "detached": Detached,
    "skipping": Skipping,
    "recomputing": Recomputing,
    "post-norm": type("Model", (Model,), {"kind": PostNorm}),
    "more outputs": TakesMore,
    "numbered": type("Model", (Model,), {"kind": Numbered}),
}


@pytest.mark.parametrize("name", ALIKE)
def test_facts_are_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    job = job_of(ALIKE[name])
    short = describe(job)
    few = len(RAN)
    RAN.clear()
    assert short == the_long_way(job, monkeypatch)
    assert 0 < few < len(RAN), "nothing was left out"


def test_a_hint_for_one_block_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    job = job_of(Model, tensor_plan={"blocks.2.up": "whole"})
    facts = describe(job)
    assert facts == the_long_way(job, monkeypatch)
    assert facts.tensor_plan is not None
    roles = {row.module: row.role for row in facts.tensor_plan.rows}
    assert (roles["blocks.1.up"], roles["blocks.2.up"]) == ("column", "whole")


def test_heads_and_pieces_of_blocks_that_did_not_run() -> None:
    plan = describe(job_of(Model)).tensor_plan
    assert plan is not None
    rows = [row for row in plan.rows if row.module.endswith("qkv")]
    assert {(row.parts, row.pieces, row.what) for row in rows} == {(2, 3, "heads")}
    assert [row.feeds for row in rows] == [f"blocks.{place}.out" for place in range(LAYERS)]


class Wider(Block):
    def __init__(self, place: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH + place), nn.Linear(WIDTH + place, WIDTH)


class Scaled(Block):
    """Differs in an attribute, by which the forward pass branches."""

    def __init__(self, place: int) -> None:
        super().__init__()
        self.scale = 0.5 * place

    def compute(self, x: Tensor) -> Tensor:
        return super().compute(x) if self.scale > 0.6 else self.out(x)


class AsksForItsNumber(Numbered):
    def compute(self, x: Tensor) -> Tensor:
        return super().compute(x) if self.place % 2 else self.out(x)


class Keeps(Block):
    """Keeps something that the glue reads later, as routers keep their losses."""

    def compute(self, x: Tensor) -> Tensor:
        self.kept = self.norm(x).sum()
        return super().compute(x)


class ReadsWhatIsKept(Model):
    kind = Keeps

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + sum(block.kept for block in self.blocks)


class Talks(Block):
    """Writes to a list that all blocks share."""

    def __init__(self, place: int, heard: list[Tensor]) -> None:
        super().__init__()
        self.heard = heard

    def compute(self, x: Tensor) -> Tensor:
        self.heard.append(self.out(x))
        return super().compute(x) + self.heard[0]


class Talking(Model):
    def __init__(self) -> None:
        self.heard: list[Tensor] = []
        self.kind = lambda place: Talks(place, self.heard)
        nn.Module.__init__(self)
        super().__init__()

    def forward(self, x: Tensor) -> Tensor:
        self.heard.clear()
        return super().forward(x) + sum(self.heard)


class Changes(Block):
    """Writes into its input."""

    def compute(self, x: Tensor) -> Tensor:
        return super().compute(x.add_(1.0))


class Counts(Block):
    """Writes into a buffer."""

    def __init__(self, place: int) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def compute(self, x: Tensor) -> Tensor:
        self.count += 1
        return super().compute(x)


class TwoOutputs(Block):
    """Which output depends on which weight would have to be known."""

    def compute(self, x: Tensor) -> Any:
        return self.out(x), self.down(self.up(x))


class UsesOne(Model):
    kind = TwoOutputs

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for place, block in enumerate(self.blocks):
            x = block(x)[place % 2]
        return self.leave(x)


class Swallow(torch.autograd.Function):
    """Keeps the gradient of its second argument to itself."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        return x + y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, None


class Swallows(Block):
    def compute(self, x: Tensor) -> Tensor:
        return Swallow.apply(super().compute(x), self.out(x))


class Hooked(Model):
    """What a hook sees of the third block goes into the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []
        self.blocks[2].out.register_forward_hook(lambda module, args, output: self.seen.append(output))

    def forward(self, x: Tensor) -> Tensor:
        self.seen.clear()
        return super().forward(x) + self.seen[0].sum()


class WeightsShared(Model):
    """The last block has a weight of the first."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[2].up.weight = self.blocks[0].up.weight


DIFFERENT = {
    "shapes": type("Model", (Model,), {"kind": Wider}),
    "attributes": type("Model", (Model,), {"kind": Scaled}),
    "numbers that matter": type("Model", (Model,), {"kind": AsksForItsNumber}),
    "kept": ReadsWhatIsKept,
    "talking": Talking,
    "changed inputs": type("Model", (Model,), {"kind": Changes}),
    "changed buffers": type("Model", (Model,), {"kind": Counts}),
    "two outputs": UsesOne,
    "own function": type("Model", (Model,), {"kind": Swallows}),
    "shared weights": WeightsShared,
    "cut inputs": type("Model", (Model,), {"kind": CutsItsInput}),
    "hooked": Hooked,
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_doubtful_blocks_run(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    job = job_of(DIFFERENT[name])
    assert describe(job) == the_long_way(job, monkeypatch)


def test_inputs_of_another_shape_are_another_call(monkeypatch: pytest.MonkeyPatch) -> None:
    class Halving(Model):
        def forward(self, x: Tensor) -> Tensor:
            x = self.enter(x)
            for place, block in enumerate(self.blocks):
                x = block(x[:, :2] if place == 1 else x)
            return self.leave(x)

    job = make_job(model=Halving, sample=sample, loss=lambda output, batch: (output.sum(), len(output)))
    facts = describe(job)
    assert facts == the_long_way(job, monkeypatch)
    flops = {call.name: call.flops for call in facts.calls}
    assert flops["blocks.0"] > flops["blocks.2"] > 0


def test_models_are_left_as_they_were() -> None:
    made: list[nn.Module] = []

    def build() -> nn.Module:
        made.append(Model())
        return made[-1]

    describe(job_of(build))
    assert all("forward" not in vars(module) for module in made[0].modules())
    assert all(not module._forward_pre_hooks for module in made[0].modules())
