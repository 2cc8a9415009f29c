"""Plain PyTorch models of the second round: kinds that neither the first round nor the project's tests have."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class DenseLayer(nn.Module):
    def __init__(self, channels: int, growth: int) -> None:
        super().__init__()
        self.squeeze = nn.Sequential(
            nn.BatchNorm2d(channels), nn.ReLU(inplace=True), nn.Conv2d(channels, 4 * growth, 1, bias=False)
        )
        self.spread = nn.Sequential(
            nn.BatchNorm2d(4 * growth), nn.ReLU(inplace=True), nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False)
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat((x, self.spread(self.squeeze(x))), dim=1)


class DenseNet(nn.Module):
    """Images by convolutions, each of which reads the results of all before it."""

    def __init__(self, growth: int, depths: tuple[int, ...]) -> None:
        super().__init__()
        channels = 2 * growth
        parts: list[nn.Module] = [
            nn.Conv2d(3, channels, 7, stride=2, padding=3, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, stride=2, padding=1),
        ]
        for place, depth in enumerate(depths):
            parts += [DenseLayer(channels + layer * growth, growth) for layer in range(depth)]
            channels += depth * growth
            parts += [nn.BatchNorm2d(channels), nn.ReLU(inplace=True)]
            if place + 1 < len(depths):
                parts += [nn.Conv2d(channels, channels // 2, 1, bias=False), nn.AvgPool2d(2)]
                channels //= 2
        self.features, self.head = nn.Sequential(*parts), nn.Linear(channels, 1000)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.features(images).mean(dim=(2, 3)))


class GatedConvolution(nn.Module):
    """A causal dilated convolution with a gate; returns the way on and the part for the output."""

    def __init__(self, channels: int, skipped: int, dilation: int) -> None:
        super().__init__()
        self.before = dilation
        self.spread = nn.Conv1d(channels, 2 * channels, 2, dilation=dilation)
        self.mix, self.skip = nn.Conv1d(channels, channels, 1), nn.Conv1d(channels, skipped, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        value, gate = self.spread(F.pad(x, (self.before, 0))).chunk(2, dim=1)
        hidden = torch.tanh(value) * torch.sigmoid(gate)
        return x + self.mix(hidden), self.skip(hidden)


class WaveNet(nn.Module):
    """The next sample of a sound, one of 256 levels, from all samples before it."""

    def __init__(self, channels: int, skipped: int, stacks: int, depth: int) -> None:
        super().__init__()
        self.levels = nn.Embedding(256, channels)
        self.layers = nn.ModuleList(
            GatedConvolution(channels, skipped, 2**layer) for _ in range(stacks) for layer in range(depth)
        )
        self.head = nn.Sequential(nn.ReLU(), nn.Conv1d(skipped, skipped, 1), nn.ReLU(), nn.Conv1d(skipped, 256, 1))

    def forward(self, sound: Tensor) -> Tensor:
        x = self.levels(sound).transpose(1, 2)
        total: Tensor | float = 0.0
        for layer in self.layers:
            x, skipped = layer(x)
            total = total + skipped
        return self.head(total).transpose(1, 2)


class VolumeUnit(nn.Module):
    def __init__(self, inner: int, outer: int) -> None:
        super().__init__()
        parts: list[nn.Module] = []
        for channels in (inner, outer):
            parts += [nn.Conv3d(channels, outer, 3, padding=1), nn.InstanceNorm3d(outer, affine=True), nn.LeakyReLU()]
        self.parts = nn.Sequential(*parts)

    def forward(self, x: Tensor) -> Tensor:
        return self.parts(x)


class VolumeNet(nn.Module):
    """A label for each voxel of a scan: down to coarse grids and up again, joined at each size."""

    def __init__(self, width: int, depth: int, labels: int) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(depth)]
        self.down = nn.ModuleList(VolumeUnit(a, b) for a, b in zip([1, *widths], widths, strict=False))
        self.up = nn.ModuleList(nn.ConvTranspose3d(2 * w, w, 2, stride=2) for w in reversed(widths[:-1]))
        self.join = nn.ModuleList(VolumeUnit(2 * w, w) for w in reversed(widths[:-1]))
        self.head = nn.Conv3d(width, labels, 1)

    def forward(self, scan: Tensor) -> Tensor:
        x, kept = scan, []
        for level, unit in enumerate(self.down):
            x = unit(F.max_pool3d(x, 2) if level else x)
            kept.append(x)
        kept.pop()
        for up, join in zip(self.up, self.join, strict=True):
            x = join(torch.cat((up(x), kept.pop()), dim=1))
        return self.head(x)


class SpeechRecognizer(nn.Module):
    """Letters from a spectrogram: convolutions of two dimensions, then recurrent layers in both directions."""

    def __init__(self, width: int, layers: int, letters: int) -> None:
        super().__init__()
        self.convolutions = nn.Sequential(
            nn.Conv2d(1, 32, (41, 11), stride=(2, 2), padding=(20, 5), bias=False),
            nn.BatchNorm2d(32),
            nn.Hardtanh(0, 20),
            nn.Conv2d(32, 32, (21, 11), stride=(2, 1), padding=(10, 5), bias=False),
            nn.BatchNorm2d(32),
            nn.Hardtanh(0, 20),
        )
        self.recurrent = nn.GRU(32 * 40, width, layers, batch_first=True, bidirectional=True)
        self.head = nn.Linear(2 * width, letters)

    def forward(self, spectrogram: Tensor) -> Tensor:
        hidden = self.convolutions(spectrogram.unsqueeze(1)).flatten(1, 2).transpose(1, 2)
        return self.head(self.recurrent(hidden)[0])


class MessageLayer(nn.Module):
    """Messages along edges, summed at the nodes that they reach."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.message = nn.Sequential(nn.Linear(3 * width, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU())
        self.update = nn.Sequential(nn.Linear(2 * width, width), nn.SiLU(), nn.Linear(width, width))
        self.norm = nn.LayerNorm(width)

    def forward(self, nodes: Tensor, edges: Tensor, source: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        messages = self.message(torch.cat((nodes[source], nodes[target], edges), dim=-1))
        received = torch.zeros_like(nodes).index_add_(0, target, messages.to(nodes.dtype))
        return self.norm(nodes + self.update(torch.cat((nodes, received), dim=-1))), edges + messages


class MoleculeNet(nn.Module):
    """A property of each molecule, from its atoms and its bonds."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.atoms, self.bonds = nn.Embedding(119, width), nn.Linear(16, width)
        self.layers = nn.ModuleList(MessageLayer(width) for _ in range(depth))
        self.head = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 1))

    def forward(self, atoms: Tensor, ends: Tensor, bonds: Tensor) -> Tensor:
        molecules, count = atoms.shape
        first = count * torch.arange(molecules, device=atoms.device)[:, None]
        source, target = (ends[:, end] + first for end in range(2))
        nodes, edges = self.atoms(atoms).flatten(0, 1), self.bonds(bonds).flatten(0, 1)
        for layer in self.layers:
            nodes, edges = layer(nodes, edges, source.flatten(), target.flatten())
        return self.head(nodes).unflatten(0, (molecules, count)).sum(dim=(1, 2))


class ResidualUnit(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        parts: list[nn.Module] = []
        for _ in range(2):
            parts += [nn.GroupNorm(32, channels), nn.SiLU(), nn.Conv2d(channels, channels, 3, padding=1)]
        self.parts = nn.Sequential(*parts)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.parts(x)


class QuantizedAutoencoder(nn.Module):
    """Images to codes of a codebook and back; the gradient passes the codebook straight through."""

    def __init__(self, width: int, codes: int, levels: int = 3) -> None:
        super().__init__()
        down: list[nn.Module] = [nn.Conv2d(3, width, 3, padding=1)]
        up: list[nn.Module] = []
        for level in range(levels):
            channels = width * 2**level
            down += [ResidualUnit(channels), nn.Conv2d(channels, 2 * channels, 4, stride=2, padding=1)]
            back = nn.Sequential(nn.Upsample(scale_factor=2), nn.Conv2d(2 * channels, channels, 3, padding=1))
            up = [back, ResidualUnit(channels), *up]
        channels = width * 2**levels
        self.down = nn.Sequential(*down, ResidualUnit(channels), nn.Conv2d(channels, 256, 1))
        self.codebook = nn.Embedding(codes, 256)
        self.up = nn.Sequential(nn.Conv2d(256, channels, 1), *up, nn.Conv2d(width, 3, 3, padding=1))

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        code = self.down(images).permute(0, 2, 3, 1)
        nearest = torch.cdist(code.flatten(0, 2).float(), self.codebook.weight.float()).argmin(dim=1)
        chosen = self.codebook(nearest).view_as(code)
        apart = F.mse_loss(chosen.float(), code.detach().float()) + F.mse_loss(code.float(), chosen.detach().float())
        return self.up((code + (chosen - code).detach()).permute(0, 3, 1, 2)), apart


class SpectralLayer(nn.Module):
    """A product over the lowest frequencies beside a product at each place."""

    def __init__(self, width: int, modes: int) -> None:
        super().__init__()
        self.modes = modes
        self.weights = nn.ParameterList(
            nn.Parameter(torch.randn(width, width, modes, modes, 2) / width) for _ in range(2)
        )
        self.around = nn.Conv2d(width, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        spectrum, modes = torch.fft.rfft2(x), self.modes
        low, high = (torch.view_as_complex(weight) for weight in self.weights)
        mixed = torch.zeros_like(spectrum)
        mixed[:, :, :modes, :modes] = torch.einsum("bixy,ioxy->boxy", spectrum[:, :, :modes, :modes], low)
        mixed[:, :, -modes:, :modes] = torch.einsum("bixy,ioxy->boxy", spectrum[:, :, -modes:, :modes], high)
        return F.gelu(torch.fft.irfft2(mixed, s=x.shape[-2:]) + self.around(x))


class FourierOperator(nn.Module):
    """The next state of a field on a grid, by products over its frequencies."""

    def __init__(self, width: int, modes: int, depth: int) -> None:
        super().__init__()
        self.lift, self.head = nn.Conv2d(1, width, 1), nn.Conv2d(width, 1, 1)
        self.layers = nn.Sequential(*(SpectralLayer(width, modes) for _ in range(depth)))

    def forward(self, field: Tensor) -> Tensor:
        return self.head(self.layers(self.lift(field)))


class PointNet(nn.Module):
    """The class of each point of a cloud, from the point and from the largest features of all."""

    def __init__(self, width: int, labels: int) -> None:
        super().__init__()
        self.local = self._stack(3, width, 2 * width, 4 * width)
        self.whole = self._stack(4 * width, 8 * width, 16 * width)
        self.head = nn.Sequential(self._stack(20 * width, 8 * width, 4 * width), nn.Conv1d(4 * width, labels, 1))

    @staticmethod
    def _stack(inner: int, *widths: int) -> nn.Sequential:
        parts: list[nn.Module] = []
        for outer in widths:
            parts += [nn.Conv1d(inner, outer, 1), nn.BatchNorm1d(outer), nn.ReLU()]
            inner = outer
        return nn.Sequential(*parts)

    def forward(self, points: Tensor) -> Tensor:
        local = self.local(points)
        whole = self.whole(local).amax(dim=2, keepdim=True).expand(-1, -1, points.shape[2])
        return self.head(torch.cat((local, whole), dim=1)).transpose(1, 2)


class Sharpener(nn.Module):
    """Four times as many pixels a side, by plain convolutions and shuffles."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, width, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.ReLU(), nn.Conv2d(width, width, 3, padding=1))
            for _ in range(depth)
        )
        enlarge = [part for _ in range(2) for part in (nn.Conv2d(width, 4 * width, 3, padding=1), nn.PixelShuffle(2))]
        self.enlarge = nn.Sequential(*enlarge, nn.Conv2d(width, 3, 3, padding=1))

    def forward(self, images: Tensor) -> Tensor:
        first = x = self.first(images)
        for block in self.blocks:
            x = x + 0.1 * block(x)
        return self.enlarge(first + x)


class RadianceField(nn.Module):
    """Colours of rays: density and colour at points along each, summed by what light gets through."""

    def __init__(self, width: int, depth: int, points: int, waves: int = 10) -> None:
        super().__init__()
        self.points = points
        encoded = 3 + 6 * waves
        self.first = nn.Sequential(nn.Linear(encoded, width), nn.ReLU())
        self.early, self.late = (
            nn.Sequential(*(part for _ in range(depth // 2) for part in (nn.Linear(width, width), nn.ReLU())))
            for _ in range(2)
        )
        self.again = nn.Linear(width + encoded, width)
        self.density, self.colour = nn.Linear(width, 1), nn.Linear(width, 3)
        self.register_buffer("scales", math.pi * 2.0 ** torch.arange(waves), persistent=False)

    def forward(self, origins: Tensor, directions: Tensor) -> Tensor:
        depths = torch.linspace(2.0, 6.0, self.points, device=origins.device)
        places = origins[:, None] + directions[:, None] * depths[:, None]
        waves = (places[..., None, :] * self.scales[:, None]).flatten(-2)
        encoded = torch.cat((places, waves.sin(), waves.cos()), dim=-1)
        hidden = self.late(F.relu(self.again(torch.cat((self.early(self.first(encoded)), encoded), dim=-1))))
        opaque = 1 - torch.exp(-F.relu(self.density(hidden).squeeze(-1).float()) * (4.0 / self.points))
        through = torch.cumprod(1 - opaque + 1e-10, dim=1)
        shares = opaque * torch.cat((torch.ones_like(through[:, :1]), through[:, :-1]), dim=1)
        return (shares[..., None] * torch.sigmoid(self.colour(hidden))).sum(dim=1)


class StreamPart(nn.Module):
    """One of two streams of a joint block: its own norms and products. `read_only`: nothing is added to it."""

    def __init__(self, width: int, read_only: bool = False) -> None:
        super().__init__()
        self.read_only = read_only
        self.norms = nn.ModuleList(nn.LayerNorm(width, elementwise_affine=False) for _ in range(2))
        self.condition = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))
        self.qkv = nn.Linear(width, 3 * width)
        if read_only:
            return
        self.out = nn.Linear(width, width)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width))


class JointBlock(nn.Module):
    """Attention over text and image at once, each with weights of its own."""

    def __init__(self, width: int, heads: int, last: bool) -> None:
        super().__init__()
        self.heads = heads
        self.image, self.text = StreamPart(width), StreamPart(width, read_only=last)
        self.query_norm, self.key_norm = nn.RMSNorm(width // heads), nn.RMSNorm(width // heads)

    def forward(self, image: Tensor, text: Tensor, condition: Tensor) -> tuple[Tensor, Tensor]:
        streams = ((self.image, image), (self.text, text))
        scales = [part.condition(condition)[:, None].chunk(6, dim=-1) for part, _ in streams]
        products = [
            part.qkv(part.norms[0](x) * (1 + scale[1]) + scale[0])
            for (part, x), scale in zip(streams, scales, strict=True)
        ]
        joined = torch.cat(products, dim=1).unflatten(-1, (3, self.heads, -1))
        q, k, v = (part.transpose(1, 2) for part in joined.unbind(2))
        mixed = F.scaled_dot_product_attention(self.query_norm(q), self.key_norm(k), v).transpose(1, 2).flatten(2)
        results = []
        parts = mixed.split((image.shape[1], text.shape[1]), dim=1)
        for (part, x), scale, attended in zip(streams, scales, parts, strict=True):
            if part.read_only:
                results.append(x)
                continue
            x = x + scale[2] * part.out(attended)
            results.append(x + scale[5] * part.feed(part.norms[1](x) * (1 + scale[4]) + scale[3]))
        return results[0], results[1]


class TextToImage(nn.Module):
    """The velocity of latent images on their way from noise, given embedded text."""

    def __init__(self, width: int, depth: int, heads: int, channels: int = 16, side: int = 64) -> None:
        super().__init__()
        self.side = side // 2
        self.patches, self.words = nn.Conv2d(channels, width, 2, stride=2), nn.Linear(2048, width)
        self.places = nn.Parameter(torch.randn(1, self.side**2, width) * 0.02)
        self.time = nn.Sequential(nn.Linear(256, width), nn.SiLU(), nn.Linear(width, width))
        self.blocks = nn.ModuleList(JointBlock(width, heads, last=layer == depth - 1) for layer in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 4 * channels)

    def forward(self, latent: Tensor, text: Tensor, time: Tensor) -> Tensor:
        image, words = self.patches(latent).flatten(2).transpose(1, 2) + self.places, self.words(text)
        waves = 1000 * time[:, None] * torch.exp(-torch.arange(128, device=time.device) * (9.21 / 128))
        condition = self.time(torch.cat((waves.cos(), waves.sin()), dim=-1))
        for block in self.blocks:
            image, words = block(image, words, condition)
        pixels = self.head(self.norm(image)).transpose(1, 2).unflatten(2, (self.side, self.side))
        return F.pixel_shuffle(pixels, 2)
