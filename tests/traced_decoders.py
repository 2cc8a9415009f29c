"""A small decoder, and traces of its step under strategies, each made once."""

from collections.abc import Callable
from functools import cache, partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import AdamW

from meshwright import Job
from meshwright.describe.model import describe
from meshwright.facts.strategy import Strategy
from meshwright.facts.trace import Trace
from meshwright.tracing import trace_step

WIDTH, LENGTH, VOCABULARY, SAMPLES, LAYERS = 64, 32, 512, 16, 2
CUBLAS = 64 << 20


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.silu(self.up(x)))


class Decoder(nn.Module):
    def __init__(self, layers: int, block: Callable[[], nn.Module] = Block) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(block() for _ in range(layers))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.token(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def loss(logits: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    return F.cross_entropy(logits.flatten(0, 1), batch["x"].flatten(), reduction="sum"), batch["x"].numel()


@cache
def job_of(layers: int = LAYERS) -> Job:
    return job_for(partial(Decoder, layers))


def job_for(model: Callable[[], nn.Module]) -> Job:
    return Job(
        model=model,
        inputs=lambda batch: (batch["x"],),
        loss=loss,
        optimizer=partial(AdamW, lr=1e-3),
        sample=lambda n: {"x": torch.randint(VOCABULARY, (n, LENGTH))},
        global_batch=SAMPLES,
        max_norm=1.0,
    )


@cache
def facts_of(job: Job):
    return describe(job)


@cache
def trace(strategy: str, ranks: int = 1, rank: int = 0, layers: int = LAYERS, whole: bool = False) -> Trace:
    job = job_of(layers)
    return trace_step(job, facts_of(job), Strategy.parse(strategy), ranks=ranks, rank=rank, whole=whole)


def weights(layers: int = LAYERS) -> int:
    return 2 * VOCABULARY * WIDTH + layers * (WIDTH + 12 * WIDTH * WIDTH)


def sent(trace: Trace, kind: str, axis: str, phase: str | None = None) -> float:
    return sum(
        message.bytes * message.count
        for message in trace.messages
        if (message.kind, message.axis) == (kind, axis) and phase in (None, message.phase)
    )
