"""Jobs of different kinds for `kernel_grade.py`: a GPT, a convnet, an LSTM, a ViT, a U-Net, and a mixer of 1-d layers.

`HELD_OUT` are others, which were first run when nothing of the measurement was changed any more.

Each is also a job file's variable: `meshwright probe --kernels benchmarks/kernel_models.py:unet`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from gpt_model import GPT, Shape, make_up_batch, next_token_loss
from torch import Tensor, nn
from torch.optim import SGD, AdamW

from meshwright import Job

CLASSES = 10
Batch = dict[str, Tensor]


class Residual(nn.Module):
    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inside, outside, 3, stride, 1, bias=False)
        self.first_norm = nn.BatchNorm2d(outside)
        self.second = nn.Conv2d(outside, outside, 3, 1, 1, bias=False)
        self.second_norm = nn.BatchNorm2d(outside)
        self.around = nn.Conv2d(inside, outside, 1, stride, bias=False) if (inside, stride) != (outside, 1) else None

    def forward(self, x: Tensor) -> Tensor:
        y = self.second_norm(self.second(F.relu(self.first_norm(self.first(x)))))
        return F.relu(y + (x if self.around is None else self.around(x)))


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 32, 3, 1, 1)
        sizes = [(32, 32, 1), (32, 32, 1), (32, 64, 2), (64, 64, 1), (64, 128, 2), (128, 128, 1)]
        self.blocks = nn.ModuleList(Residual(*size) for size in sizes)
        self.head = nn.Linear(128, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(1000, 256)
        self.cells = nn.LSTM(256, 256, num_layers=2, batch_first=True)
        self.head = nn.Linear(256, 1000)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.cells(self.token(x))[0])


class ViT(nn.Module):
    def __init__(self, width: int = 256, layers: int = 6, patch: int = 8, side: int = 64) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.position = nn.Parameter(torch.randn(1, (side // patch) ** 2, width) * 0.02)
        block = nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(block, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.patches(x).flatten(2).transpose(1, 2) + self.position).mean(1))


class Level(nn.Module):
    """Two convolutions with group norms, as in diffusion models."""

    def __init__(self, inside: int, outside: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(8, inside)
        self.first = nn.Conv2d(inside, outside, 3, padding=1)
        self.second = nn.Conv2d(outside, outside, 3, padding=1)
        self.around = nn.Conv2d(inside, outside, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.around(x) + self.second(F.silu(self.first(F.silu(self.norm(x)))))


class UNet(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.down = nn.ModuleList([Level(width, width), Level(width, 2 * width), Level(2 * width, 4 * width)])
        self.middle = Level(4 * width, 4 * width)
        self.up = nn.ModuleList([Level(8 * width, 2 * width), Level(4 * width, width), Level(2 * width, width)])
        self.head = nn.Conv2d(width, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x, kept = self.stem(x), []
        for level in self.down:
            x = level(x)
            kept.append(x)
            x = F.avg_pool2d(x, 2)
        x = self.middle(x)
        for level in self.up:
            x = level(torch.cat([F.interpolate(x, scale_factor=2.0, mode="nearest"), kept.pop()], 1))
        return self.head(x)


class Mixer(nn.Module):
    """Many small kernels on little data: the host's part of its step is large."""

    def __init__(self, layers: int = 24, width: int = 64) -> None:
        super().__init__()
        self.stem = nn.Conv1d(4, width, 9, padding=4)
        self.depth = nn.ModuleList(nn.Conv1d(width, width, 5, padding=2, groups=width) for _ in range(layers))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(layers))
        self.mixes = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for depth, norm, mix in zip(self.depth, self.norms, self.mixes, strict=True):
            y = mix(norm(depth(x).transpose(1, 2)))
            x = x + torch.tanh(y).transpose(1, 2) * torch.sigmoid(x)
        return self.head(x.mean(2))


def images(count: int, side: int) -> Batch:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(count, 3, side, side, generator=generator)
    return {"x": x, "y": torch.randint(0, CLASSES, (count,), generator=generator)}


def series(count: int) -> Batch:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(count, 4, 64, generator=generator)
    return {"x": x, "y": torch.randint(0, CLASSES, (count,), generator=generator)}


def words(count: int, length: int = 64) -> Batch:
    tokens = torch.randint(0, 1000, (count, length + 1), generator=torch.Generator().manual_seed(0))
    return {"x": tokens[:, :-1].contiguous(), "y": tokens[:, 1:].contiguous()}


def classify(output: Tensor, batch: Batch) -> tuple[Tensor, int]:
    return F.cross_entropy(output, batch["y"], reduction="sum"), len(batch["y"])


def next_word(output: Tensor, batch: Batch) -> tuple[Tensor, int]:
    return F.cross_entropy(output.flatten(0, 1), batch["y"].flatten(), reduction="sum"), batch["y"].numel()


def denoise(output: Tensor, batch: Batch) -> tuple[Tensor, int]:
    return F.mse_loss(output, batch["x"], reduction="sum"), batch["x"].numel()


def first(batch: Batch) -> tuple[Tensor]:
    return (batch["x"],)


_SHAPE = Shape(layers=6, width=256, heads=4, length=128, vocabulary=2000)
gpt = Job(
    model=lambda: GPT(_SHAPE),
    inputs=first,
    loss=lambda logits, batch: (next_token_loss(logits, batch, reduction="sum"), batch["y"].numel()),
    optimizer=lambda parameters: AdamW(parameters, lr=1e-4),
    sample=lambda count: make_up_batch(_SHAPE, count, torch.Generator().manual_seed(0)),
    global_batch=8,
    max_norm=1.0,
)
convnet = Job(
    model=ConvNet,
    inputs=first,
    loss=classify,
    optimizer=lambda parameters: SGD(parameters, lr=1e-2, momentum=0.9),
    sample=lambda count: images(count, 32),
    global_batch=16,
)
lstm = Job(
    model=Recurrent,
    inputs=first,
    loss=next_word,
    optimizer=lambda parameters: AdamW(parameters, lr=1e-4),
    sample=words,
    global_batch=16,
    max_norm=1.0,
)
vit = Job(
    model=ViT,
    inputs=first,
    loss=classify,
    optimizer=lambda parameters: AdamW(parameters, lr=1e-4),
    sample=lambda count: images(count, 64),
    global_batch=16,
)
unet = Job(
    model=UNet,
    inputs=first,
    loss=denoise,
    optimizer=lambda parameters: AdamW(parameters, lr=1e-4),
    sample=lambda count: images(count, 32),
    global_batch=8,
)
mixer = Job(
    model=Mixer,
    inputs=first,
    loss=classify,
    optimizer=lambda parameters: SGD(parameters, lr=1e-2),
    sample=series,
    global_batch=4,
)


class Video(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            [nn.Conv3d(3, 16, 3, padding=1), nn.Conv3d(16, 32, 3, 2, 1), nn.Conv3d(32, 64, 3, 2, 1)]
        )
        self.norms = nn.ModuleList(nn.GroupNorm(4, width) for width in (16, 32, 64))
        self.head = nn.Linear(64, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = F.relu(norm(layer(x)))
        return self.head(x.mean((2, 3, 4)))


class Translator(nn.Module):
    """PyTorch's own encoder and decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(1000, 128)
        self.model = nn.Transformer(128, 4, 3, 3, 512, dropout=0.1, batch_first=True)
        self.head = nn.Linear(128, 1000)

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device)
        return self.head(self.model(self.token(x), self.token(x), tgt_mask=mask, tgt_is_causal=True))


class Ranker(nn.Module):
    """Tables of embeddings, their products in pairs, and wide layers, as in recommendation models."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(2000, 64) for _ in range(12))
        self.tower = nn.Sequential(nn.Linear(12 * 64 + 144, 1024), nn.ReLU(), nn.Linear(1024, 512), nn.ReLU())
        self.head = nn.Linear(512, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        rows = torch.stack([table(x[:, place]) for place, table in enumerate(self.tables)], 1)
        pairs = rows @ rows.transpose(1, 2)
        return self.head(self.tower(torch.cat([rows.flatten(1), pairs.flatten(1)], 1)))


def clips(count: int) -> Batch:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(count, 3, 8, 32, 32, generator=generator)
    return {"x": x, "y": torch.randint(0, CLASSES, (count,), generator=generator)}


def visits(count: int) -> Batch:
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(0, 2000, (count, 12), generator=generator)
    return {"x": x, "y": torch.randint(0, CLASSES, (count,), generator=generator)}


video = Job(
    model=Video,
    inputs=first,
    loss=classify,
    optimizer=lambda parameters: AdamW(parameters, lr=1e-4),
    sample=clips,
    global_batch=8,
)
translator = Job(
    model=Translator,
    inputs=first,
    loss=next_word,
    optimizer=lambda parameters: AdamW(parameters, lr=1e-4),
    sample=words,
    global_batch=16,
    max_norm=1.0,
)
ranker = Job(
    model=Ranker,
    inputs=first,
    loss=classify,
    optimizer=lambda parameters: SGD(parameters, lr=1e-2),
    sample=visits,
    global_batch=512,
)
HELD_OUT = {"3-d convnet": video, "translator": translator, "ranker": ranker}
JOBS = {"GPT": gpt, "convnet": convnet, "LSTM": lstm, "ViT": vit, "U-Net": unet, "1-d mixer": mixer}
