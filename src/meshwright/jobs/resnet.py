"""A plain ResNet with bottleneck blocks for images of 224 x 224."""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD

from meshwright.facts.job import Job
from meshwright.jobs.encoder import class_loss, sample_images

_SIDE, _CLASSES = 224, 1000
_WIDER = 4
"""The ratio of a block's output width to its inner width."""


class Bottleneck(nn.Module):
    """A residual block of convolutions: 1x1 to a smaller width, 3x3, and 1x1 to a larger one."""

    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        after = _WIDER * width
        self.narrow, self.narrow_norm = nn.Conv2d(before, width, 1, bias=False), nn.BatchNorm2d(width)
        self.look = nn.Conv2d(width, width, 3, stride, padding=1, bias=False)
        self.look_norm = nn.BatchNorm2d(width)
        self.widen, self.widen_norm = nn.Conv2d(width, after, 1, bias=False), nn.BatchNorm2d(after)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or before != after:
            self.shortcut = nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.narrow_norm(self.narrow(x)))
        y = F.relu(self.look_norm(self.look(y)))
        return F.relu(self.widen_norm(self.widen(y)) + self.shortcut(x))


class ResNet(nn.Module):
    """A convolutional network from images to class logits; `depths` are the numbers of blocks at each of four sizes."""

    def __init__(self, depths: Sequence[int]) -> None:
        super().__init__()
        self.stem, self.stem_norm = nn.Conv2d(3, 64, 7, 2, padding=3, bias=False), nn.BatchNorm2d(64)
        blocks, before = [], 64
        for size, depth in enumerate(depths):
            for place in range(depth):
                blocks.append(Bottleneck(before, 64 << size, 2 if size and place == 0 else 1))
                before = _WIDER * (64 << size)
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(before, _CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.stem_norm(self.stem(images))), 3, 2, padding=1)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(F.adaptive_avg_pool2d(x, 1).flatten(1))
        return logits


def resnet_job(depths: Sequence[int], *, global_batch: int) -> Job:
    return Job(
        model=lambda: ResNet(depths),
        inputs=lambda batch: (batch["x"],),
        loss=class_loss,
        optimizer=lambda params: SGD(params, lr=0.1, momentum=0.9, weight_decay=1e-4),
        sample=lambda n: sample_images(n, _SIDE, _CLASSES),
        global_batch=global_batch,
    )
