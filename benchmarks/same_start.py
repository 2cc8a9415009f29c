"""The same weights and the same text for models that name and divide their parameters differently.

A rank's part of a parameter is drawn from a seed made of the layer's number and the parameter's role, on the device.
Models that divide a parameter alike so hold the same numbers, whatever they call it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from zlib import crc32

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

STD = 0.02
ROLES = {"query": "q", "key": "k", "value": "v", "wq": "q", "wk": "k", "wv": "v", "wo": "out"}
ROLES |= {"w1": "gate", "w3": "up", "w2": "down", "tok_embeddings": "token", "output": "head"}


@dataclass(frozen=True)
class Sizes:
    """A Llama and its batch on one data rank."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    feed_forward: int
    vocabulary: int
    length: int
    samples: int

    @property
    def head_width(self) -> int:
        return self.width // self.heads

    @property
    def tokens(self) -> int:
        return self.samples * self.length


@torch.no_grad()
def fill(named: Iterable[tuple[str, Tensor]], *, neighbours: int | None = None) -> None:
    """Give each tensor its numbers: ones to norms, small random ones to the rest.

    `neighbours` is the width of a head whose rotary positions turn neighbouring elements instead of halves. The rows of
    query and key then stand in the order that makes it the same model, if a rank holds whole heads.
    """
    for name, tensor in named:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        words = [word for word in name.split(".") if word not in ("weight", "_orig_mod")]
        if "norm" in words[-1]:
            local.fill_(1.0)
            continue
        layer = re.search(r"\d+", name)
        role = ROLES.get(words[-1], words[-1])
        seed = crc32(f"{role} of {layer.group() if layer else 'the model'}".encode())
        local.normal_(std=STD, generator=torch.Generator(local.device).manual_seed(seed))
        if neighbours and role in ("q", "k") and local.shape[0] % neighbours == 0:
            halves = local.clone().view(-1, 2, neighbours // 2, local.shape[1])
            local.copy_(halves.transpose(1, 2).reshape(local.shape))


def text_for(sizes: Sizes, samples: int, device: torch.device, *, tensor_ranks: int = 1) -> Tensor:
    """Tokens of [samples, length + 1]; a longer text begins with the rows of a shorter one.

    Only words whose embeddings the first tensor rank holds: the vectors of others would be zero.
    """
    generator, words = torch.Generator().manual_seed(0), sizes.vocabulary // tensor_ranks
    rows = [torch.randint(words, (sizes.length + 1,), generator=generator) for _ in range(samples)]
    return torch.stack(rows).to(device)


def rotary(sizes: Sizes, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosine and sine of each position's angles, repeated for both halves of a head."""
    speeds = 10000.0 ** -(torch.arange(0, sizes.head_width, 2, device=device) / sizes.head_width)
    angles = torch.outer(torch.arange(sizes.length, device=device), speeds).repeat(1, 2)
    return angles.cos(), angles.sin()
