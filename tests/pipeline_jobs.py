"""Small models that between them have everything that cutting a model into stages can get wrong, and their jobs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import StepLR

from meshwright import Job

WIDTH, VOCABULARY, LENGTH = 8, 13, 4  # 13 does not divide by 2 or 4: shards are uneven


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class TableBlock(Block):
    def forward(self, x: Tensor, table: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x) + table * x


class Tables(nn.Module):
    """All blocks get a buffer in fp32, as rotary positions are given; in bf16 each casts it."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(TableBlock() for _ in range(4))
        self.leave = nn.Linear(WIDTH, VOCABULARY)
        self.register_buffer("table", torch.linspace(0.1, 0.3, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, self.table)
        return self.leave(x)  # type: ignore[no-any-return]


class Trunk(nn.Module):
    """Blocks between two linear layers."""

    def __init__(self, blocks: int = 4) -> None:
        super().__init__()
        self.enter = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.leave = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return self.leave(x)


class Tied(nn.Module):
    """Tokens in, logits out: tied head, a parameter of the model's own, a buffer, and a mask made between the calls."""

    def __init__(self, blocks: int = 4) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, WIDTH)
        self.places = nn.Parameter(torch.randn(LENGTH, WIDTH))
        self.register_buffer("waves", torch.sin(torch.arange(LENGTH * WIDTH).view(LENGTH, WIDTH)), persistent=False)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.token.weight

    def forward(self, tokens: Tensor) -> Tensor:
        mask = (tokens > 2).unsqueeze(-1)
        y = self.token(tokens) + self.places
        y = y + self.waves.to(y.dtype)
        for block in self.blocks:
            y = torch.where(mask, block(y), y)
        return self.head(self.norm(y))


class Glued(nn.Module):
    """Reads its parameters between the calls: a position is added, and the head is the embedding's own weight."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, WIDTH)
        self.places = nn.Parameter(torch.randn(LENGTH, WIDTH))
        self.gain = nn.Parameter(torch.ones(1))
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, tokens: Tensor) -> Tensor:
        y = self.token(tokens) + self.places
        for block in self.blocks:
            y = block(y) * self.gain
        return F.linear(y, self.token.weight)


class BiasedBlock(nn.Module):
    """The first makes a bias that all later ones are handed; blocks return tuples with odd things in them."""

    def __init__(self, first: bool) -> None:
        super().__init__()
        self.inner = Block()
        self.relative = nn.Linear(WIDTH, WIDTH) if first else None

    def forward(self, x: Tensor, bias: Tensor | None) -> tuple[Any, ...]:
        if self.relative is not None:
            bias = self.relative(x).mean(1, keepdim=True)
        return self.inner(x) + bias, None, {"bias": bias, "name": "block"}


class Biased(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(BiasedBlock(first=index == 0) for index in range(4))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> dict[str, Tensor]:
        y, bias = self.token(tokens), None
        for block in self.blocks:
            y, nothing, rest = block(y, bias)
            assert nothing is None and rest["name"] == "block"
            bias = rest["bias"]
        return {"logits": self.head(y)}


class Skipping(nn.Module):
    """The first block's output comes back before the last block, over all that lies between."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.leave = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, x: Tensor) -> Tensor:
        first, second, third, fourth = self.blocks
        y = first(self.enter(x))
        z = third(second(y))
        return self.leave(fourth(z + y.transpose(0, 1).transpose(0, 1)))


class Repeating(nn.Module):
    """One block is called first and last."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.leave = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, x: Tensor) -> Tensor:
        first, second, third = self.blocks
        return self.leave(first(third(second(first(self.enter(x))))))


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Block()
        self.look = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        return self.inner(x) + self.look(memory).mean(1, keepdim=True)


class Translating(nn.Module):
    """Every decoder block reads the encoder's output."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, WIDTH)
        self.encoder = nn.ModuleList(Block() for _ in range(2))
        self.decoder = nn.ModuleList(Decoder() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        memory = self.token(source)
        for block in self.encoder:
            memory = block(memory)
        y = self.token(target)
        for decoder in self.decoder:
            y = decoder(y, memory=memory)
        return self.head(y)


class Frozen(Tied):
    """Some parameters do not train, one is never read, and one block does not train at all."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[0].up.weight.requires_grad_(False)
        self.blocks[2].requires_grad_(False)
        self.unused = nn.Linear(3, 5)


class FrozenFoot(Trunk):
    """As in fine-tuning: nothing below the upper half trains."""

    def __init__(self) -> None:
        super().__init__()
        for module in (self.enter, self.blocks[0], self.blocks[1]):
            module.requires_grad_(False)


class Listening(Trunk):
    """A value crosses the cut that is read, but not learned through."""

    def forward(self, x: Tensor) -> Tensor:
        first = self.blocks[0](self.enter(x))
        y = first
        for block in self.blocks[1:]:
            y = block(y)
        return self.leave(y + first.detach())


class Sharing(Trunk):
    """Blocks read a tensor off an object that they all know, and no argument hands it to them."""

    class Block(Block):
        def __init__(self, board: dict[str, Tensor]) -> None:
            super().__init__()
            self.board = board

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.board["scale"]

    def __init__(self) -> None:
        super().__init__(0)
        self.board: dict[str, Tensor] = {}
        self.blocks.extend(self.Block(self.board) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        self.board["scale"] = x.mean((1, 2), keepdim=True)
        try:
            for block in self.blocks:
                x = block(x)
        finally:
            self.board.clear()
        return self.leave(x)


class Collecting(Trunk):
    """What blocks return is written into parts of a table."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        table = x.new_zeros(len(self.blocks), *x.shape)
        for index, block in enumerate(self.blocks):
            x = block(x)
            table[index] = x
        return self.leave(table.sum(0))


class Routing(Trunk):
    """The first block chooses, in whole numbers, what the last layers do; a block behind it does not look at that."""

    class Block(Block):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            y = super().forward(x)
            return y, y.argmax(-1, keepdim=True)

    def __init__(self) -> None:
        super().__init__(0)
        self.blocks.extend(self.Block() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x, chosen = self.blocks[0](self.enter(x))
        for block in self.blocks[1:]:
            x, _ = block(x)
        return self.leave(x + x.gather(-1, chosen) * (chosen > 2))


class Handing(Trunk):
    """A module returns its parameter as it is, and the model also reads it off the module."""

    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(WIDTH))

        def forward(self) -> Tensor:
            return self.weight

    def __init__(self) -> None:
        super().__init__()
        self.own = self.Own()

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x) + self.own()
        for block in self.blocks:
            x = block(x)
        return self.leave(x * self.own.weight)


class Doubling(Trunk):
    """Blocks return one tensor in two places."""

    class Block(Block):
        def forward(self, x: Tensor) -> Any:
            y = super().forward(x)
            return {"output": y, "last": y}

    def __init__(self) -> None:
        super().__init__(0)
        self.blocks.extend(self.Block() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for index, block in enumerate(self.blocks):
            x = block(x)["output" if index % 2 else "last"]
        return self.leave(x)


class Fickle(Trunk):
    """Calls one block less for a small batch."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.enter(x)
        for block in self.blocks if len(x) > 1 else self.blocks[:3]:
            y = block(y)
        return self.leave(y)


class ChangingGlue(Trunk):
    """Adds to a block's output in place."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
            x += 1.0
        return self.leave(x)


class ChangingFirst(Trunk):
    """Blocks change their input in place."""

    class Block(Block):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.tanh_())

    def __init__(self) -> None:
        super().__init__(0)
        self.blocks.extend(self.Block() for _ in range(4))


class ReadingChanged(ChangingFirst):
    """Goes on to read what its blocks have changed, and what it made of that before."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            before = x * 2
            y = block(x)
            x = x + y + before
        return self.leave(x)


class ChangingPast(Trunk):
    """Changes outputs of blocks past autograd, and reads one of them after the next block."""

    def forward(self, x: Tensor) -> Tensor:
        y = last = self.enter(x)
        for block in self.blocks:
            y, last = block(y) + last, y
            y.data.add_(0.1)
            last.data[..., 0] = 1.0
        return self.leave(y + last)


class ChangingBatch(Trunk):
    """Changes its input in place."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.mul_(0.5))


class ByValue(Trunk):
    """Looks at a value between its calls, and reads another one or not."""

    limit = float("inf")

    def forward(self, x: Tensor) -> Tensor:
        x = skip = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return self.leave(x + skip if x.sum() > self.limit else x)


class Selecting(Trunk):
    """Picks positions by values for its blocks."""

    def forward(self, x: Tensor) -> Tensor:
        chosen = (x.isfinite().all(-1)).nonzero(as_tuple=True)
        y = self.enter(x)[chosen]
        for block in self.blocks:
            y = block(y)
        return self.leave(y).view(*x.shape[:-1], -1)


class Averaging(Trunk):
    """Keeps an average of what lies between two calls."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        self.average = 0.9 * self.average + x.detach().mean((0, 1))
        return self.leave(x)


class AveragingBlocks(Trunk):
    """Keeps an average in the first block."""

    class Block(Block):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("average", torch.zeros(WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            self.average.lerp_(x.detach().mean((0, 1)), 0.1)
            return super().forward(x)

    def __init__(self) -> None:
        super().__init__()
        self.blocks[3] = self.Block()


class ConvolutionBlock(nn.Module):
    def __init__(self, norm: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.conv = nn.Conv2d(8, 8, 3, padding=1, bias=False)
        self.norm = norm()
        self.out = nn.Conv2d(8, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.out(torch.tanh(self.norm(self.conv(x))))


class Convolutions(nn.Module):
    def __init__(self, norm: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.stem = nn.Conv2d(2, 8, 3, padding=1)
        self.blocks = nn.Sequential(*(ConvolutionBlock(norm) for _ in range(2)))
        self.out = nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.blocks(self.stem(x)).mean((2, 3)))


def group_norms() -> nn.Module:
    return Convolutions(lambda: nn.GroupNorm(2, 8))


def batch_norms() -> nn.Module:
    return Convolutions(lambda: nn.BatchNorm2d(8))


def bare_batch_norms() -> nn.Module:
    return Convolutions(lambda: nn.BatchNorm2d(8, affine=False))


def token_batch(n: int) -> dict[str, Tensor]:
    text = torch.randint(VOCABULARY, (n, LENGTH + 1))
    return {"x": text[:, :-1], "y": text[:, 1:], "counts": torch.rand(n, LENGTH) < 0.6}


def vector_batch(n: int) -> dict[str, Tensor]:
    return {"x": torch.randn(n, LENGTH, WIDTH), "y": torch.randint(VOCABULARY, (n, LENGTH))}


def image_batch(n: int) -> dict[str, Tensor]:
    return {"x": torch.randn(n, 2, 6, 6), "y": torch.randint(6, (n,))}


def loss(output: Any, batch: Any) -> tuple[Tensor, int]:
    logits = output["logits"] if isinstance(output, dict) else output
    return F.cross_entropy(logits.flatten(0, -2), batch["y"].flatten(), reduction="sum"), batch["y"].numel()


def masked_loss(output: Tensor, batch: Any) -> tuple[Tensor, Tensor]:
    """Counts some tokens only, so its weight depends on the data."""
    each = F.cross_entropy(output.flatten(0, 1), batch["y"].flatten(), reduction="none")
    counts = batch["counts"].flatten()
    return (each * counts).sum(), counts.sum()


def adam(params: Any) -> AdamW:
    """In groups by name."""
    decayed = [p for name, p in params.named() if not name.endswith("bias")]
    rest = [p for name, p in params.named() if name.endswith("bias")]
    return AdamW([{"params": decayed}, {"params": rest, "weight_decay": 0.0}], lr=1e-2, weight_decay=0.1)


tied = Job(
    model=Tied,
    inputs=lambda batch: {"tokens": batch["x"]},
    loss=loss,
    optimizer=adam,
    schedule=lambda optimizer: StepLR(optimizer, 1, gamma=0.5),
    max_norm=0.5,
    sample=token_batch,
    global_batch=8,
)
masked = replace(tied, loss=masked_loss, max_norm=None)
frozen = replace(tied, model=Frozen)
uneven = replace(tied, global_batch=7)
glued = replace(tied, model=Glued)
biased = replace(tied, model=Biased, inputs=lambda batch: (batch["x"],))
translating = replace(tied, model=Translating, inputs=lambda batch: {"source": batch["x"], "target": batch["y"]})
trunk = replace(tied, model=Trunk, inputs=lambda batch: (batch["x"],), sample=vector_batch)
tables = replace(trunk, model=Tables)
skipping = replace(trunk, model=Skipping)
repeating = replace(trunk, model=Repeating)
frozen_foot = replace(trunk, model=FrozenFoot, optimizer=lambda params: AdamW(params, lr=1e-2))
listening = replace(trunk, model=Listening)
sharing = replace(trunk, model=Sharing)
collecting = replace(trunk, model=Collecting)
handing = replace(trunk, model=Handing)
routing = replace(trunk, model=Routing)
doubling = replace(trunk, model=Doubling)
fickle = replace(trunk, model=Fickle, global_batch=32)
changing_glue = replace(trunk, model=ChangingGlue)
changing_first = replace(trunk, model=ChangingFirst)
reading_changed = replace(trunk, model=ReadingChanged)
changing_past = replace(trunk, model=ChangingPast)
changing_batch = replace(trunk, model=ChangingBatch)
by_value = replace(trunk, model=ByValue)
selecting = replace(trunk, model=Selecting)
averaging = replace(trunk, model=Averaging)
averaging_blocks = replace(trunk, model=AveragingBlocks)
convolutions = replace(trunk, model=group_norms, sample=image_batch)
with_batch_norms = replace(trunk, model=batch_norms, sample=image_batch)
with_bare_batch_norms = replace(trunk, model=bare_batch_norms, sample=image_batch)
odd_batch_norms = replace(with_batch_norms, global_batch=7)
