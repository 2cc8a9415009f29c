"""Networks for images as people write them."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright import Job
from zoo.jobs import CLASSES, Block, entry, images, make_job


class Residual(nn.Module):
    """As in torchvision: one in-place ReLU that is called twice, and an in-place sum."""

    def __init__(self, inside: int, outside: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inside, outside, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outside)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(outside, outside, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outside)
        same = inside == outside and stride == 1
        self.down = None if same else nn.Sequential(nn.Conv2d(inside, outside, 1, stride), nn.BatchNorm2d(outside))

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        y += x if self.down is None else self.down(x)
        return self.relu(y)


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 3, 1, 1), nn.BatchNorm2d(4), nn.ReLU(inplace=True))
        self.layer1 = nn.Sequential(Residual(4, 4), Residual(4, 4))
        self.layer2 = nn.Sequential(Residual(4, 8, 2), Residual(8, 8))
        self.fc = nn.Linear(8, CLASSES)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer2(self.layer1(self.stem(x)))
        return self.fc(torch.flatten(F.adaptive_avg_pool2d(x, 1), 1))


@entry()
def resnet_in_place() -> Job:
    """A ResNet with in-place ReLUs and BatchNorm."""
    return make_job(ResNet, images)


class NormedResidual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.GroupNorm(2, width), nn.ReLU(inplace=True), nn.Conv2d(width, width, 3, 1, 1), nn.SiLU(inplace=True)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x).add_(x)


class GroupNormed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 3, 1, 1), nn.ReLU(inplace=True))
        self.blocks = nn.Sequential(*(NormedResidual(4) for _ in range(4)))
        self.fc = nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.blocks(self.stem(x)).mean((2, 3)))


@entry()
def group_norm_in_place() -> Job:
    """In-place activations and an in-place residual sum, without BatchNorm: stages may cut here."""
    return make_job(GroupNormed, images)


class NormAct(nn.BatchNorm2d):
    """As in timm: a BatchNorm with an activation in its own forward."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.gain = nn.Parameter(torch.full((1,), 0.7))
        self.act = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(super().forward(x)) * self.gain


class FunctionalNormAct(nn.BatchNorm2d):
    """The same with a call of F.batch_norm instead of the parent's forward."""

    def forward(self, x: Tensor) -> Tensor:
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        running = (self.running_mean, self.running_var)
        x = F.batch_norm(x, *running, self.weight, self.bias, self.training, self.momentum, self.eps)
        return F.relu(x)


class SqueezeExcite(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.reduce = nn.Conv2d(width, 2, 1)
        self.expand = nn.Conv2d(2, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(self.expand(F.silu(self.reduce(x.mean((2, 3), keepdim=True)))))


class Inverted(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.expand = nn.Conv2d(width, 2 * width, 1, bias=False)
        self.bn1 = NormAct(2 * width)
        self.depthwise = nn.Conv2d(2 * width, 2 * width, 3, 1, 1, groups=2 * width, bias=False)
        self.bn2 = FunctionalNormAct(2 * width)
        self.se = SqueezeExcite(2 * width)
        self.project = nn.Conv2d(2 * width, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.project(self.se(self.bn2(self.depthwise(self.bn1(self.expand(x))))))


class EfficientNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, 1, 1)
        self.blocks = nn.Sequential(Inverted(4), Inverted(4))
        self.head = nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


@entry()
def batch_norm_subclasses() -> Job:
    """Subclasses of BatchNorm with an activation, a parameter and a forward of their own; squeeze and excitation."""
    return make_job(EfficientNet, images)


class StandardConv(nn.Conv2d):
    """As in timm's ResNetV2: the weight is standardised by F.batch_norm, which sees no sample."""

    def forward(self, x: Tensor) -> Tensor:
        rows = self.weight.reshape(1, self.out_channels, -1)
        weight = F.batch_norm(rows, None, None, training=True, momentum=0.0, eps=1e-5).reshape_as(self.weight)
        return F.conv2d(x, weight, self.bias, self.stride, self.padding, self.dilation, self.groups)


def weight_standardised_model() -> nn.Module:
    layers: list[nn.Module] = [StandardConv(3, 4, 3, padding=1)]
    for _ in range(3):
        layers += [nn.GroupNorm(2, 4), nn.ReLU(), StandardConv(4, 4, 3, padding=1)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, CLASSES))


@entry()
def weight_standardised() -> Job:
    """Weight standardisation through F.batch_norm over a weight."""
    return make_job(weight_standardised_model, images)


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down1 = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.GroupNorm(1, 4), nn.ReLU())
        self.down2 = nn.Sequential(nn.Conv2d(4, 8, 3, padding=1), nn.GroupNorm(1, 8), nn.ReLU())
        self.middle = nn.Conv2d(8, 8, 3, padding=1)
        self.up2 = nn.ConvTranspose2d(8, 4, 2, stride=2)
        self.merge = nn.Conv2d(12, 4, 3, padding=1)
        self.out = nn.Conv2d(8, CLASSES, 1)

    def forward(self, x: Tensor) -> Tensor:
        a = self.down1(x)
        b = self.down2(F.max_pool2d(a, 2))
        c = self.middle(F.max_pool2d(b, 2))
        up = F.interpolate(self.up2(c), scale_factor=1.0)
        up = F.interpolate(self.merge(torch.cat([up, b], 1)), scale_factor=2, mode="bilinear", align_corners=False)
        return self.out(torch.cat([up, a], 1))


def pixel_loss(output: Tensor, batch: Any) -> tuple[Tensor, int]:
    target = batch["x"].argmax(1)
    return F.cross_entropy(output, target, reduction="sum"), target.numel()


@entry()
def unet() -> Job:
    """A U-Net: skip connections over all stages, a loss of every pixel."""
    return make_job(UNet, images, loss=pixel_loss)


class Vit(nn.Module):
    """With a class token, registers and a learnt position, all of them parameters of the model itself."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, 6, 4, stride=4)
        self.token = nn.Parameter(torch.zeros(1, 1, 6))
        self.registers = nn.Parameter(torch.randn(1, 2, 6) * 0.02)
        self.position = nn.Parameter(torch.empty(1, 5, 6))
        nn.init.trunc_normal_(self.position, std=0.02)
        self.blocks = nn.Sequential(*(Block(6) for _ in range(4)))
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        y = self.patch(x).flatten(2).transpose(1, 2)
        y = torch.cat([self.token.expand(len(y), -1, -1), y], 1) + self.position
        y = torch.cat([y[:, :1], self.registers.expand(len(y), -1, -1), y[:, 1:]], 1)
        return self.head(self.norm(self.blocks(y))[:, 0])


@entry()
def vit_registers() -> Job:
    """A ViT with a class token, registers and positions as parameters of the model itself."""
    return make_job(Vit, images)


class WindowAttention(nn.Module):
    """As in Swin: heads by reshape, a table of relative biases, an index buffer."""

    def __init__(self, width: int = 8, heads: int = 2, window: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.bias = nn.Parameter(torch.randn(2 * window - 1, heads) * 0.1)
        place = torch.arange(window)
        self.register_buffer("index", place[:, None] - place[None] + window - 1, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        b, n, c = x.shape
        q, k, v = self.qkv(self.norm(x)).reshape(b, n, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        scores = q @ k.transpose(-1, -2) * (c // self.heads) ** -0.5
        scores = scores + self.bias[self.index.view(-1)].view(n, n, -1).permute(2, 0, 1)
        return x + self.proj((scores.softmax(-1) @ v).transpose(1, 2).reshape(b, n, c))


class Swin(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, 8, 4, stride=4)
        self.blocks = nn.ModuleList(WindowAttention() for _ in range(4))
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        y = self.patch(x).flatten(2).transpose(1, 2)
        for number, block in enumerate(self.blocks):
            y = block(torch.roll(y, number, 1))
        return self.head(y.mean(1))


@entry()
def swin_bias() -> Job:
    """Windows, rolled inputs and a table of relative biases, indexed by a buffer."""
    return make_job(Swin, images)


class ConvNextBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1, groups=width)
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.gamma = nn.Parameter(1e-1 * torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.conv(x).permute(0, 2, 3, 1))
        return x + (self.gamma * self.down(F.gelu(self.up(y)))).permute(0, 3, 1, 2)


class ConvNext(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 2, stride=2)
        self.blocks = nn.Sequential(*(ConvNextBlock(4) for _ in range(4)))
        self.head = nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(x.to(memory_format=torch.channels_last))).mean((2, 3)))


@entry()
def convnext() -> Job:
    """Depthwise convolutions, layer scale, channels_last."""
    return make_job(ConvNext, images)
