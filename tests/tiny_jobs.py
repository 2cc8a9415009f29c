"""Small jobs that between them have everything that strategies get wrong."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import StepLR

from meshwright import Job

WIDTH, VOCABULARY, LENGTH = 16, 31, 8  # 31 does not divide by 2 or 4: shards are uneven

MANY = 211
"""A vocabulary that makes them as large as a block."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mix = nn.MultiheadAttention(WIDTH, 2, batch_first=True, dropout=0.1)
        self.up = nn.Linear(WIDTH, 3 * WIDTH)
        self.down = nn.Linear(3 * WIDTH, WIDTH)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        x = x + self.mix(y, y, y, need_weights=False)[0]
        return x + self.drop(self.down(F.gelu(self.up(x))))


class Transformer(nn.Module):
    """Tied embedding and head, dropout, a non-persistent buffer, a plain tensor attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, WIDTH)
        self.register_buffer("waves", torch.sin(torch.arange(LENGTH * WIDTH).view(LENGTH, WIDTH)), persistent=False)
        self.shift = torch.full((1,), 0.5)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.token.weight

    def forward(self, x: Tensor) -> Tensor:
        y = self.token(x) + self.waves + self.shift.to(self.waves.device)
        for block in self.blocks:
            y = block(y)
        return self.head(y)


class Untied(Transformer):
    """An embedding and a head as large as a block, so that each is a shard unit of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(MANY, WIDTH)
        self.head = nn.Linear(WIDTH, MANY, bias=False)


class OwnLoss(Transformer):
    """Computes its loss itself."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(super().forward(x).flatten(0, 1), y.flatten())


class Partial(Transformer):
    """With a frozen, an unused and a nearly empty parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[0].up.weight.requires_grad_(False)
        self.unused = nn.Linear(3, 5)
        self.gain = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.gain


class ConvolutionBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(8, 8, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(8)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.norm(self.conv(x)))


class Convolutions(nn.Module):
    """BatchNorm in blocks that repeat."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 8, 3, padding=1)
        self.blocks = nn.Sequential(*(ConvolutionBlock() for _ in range(2)))
        self.out = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.blocks(self.stem(x)).mean((2, 3)))


class Plain(nn.Module):
    """Nothing repeats."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 33)
        self.second = nn.Linear(33, 5)
        self.scale = nn.Parameter(torch.tensor(1.0))  # no dims, so it cannot be cut

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x))) * self.scale


class Embedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, WIDTH)
        self.register_buffer("waves", torch.sin(torch.arange(LENGTH * WIDTH).view(LENGTH, WIDTH)), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.token(x)
        return y + self.waves.to(y.dtype)


def layers() -> nn.Module:
    """A sequence of layers, as DeepSpeed's pipeline wants it."""
    return nn.Sequential(Embedding(), *(Block() for _ in range(4)), nn.Linear(WIDTH, VOCABULARY))


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_layer": 2, "n_head": 2, "n_embd": WIDTH, "vocab_size": VOCABULARY, "n_positions": LENGTH}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0, use_cache=False))


def tokens(n: int) -> dict[str, Tensor]:
    text = torch.randint(VOCABULARY, (n, LENGTH + 1))
    return {"x": text[:, :-1], "y": text[:, 1:], "counts": torch.rand(n, LENGTH) < 0.7}


def token_loss(output: Any, batch: Any) -> tuple[Tensor, int]:
    logits = output if isinstance(output, Tensor) else output.logits
    return F.cross_entropy(logits.flatten(0, 1), batch["y"].flatten(), reduction="sum"), batch["y"].numel()


def masked_loss(logits: Tensor, batch: Any) -> tuple[Tensor, Tensor]:
    """Counts some tokens only, so the weight depends on the data."""
    each = F.cross_entropy(logits.flatten(0, 1), batch["y"].flatten(), reduction="none")
    counts = batch["counts"].flatten()
    return (each * counts).sum(), counts.sum()


def class_loss(logits: Tensor, batch: Any) -> tuple[Tensor, int]:
    return F.cross_entropy(logits, batch["y"], reduction="sum"), len(batch["y"])


def adam(params: Any) -> AdamW:
    """In groups by name."""
    decayed = [p for name, p in params.named() if not name.endswith("bias")]
    rest = [p for name, p in params.named() if name.endswith("bias")]
    return AdamW([{"params": decayed}, {"params": rest, "weight_decay": 0.0}], lr=1e-3)


transformer = Job(
    model=Transformer,
    inputs=lambda batch: (batch["x"],),
    loss=token_loss,
    optimizer=adam,
    schedule=lambda optimizer: StepLR(optimizer, 1, gamma=0.5),
    max_norm=0.5,
    sample=tokens,
    global_batch=8,
)
masked = replace(transformer, loss=masked_loss, max_norm=None)
partial = replace(transformer, model=Partial)
untied = replace(transformer, model=Untied)
finer_units = replace(untied, units=("MultiheadAttention", "blocks.*.up", "head"))
units_by_size = replace(untied, units=800)
uneven = replace(transformer, global_batch=7)
own_loss = replace(
    transformer,
    model=OwnLoss,
    inputs=lambda batch: (batch["x"], batch["y"]),
    loss=lambda output, batch: (output * batch["y"].numel(), batch["y"].numel()),
)
sequential = replace(transformer, model=layers)
uneven_sequential = replace(sequential, global_batch=7)
hf_gpt2 = replace(transformer, model=gpt2, inputs=lambda batch: {"input_ids": batch["x"]})
convolutions = Job(
    model=Convolutions,
    inputs=lambda batch: {"x": batch["x"]},
    loss=class_loss,
    optimizer=lambda params: SGD(params, lr=0.01, momentum=0.9),
    sample=lambda n: {"x": torch.randn(n, 1, 6, 6), "y": torch.randint(5, (n,))},
    global_batch=8,
)
plain = Job(
    model=Plain,
    inputs=lambda batch: (batch["x"],),
    loss=class_loss,
    optimizer=lambda params: AdamW(params, lr=1e-3),
    sample=lambda n: {"x": torch.randn(n, 7), "y": torch.randint(5, (n,))},
    global_batch=8,
)
