"""A small GPT that learns Python's standard library byte by byte.

meshwright train examples/gpt.py --strategy fsdp --ranks 2 --steps 60
meshwright verify examples/gpt.py --ranks 2
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from meshwright import Job
from stdlib_text import StdlibText

VOCABULARY = 256
LENGTH = 128
WIDTH = 128
HEADS = 4
LAYERS = 4


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.head_width = width // heads
        self.dropout = dropout
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            layer(x).unflatten(-1, (-1, self.head_width)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads, dropout)
        self.mlp_norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.attention(self.attention_norm(x)))
        return x + self.drop(self.down(F.gelu(self.up(self.mlp_norm(x)))))


class GPT(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, WIDTH)
        self.position = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block(WIDTH, HEADS, dropout) for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.token.weight
        self.apply(self.initialise)

    @staticmethod
    def initialise(module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(self, x: Tensor) -> Tensor:
        x = self.token(x) + self.position(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def next_byte_loss(logits: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    y = batch["y"]
    return F.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="sum"), y.numel()


def warmup_then_cosine(optimizer: Optimizer, warmup: int = 10, steps: int = 500, floor: float = 0.1) -> LambdaLR:
    def factor(step: int) -> float:
        progress = min(1.0, max(0, step - warmup) / (steps - warmup))
        cosine = floor + (1 - floor) * (1 + math.cos(math.pi * progress)) / 2
        return min(1.0, (step + 1) / warmup) * cosine

    return LambdaLR(optimizer, factor)


def sample(n: int) -> dict[str, Tensor]:
    text = torch.randint(VOCABULARY, (n, LENGTH + 1))
    return {"x": text[:, :-1], "y": text[:, 1:]}


job = Job(
    model=GPT,
    inputs=lambda batch: (batch["x"],),
    loss=next_byte_loss,
    optimizer=lambda params: AdamW(params, lr=2e-3, betas=(0.9, 0.95)),
    schedule=warmup_then_cosine,
    max_norm=1.0,
    data=lambda: StdlibText(LENGTH),
    sample=sample,
    global_batch=16,
)
