"""Plain PyTorch models of kinds that the project's other measurements do not have."""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class RecurrentWords(nn.Module):
    """A language model of stacked LSTMs."""

    def __init__(self, vocabulary: int, width: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.recurrent = nn.LSTM(width, width, layers, batch_first=True)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, words: Tensor) -> Tensor:
        hidden, _ = self.recurrent(self.embedding(words))
        return self.head(hidden)


class ConditionedBlock(nn.Module):
    """Attention and a feed-forward part whose norms are shifted, scaled and gated by a condition."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width, elementwise_affine=False) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.condition = nn.Linear(width, 6 * width)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        parts = self.condition(F.silu(condition)).unsqueeze(1).chunk(6, dim=-1)
        x = x + parts[2] * self._attend(self.norms[0](x) * (1 + parts[1]) + parts[0])
        hidden = F.gelu(self.wide(self.norms[1](x) * (1 + parts[4]) + parts[3]), approximate="tanh")
        return x + parts[5] * self.narrow(hidden)

    def _attend(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class DiffusionTransformer(nn.Module):
    """Predicts the noise of latent images from their patches, the time and a class."""

    def __init__(self, width: int, depth: int, heads: int, channels: int = 4, side: int = 32) -> None:
        super().__init__()
        self.side = side // 2
        self.patches = nn.Conv2d(channels, width, 2, stride=2)
        self.places = nn.Parameter(torch.zeros(1, self.side**2, width))
        self.time = nn.Sequential(nn.Linear(256, width), nn.SiLU(), nn.Linear(width, width))
        self.kinds = nn.Embedding(1000, width)
        self.blocks = nn.ModuleList(ConditionedBlock(width, heads) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 4 * channels)

    def forward(self, image: Tensor, time: Tensor, kind: Tensor) -> Tensor:
        x = self.patches(image).flatten(2).transpose(1, 2) + self.places
        waves = time[:, None] * torch.exp(-torch.arange(128, device=time.device) * (9.21 / 128))
        condition = self.time(torch.cat((waves.cos(), waves.sin()), dim=-1)) + self.kinds(kind)
        for block in self.blocks:
            x = block(x, condition)
        x = self.head(self.norm(x)).transpose(1, 2).unflatten(2, (self.side, self.side))
        return F.pixel_shuffle(x, 2)


class MixerBlock(nn.Module):
    def __init__(self, width: int, patches: int) -> None:
        super().__init__()
        self.over_patches = nn.Sequential(nn.Linear(patches, width // 2), nn.GELU(), nn.Linear(width // 2, patches))
        self.over_width = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.over_patches(self.norms[0](x).transpose(1, 2)).transpose(1, 2)
        return x + self.over_width(self.norms[1](x))


class Mixer(nn.Module):
    """Images by layers over patches and layers over channels, in turn."""

    def __init__(self, width: int, depth: int, patches: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 16, stride=16)
        self.blocks = nn.ModuleList(MixerBlock(width, patches) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 1000)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(dim=1))


class DilatedUnit(nn.Module):
    def __init__(self, channels: int, dilation: int) -> None:
        super().__init__()
        self.spread = nn.Conv1d(channels, channels, 7, dilation=dilation, padding=3 * dilation)
        self.mix = nn.Conv1d(channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mix(F.elu(self.spread(F.elu(x))))


class WaveCodec(nn.Module):
    """Sound to a coarse code and back, by convolutions of one dimension."""

    def __init__(self, channels: int, steps: tuple[int, ...] = (2, 4, 5, 8)) -> None:
        super().__init__()
        down: list[nn.Module] = [nn.Conv1d(1, channels, 7, padding=3)]
        for step in steps:
            down += [DilatedUnit(channels, 3**power) for power in range(3)]
            down += [nn.ELU(), nn.Conv1d(channels, 2 * channels, 2 * step, stride=step, padding=step // 2 + step % 2)]
            channels *= 2
        up: list[nn.Module] = []
        for step in reversed(steps):
            odd = step % 2
            up.append(
                nn.ConvTranspose1d(
                    channels, channels // 2, 2 * step, stride=step, padding=step // 2 + odd, output_padding=odd
                )
            )
            channels //= 2
            up += [DilatedUnit(channels, 3**power) for power in range(3)] + [nn.ELU()]
        self.down, self.up = nn.Sequential(*down), nn.Sequential(*up, nn.Conv1d(channels, 1, 7, padding=3))

    def forward(self, sound: Tensor) -> Tensor:
        return self.up(self.down(sound))[..., : sound.shape[-1]]


class VideoUnit(nn.Module):
    """A convolution over space and one over time, with a way around them."""

    def __init__(self, inner: int, outer: int, stride: int) -> None:
        super().__init__()
        self.space = nn.Conv3d(inner, outer, (1, 3, 3), (1, stride, stride), (0, 1, 1), bias=False)
        self.time = nn.Conv3d(outer, outer, (3, 1, 1), (stride, 1, 1), (1, 0, 0), bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm3d(outer) for _ in range(2))
        self.around = nn.Conv3d(inner, outer, 1, stride, bias=False) if inner != outer else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.relu(self.norms[0](self.space(x)))
        return F.relu(self.around(x) + self.norms[1](self.time(hidden)))


class VideoNet(nn.Module):
    """Clips by factored convolutions of three dimensions."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv3d(3, width, (3, 7, 7), (1, 2, 2), (1, 3, 3), bias=False), nn.BatchNorm3d(width), nn.ReLU()
        )
        widths = [width, width, 2 * width, 4 * width, 8 * width]
        units = [
            unit
            for inner, outer in pairwise(widths)
            for unit in (VideoUnit(inner, outer, 1 + (inner != outer)), VideoUnit(outer, outer, 1))
        ]
        self.units, self.head = nn.Sequential(*units), nn.Linear(widths[-1], 400)

    def forward(self, clips: Tensor) -> Tensor:
        return self.head(self.units(self.stem(clips)).mean(dim=(2, 3, 4)))


class Recommender(nn.Module):
    """Clicks from numbers and many large tables of embeddings."""

    def __init__(self, tables: int, rows: int, width: int) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(rows, width) for _ in range(tables))
        self.bottom = nn.Sequential(
            nn.Linear(13, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, width), nn.ReLU()
        )
        pairs = (tables + 1) * tables // 2
        self.top = nn.Sequential(
            nn.Linear(pairs + width, 1024), nn.ReLU(), nn.Linear(1024, 512), nn.ReLU(), nn.Linear(512, 1)
        )
        rows_of, columns_of = torch.tril_indices(tables + 1, tables + 1, offset=-1)
        self.register_buffer("below", rows_of * (tables + 1) + columns_of, persistent=False)

    def forward(self, dense: Tensor, ids: Tensor) -> Tensor:
        bottom = self.bottom(dense)
        parts = torch.stack([bottom, *(table(ids[:, place]) for place, table in enumerate(self.tables))], dim=1)
        products = (parts @ parts.transpose(1, 2)).flatten(1)[:, self.below]
        return self.top(torch.cat((bottom, products), dim=1)).squeeze(1)
