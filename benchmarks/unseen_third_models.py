"""Plain PyTorch models of the third round: kinds that neither the first two rounds nor the project's tests have."""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Translator(nn.Module):
    """A recurrent encoder and decoder with attention between them."""

    def __init__(self, vocabulary: int, width: int, layers: int) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(vocabulary, width), nn.Embedding(vocabulary, width)
        self.encoder = nn.LSTM(width, width, layers, batch_first=True)
        self.decoder = nn.LSTM(width, width, layers, batch_first=True)
        self.ask = nn.Linear(width, width, bias=False)
        self.mix, self.head = nn.Linear(2 * width, width), nn.Linear(width, vocabulary)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        known, state = self.encoder(self.source(source))
        told, _ = self.decoder(self.target(target), state)
        weights = (self.ask(told) @ known.transpose(1, 2)).softmax(dim=-1)
        return self.head(torch.tanh(self.mix(torch.cat((weights @ known, told), dim=-1))))


class DiagonalLayer(nn.Module):
    """A diagonal state space model, applied as one long convolution."""

    def __init__(self, width: int, states: int) -> None:
        super().__init__()
        self.norm, self.step = nn.LayerNorm(width), nn.Parameter(torch.rand(width) * 4 - 7)
        self.decay = nn.Parameter(torch.full((width, states), -0.7))
        self.turn = nn.Parameter(torch.arange(states).repeat(width, 1) * 3.14)
        self.read = nn.Parameter(torch.randn(width, states, 2) * 0.7)
        self.direct, self.mix = nn.Parameter(torch.ones(width)), nn.Linear(width, 2 * width)

    def kernel(self, length: int) -> Tensor:
        rate = torch.complex(-self.decay.exp(), self.turn) * self.step.exp()[:, None]
        powers = (rate[..., None] * torch.arange(length, device=rate.device)).exp()
        weights = torch.view_as_complex(self.read) * (rate.exp() - 1) / rate
        return 2 * torch.einsum("ws,wsl->wl", weights, powers).real

    def forward(self, x: Tensor) -> Tensor:
        length, before = x.shape[1], self.norm(x).transpose(1, 2)
        spectrum = torch.fft.rfft(before.float(), n=2 * length) * torch.fft.rfft(self.kernel(length), n=2 * length)
        found = torch.fft.irfft(spectrum, n=2 * length)[..., :length] + before * self.direct[:, None]
        return x + F.glu(self.mix(F.gelu(found.to(x.dtype).transpose(1, 2))))


class LongMemory(nn.Module):
    """Classes of long sequences by layers of state spaces."""

    def __init__(self, width: int, depth: int, states: int, labels: int) -> None:
        super().__init__()
        self.begin, self.head = nn.Linear(1, width), nn.Linear(width, labels)
        self.layers = nn.Sequential(*(DiagonalLayer(width, states) for _ in range(depth)))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(self.begin(x)).mean(dim=1))


class GraphAttention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.value = heads, nn.Linear(width, width)
        self.sender, self.receiver = nn.Linear(width, heads), nn.Linear(width, heads)
        self.norm = nn.LayerNorm(width)

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        value = self.value(nodes).unflatten(-1, (self.heads, -1))
        sender, receiver = edges.unbind(0)
        score = F.leaky_relu(self.sender(nodes)[sender] + self.receiver(nodes)[receiver], 0.2).float().exp()
        total = torch.zeros(len(nodes), self.heads, device=nodes.device).index_add(0, receiver, score)
        weight = (score / total[receiver].clamp_min(1e-6)).to(value.dtype)
        sums = torch.zeros_like(value).index_add(0, receiver, value[sender] * weight[..., None])
        return nodes + F.elu(self.norm(sums.flatten(1)))


class Citations(nn.Module):
    """Classes of a graph's nodes. Graphs of a batch have equally many nodes and edges."""

    def __init__(self, features: int, width: int, depth: int, labels: int) -> None:
        super().__init__()
        self.begin, self.head = nn.Linear(features, width), nn.Linear(width, labels)
        self.layers = nn.ModuleList(GraphAttention(width, 8) for _ in range(depth))

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        graphs, count = nodes.shape[:2]
        first = torch.arange(graphs, device=edges.device)[:, None, None] * count
        joined = (edges + first).permute(1, 0, 2).flatten(1)
        x = self.begin(nodes.flatten(0, 1))
        for layer in self.layers:
            x = layer(x, joined)
        return self.head(x).unflatten(0, (graphs, count))


class Demixer(nn.Module):
    """Sounds apart: strided convolutions in time, a recurrent layer, and transposed convolutions back."""

    def __init__(self, width: int, depth: int, sources: int) -> None:
        super().__init__()
        sizes = [2, *(width * 2**level for level in range(depth))]
        self.down = nn.ModuleList(
            nn.Sequential(nn.Conv1d(a, b, 8, 4, 2), nn.ReLU(), nn.Conv1d(b, 2 * b, 1), nn.GLU(dim=1))
            for a, b in pairwise(sizes)
        )
        self.between = nn.LSTM(sizes[-1], sizes[-1] // 2, 2, bidirectional=True, batch_first=True)
        self.up = nn.ModuleList(
            nn.Sequential(
                nn.Conv1d(b, 2 * b, 3, padding=1),
                nn.GLU(dim=1),
                nn.ConvTranspose1d(b, sources * 2 if a == 2 else a, 8, 4, 2),
            )
            for a, b in reversed(list(pairwise(sizes)))
        )

    def forward(self, sound: Tensor) -> Tensor:
        kept, x = [], sound
        for level in self.down:
            x = level(x)
            kept.append(x)
        x = self.between(x.transpose(1, 2))[0].transpose(1, 2)
        for level in self.up:
            x = level(x + kept.pop())
        return x.unflatten(1, (-1, 2))


class ResidualNorm(nn.Module):
    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.GroupNorm(32, before), nn.SiLU(), nn.Conv2d(before, after, 3, padding=1))
        self.second = nn.Sequential(nn.GroupNorm(32, after), nn.SiLU(), nn.Conv2d(after, after, 3, padding=1))
        self.aside = nn.Identity() if before == after else nn.Conv2d(before, after, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.aside(x) + self.second(self.first(x))


class LatentAutoencoder(nn.Module):
    """Images to a small grid of Gaussians and back."""

    def __init__(self, width: int, levels: tuple[int, ...], latent: int) -> None:
        super().__init__()
        sizes = [width * level for level in levels]
        down: list[nn.Module] = [nn.Conv2d(3, sizes[0], 3, padding=1)]
        for before, after in zip(sizes, [*sizes[1:], sizes[-1]], strict=True):
            down += [ResidualNorm(before, before), ResidualNorm(before, after), nn.Conv2d(after, after, 3, 2, 1)]
        self.down = nn.Sequential(*down, nn.GroupNorm(32, sizes[-1]), nn.SiLU(), nn.Conv2d(sizes[-1], 2 * latent, 1))
        up: list[nn.Module] = [nn.Conv2d(latent, sizes[-1], 3, padding=1)]
        for before, after in zip(sizes[::-1], [*sizes[-2::-1], sizes[0]], strict=True):
            up += [ResidualNorm(before, after), nn.Upsample(scale_factor=2), nn.Conv2d(after, after, 3, padding=1)]
        self.up = nn.Sequential(*up, nn.GroupNorm(32, sizes[0]), nn.SiLU(), nn.Conv2d(sizes[0], 3, 3, padding=1))

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        mean, log = self.down(images).chunk(2, dim=1)
        apart = (mean.square() + log.exp() - 1 - log).mean()
        return self.up(mean + torch.randn_like(mean) * (0.5 * log).exp()), apart


class TableTransformer(nn.Module):
    """Rows of a table: every column is a token."""

    def __init__(self, numbers: int, sizes: tuple[int, ...], width: int, depth: int) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.randn(numbers, width)), nn.Parameter(torch.randn(numbers, width))
        self.kinds = nn.ModuleList(nn.Embedding(size, width) for size in sizes)
        self.summary = nn.Parameter(torch.randn(1, 1, width))
        layer = nn.TransformerEncoderLayer(width, 8, 4 * width, dropout=0.1, batch_first=True, norm_first=True)
        self.body, self.head = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False), nn.Linear(width, 1)

    def forward(self, numbers: Tensor, kinds: Tensor) -> Tensor:
        read = numbers[..., None] * self.scale + self.shift
        looked = torch.stack([table(kind) for table, kind in zip(self.kinds, kinds.unbind(1), strict=True)], dim=1)
        whole = torch.cat((self.summary.expand(len(numbers), -1, -1), read, looked), dim=1)
        return self.head(self.body(whole)[:, 0]).squeeze(-1)


class Segments(nn.Module):
    """A class for each pixel: an encoder, dilated convolutions of several rates, and a decoder."""

    def __init__(self, width: int, labels: int, rates: tuple[int, ...] = (1, 6, 12, 18)) -> None:
        super().__init__()
        self.early = nn.Sequential(
            self._layer(3, width, 2), self._layer(width, width), self._layer(width, width * 2, 2)
        )
        deep = [self._layer(width * 2, width * 4, 2), *(self._layer(width * 4, width * 4) for _ in range(6))]
        self.late = nn.Sequential(*deep, self._layer(width * 4, width * 8, 2), self._layer(width * 8, width * 8))
        self.rates = nn.ModuleList(self._layer(width * 8, width * 2, rate=rate) for rate in rates)
        self.mix = self._layer(width * 2 * len(rates), width * 4)
        self.decode = nn.Sequential(self._layer(width * 6, width * 4), nn.Conv2d(width * 4, labels, 1))

    @staticmethod
    def _layer(before: int, after: int, stride: int = 1, rate: int = 1) -> nn.Module:
        convolution = nn.Conv2d(before, after, 3, stride, padding=rate, dilation=rate, bias=False)
        return nn.Sequential(convolution, nn.BatchNorm2d(after), nn.ReLU(inplace=True))

    def forward(self, images: Tensor) -> Tensor:
        early = self.early(images)
        late = self.late(early)
        mixed = self.mix(torch.cat([rate(late) for rate in self.rates], dim=1))
        near = F.interpolate(mixed, size=early.shape[-2:], mode="bilinear", align_corners=False)
        found = self.decode(torch.cat((near, early), dim=1))
        return F.interpolate(found, size=images.shape[-2:], mode="bilinear", align_corners=False)
