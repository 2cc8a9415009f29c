"""Small models to be cut into stages: tied weights, skipped and repeated blocks, several inputs, convolutions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

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
