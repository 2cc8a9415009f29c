"""Plain PyTorch models of the sixth round: voices, images, clips, songs, words, weather, clicks, sales and games."""

from __future__ import annotations

import math
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def conv_norm(before: int, after: int, kernel: int, stride: int = 1, groups: int = 1) -> nn.Sequential:
    convolution = nn.Conv2d(before, after, kernel, stride, kernel // 2, groups=groups, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(after))


class LocationAttention(nn.Module):
    """Additive attention that also reads where it has attended before."""

    def __init__(self, query: int, memory: int, width: int = 128, filters: int = 32, kernel: int = 31) -> None:
        super().__init__()
        self.query, self.memory = nn.Linear(query, width, bias=False), nn.Linear(memory, width, bias=False)
        self.places = nn.Conv1d(2, filters, kernel, padding=kernel // 2, bias=False)
        self.place, self.score = nn.Linear(filters, width, bias=False), nn.Linear(width, 1, bias=False)

    def forward(self, query: Tensor, memory: Tensor, keys: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """`weights`: of the last step and their sum over all steps, as two channels."""
        places = self.place(self.places(weights).transpose(1, 2))
        scores = self.score(torch.tanh(self.query(query)[:, None] + keys + places)).squeeze(-1)
        found = scores.softmax(dim=-1)
        return torch.bmm(found[:, None], memory).squeeze(1), found


class Reader(nn.Module):
    """Spectrograms of read text: a recurrent decoder with attention, two frames a step, and convolutions after it."""

    def __init__(self, letters: int, bands: int = 80, width: int = 512, cell: int = 1024, each: int = 2) -> None:
        super().__init__()
        self.bands, self.each = bands, each
        self.letters = nn.Embedding(letters, width)
        self.convolutions = nn.Sequential(*(self._layer(width, width, nn.ReLU()) for _ in range(3)))
        self.encoder = nn.LSTM(width, width // 2, batch_first=True, bidirectional=True)
        self.before = nn.Sequential(
            *(nn.Linear(bands, 256), nn.ReLU(), nn.Dropout(0.5), nn.Linear(256, 256), nn.ReLU(), nn.Dropout(0.5))
        )
        self.attention_cell, self.attention = nn.LSTMCell(256 + width, cell), LocationAttention(cell, width)
        self.cell = nn.LSTMCell(cell + width, cell)
        self.frames, self.stop = nn.Linear(cell + width, each * bands), nn.Linear(cell + width, 1)
        self.after = nn.Sequential(
            self._layer(bands, width, nn.Tanh()),
            *(self._layer(width, width, nn.Tanh()) for _ in range(3)),
            self._layer(width, bands, nn.Identity()),
        )

    @staticmethod
    def _layer(before: int, after: int, activation: nn.Module) -> nn.Sequential:
        convolution = nn.Conv1d(before, after, 5, padding=2)
        return nn.Sequential(convolution, nn.BatchNorm1d(after), activation, nn.Dropout(0.5))

    def forward(self, letters: Tensor, spoken: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        memory, _ = self.encoder(self.convolutions(self.letters(letters).transpose(1, 2)).transpose(1, 2))
        keys = self.attention.memory(memory)
        last = F.pad(spoken[:, self.each - 1 : -1 : self.each], (0, 0, 1, 0))
        heard = self.before(last)
        batch, length, width = memory.shape
        context = memory.new_zeros(batch, width)
        looking = tuple(memory.new_zeros(2, batch, self.cell.hidden_size).unbind(0))
        state = tuple(memory.new_zeros(2, batch, self.cell.hidden_size).unbind(0))
        weights = total = memory.new_zeros(batch, length)
        outputs = []
        for frame in heard.unbind(1):
            looking = self.attention_cell(torch.cat((frame, context), dim=-1), looking)
            seen = torch.stack((weights, total), dim=1)
            context, weights = self.attention(looking[0], memory, keys, seen)
            total = total + weights
            state = self.cell(torch.cat((looking[0], context), dim=-1), state)
            outputs.append(torch.cat((state[0], context), dim=-1))
        steps = torch.stack(outputs, dim=1)
        rough = self.frames(steps).unflatten(-1, (self.each, self.bands)).flatten(1, 2)
        return rough, rough + self.after(rough.transpose(1, 2)).transpose(1, 2), self.stop(steps).squeeze(-1)


def waves(times: Tensor, width: int) -> Tensor:
    """Cosines and sines of times in geometric frequencies."""
    rates = torch.exp(torch.arange(width // 2, device=times.device) * (-math.log(10000) / (width // 2)))
    angles = times.float()[:, None] * rates
    return torch.cat((angles.cos(), angles.sin()), dim=-1)


class TimedConvolutions(nn.Module):
    """Two convolutions after group norms, with the time added between them."""

    def __init__(self, before: int, after: int, time: int) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.GroupNorm(32, before), nn.SiLU(), nn.Conv2d(before, after, 3, padding=1))
        self.time = nn.Sequential(nn.SiLU(), nn.Linear(time, after))
        self.second = nn.Sequential(nn.GroupNorm(32, after), nn.SiLU(), nn.Conv2d(after, after, 3, padding=1))
        self.around = nn.Conv2d(before, after, 1) if before != after else nn.Identity()

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        return self.around(x) + self.second(self.first(x) + self.time(time)[:, :, None, None])


class CrossAttention(nn.Module):
    def __init__(self, width: int, context: int, heads: int) -> None:
        super().__init__()
        self.heads, self.query = heads, nn.Linear(width, width, bias=False)
        self.key, self.value = nn.Linear(context, width, bias=False), nn.Linear(context, width, bias=False)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in (self.query(x), self.key(context), self.value(context))
        )
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class PictureTransformer(nn.Module):
    """Attention of pixels to pixels and to the text, and a gated feed-forward part."""

    def __init__(self, width: int, context: int) -> None:
        super().__init__()
        self.group, self.into, self.out = nn.GroupNorm(32, width), nn.Linear(width, width), nn.Linear(width, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))
        self.pixels = CrossAttention(width, width, width // 64)
        self.text = CrossAttention(width, context, width // 64)
        self.gated, self.down = nn.Linear(width, 8 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor, text: Tensor) -> Tensor:
        inner = self.into(self.group(x).flatten(2).transpose(1, 2))
        normed = self.norms[0](inner)
        inner = inner + self.pixels(normed, normed)
        inner = inner + self.text(self.norms[1](inner), text)
        value, gate = self.gated(self.norms[2](inner)).chunk(2, dim=-1)
        inner = inner + self.down(value * F.gelu(gate))
        return x + self.out(inner).transpose(1, 2).unflatten(2, x.shape[2:])


class PainterLevel(nn.Module):
    """Convolutions that know the time, each followed by attention where `context` is given."""

    def __init__(self, sizes: list[tuple[int, int]], time: int, context: int | None) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList(TimedConvolutions(before, after, time) for before, after in sizes)
        self.attentions = nn.ModuleList(PictureTransformer(after, context) for _, after in sizes if context is not None)

    def step(self, place: int, x: Tensor, time: Tensor, text: Tensor) -> Tensor:
        x = self.convolutions[place](x, time)
        return self.attentions[place](x, text) if self.attentions else x


class Painter(nn.Module):
    """The noise in latent pictures, given a text: a U-Net with cross-attention at its coarser sizes."""

    def __init__(self, width: int = 256, rates: tuple[int, ...] = (1, 2, 4), depth: int = 2, text: int = 768) -> None:
        super().__init__()
        self.width, time = width, 4 * width
        self.time = nn.Sequential(nn.Linear(width, time), nn.SiLU(), nn.Linear(time, time))
        sizes = [width * rate for rate in rates]
        contexts = [None, *[text] * (len(rates) - 1)]
        self.begin = nn.Conv2d(4, width, 3, padding=1)
        self.down, self.smaller, kept = nn.ModuleList(), nn.ModuleList(), [width]
        for (before, after), context in zip(pairwise((width, *sizes)), contexts, strict=True):
            self.down.append(PainterLevel([(before, after), *[(after, after)] * (depth - 1)], time, context))
            kept += [after] * depth
            if len(self.down) < len(sizes):
                self.smaller.append(nn.Conv2d(after, after, 3, 2, 1))
                kept.append(after)
        wide = sizes[-1]
        self.middle = nn.ModuleList(TimedConvolutions(wide, wide, time) for _ in range(2))
        self.middle_attention = PictureTransformer(wide, text)
        self.up, self.larger, inside = nn.ModuleList(), nn.ModuleList(), wide
        for size, context in zip(reversed(sizes), reversed(contexts), strict=True):
            steps = []
            for _ in range(depth + 1):
                steps.append((inside + kept.pop(), size))
                inside = size
            self.up.append(PainterLevel(steps, time, context))
            if len(self.up) < len(sizes):
                self.larger.append(nn.Conv2d(size, size, 3, padding=1))
        self.end = nn.Sequential(nn.GroupNorm(32, width), nn.SiLU(), nn.Conv2d(width, 4, 3, padding=1))

    def forward(self, latents: Tensor, times: Tensor, text: Tensor) -> Tensor:
        time = self.time(waves(times, self.width).to(latents.dtype))
        x = self.begin(latents)
        kept = [x]
        for place, level in enumerate(self.down):
            for step in range(len(level.convolutions)):
                x = level.step(step, x, time, text)
                kept.append(x)
            if place < len(self.smaller):
                x = self.smaller[place](x)
                kept.append(x)
        x = self.middle[1](self.middle_attention(self.middle[0](x, time), text), time)
        for place, level in enumerate(self.up):
            for step in range(len(level.convolutions)):
                x = level.step(step, torch.cat((x, kept.pop()), dim=1), time, text)
            if place < len(self.larger):
                x = self.larger[place](F.interpolate(x, scale_factor=2.0, mode="nearest"))
        return self.end(x)


class PlainResidual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = conv_norm(width, width, 3), conv_norm(width, width, 3)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.second(F.relu(self.first(x))))


class Resolutions(nn.Module):
    """Residual units at several resolutions side by side; then the finest `kept` ones each become a sum of all."""

    def __init__(self, widths: tuple[int, ...], kept: int, depth: int = 4) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Sequential(*(PlainResidual(width) for _ in range(depth))) for width in widths)
        self.links = nn.ModuleList(
            nn.ModuleList(self._link(widths, source, target) for source in range(len(widths))) for target in range(kept)
        )

    @staticmethod
    def _link(widths: tuple[int, ...], source: int, target: int) -> nn.Module:
        if source == target:
            return nn.Identity()
        if source > target:
            rate = 2.0 ** (source - target)
            return nn.Sequential(conv_norm(widths[source], widths[target], 1), nn.Upsample(scale_factor=rate))
        layers: list[nn.Module] = []
        for _ in range(target - source - 1):
            layers += [conv_norm(widths[source], widths[source], 3, 2), nn.ReLU(inplace=True)]
        return nn.Sequential(*layers, conv_norm(widths[source], widths[target], 3, 2))

    def forward(self, streams: list[Tensor]) -> list[Tensor]:
        found = [branch(x) for branch, x in zip(self.branches, streams, strict=True)]
        return [F.relu(sum(link(x) for link, x in zip(links, found, strict=True))) for links in self.links]


class Poses(nn.Module):
    """A heat map for each joint of a person, by a network that keeps its fine resolution to the end."""

    def __init__(self, width: int = 48, joints: int = 17, modules: tuple[int, ...] = (1, 4, 3)) -> None:
        super().__init__()
        self.begin = nn.Sequential(
            *(conv_norm(3, 64, 3, 2), nn.ReLU(inplace=True), conv_norm(64, 64, 3, 2), nn.ReLU(inplace=True)),
            *(PlainResidual(64) for _ in range(4)),
        )
        self.widths = [tuple(width * 2**level for level in range(count)) for count in range(2, 2 + len(modules))]
        self.first = nn.Sequential(conv_norm(64, width, 3), nn.ReLU(inplace=True))
        befores = (64, *(widths[-1] for widths in self.widths[:-1]))
        self.opened = nn.ModuleList(
            nn.Sequential(conv_norm(before, widths[-1], 3, 2), nn.ReLU(inplace=True))
            for before, widths in zip(befores, self.widths, strict=True)
        )
        self.stages = nn.ModuleList(
            nn.ModuleList(Resolutions(widths, len(widths)) for _ in range(count))
            for widths, count in zip(self.widths, modules, strict=True)
        )
        self.stages[-1][-1] = Resolutions(self.widths[-1], kept=1)
        self.head = nn.Conv2d(width, joints, 1)

    def forward(self, images: Tensor) -> Tensor:
        x = self.begin(images)
        streams = [self.first(x), self.opened[0](x)]
        for place, stage in enumerate(self.stages):
            if place:
                streams = [*streams, self.opened[place](streams[-1])]
            for module in stage:
                streams = module(streams)
        return self.head(streams[0])


class ClipBottleneck(nn.Module):
    """Convolutions over time, over space and over channels, with a way around them."""

    def __init__(self, before: int, inner: int, after: int, time: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv3d(before, inner, (time, 1, 1), padding=(time // 2, 0, 0), bias=False),
            *(nn.BatchNorm3d(inner), nn.ReLU(inplace=True)),
            nn.Conv3d(inner, inner, (1, 3, 3), (1, stride, stride), (0, 1, 1), bias=False),
            *(nn.BatchNorm3d(inner), nn.ReLU(inplace=True)),
            *(nn.Conv3d(inner, after, 1, bias=False), nn.BatchNorm3d(after)),
        )
        around = nn.Conv3d(before, after, 1, (1, stride, stride), bias=False)
        self.around = nn.Sequential(around, nn.BatchNorm3d(after)) if before != after else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.around(x))


class Actions(nn.Module):
    """What happens in a clip: few frames in a wide network, many in a narrow one that also feeds the wide one."""

    def __init__(
        self, labels: int = 400, apart: int = 4, narrow: int = 8, depths: tuple[int, ...] = (3, 4, 6, 3)
    ) -> None:
        super().__init__()
        self.apart, thin = apart, 64 // narrow
        self.begin = nn.ModuleList((self._begin(64, 1), self._begin(thin, 5)))
        self.pool = nn.MaxPool3d((1, 3, 3), (1, 2, 2), (0, 1, 1))
        self.slow, self.fast, self.across = nn.ModuleList(), nn.ModuleList(), nn.ModuleList()
        wide_before, thin_before = 64, thin
        for place, depth in enumerate(depths):
            inner, after = 64 * 2**place, 256 * 2**place
            across = nn.Conv3d(thin_before, 2 * thin_before, (5, 1, 1), (apart, 1, 1), (2, 0, 0), bias=False)
            self.across.append(nn.Sequential(across, nn.BatchNorm3d(2 * thin_before), nn.ReLU(inplace=True)))
            time, stride = (3 if place > 1 else 1), (1 if place == 0 else 2)
            self.slow.append(self._stage(wide_before + 2 * thin_before, inner, after, depth, time, stride))
            self.fast.append(self._stage(thin_before, inner // narrow, after // narrow, depth, 3, stride))
            wide_before, thin_before = after, after // narrow
        self.drop, self.head = nn.Dropout(0.5), nn.Linear(wide_before + thin_before, labels)

    @staticmethod
    def _begin(width: int, time: int) -> nn.Sequential:
        convolution = nn.Conv3d(3, width, (time, 7, 7), (1, 2, 2), (time // 2, 3, 3), bias=False)
        return nn.Sequential(convolution, nn.BatchNorm3d(width), nn.ReLU(inplace=True))

    @staticmethod
    def _stage(before: int, inner: int, after: int, depth: int, time: int, stride: int) -> nn.Sequential:
        first = ClipBottleneck(before, inner, after, time, stride)
        return nn.Sequential(first, *(ClipBottleneck(after, inner, after, time, 1) for _ in range(depth - 1)))

    def forward(self, clip: Tensor) -> Tensor:
        slow, fast = self.pool(self.begin[0](clip[:, :, :: self.apart])), self.pool(self.begin[1](clip))
        for across, slow_stage, fast_stage in zip(self.across, self.slow, self.fast, strict=True):
            slow, fast = slow_stage(torch.cat((slow, across(fast)), dim=1)), fast_stage(fast)
        pooled = [x.mean(dim=(2, 3, 4)) for x in (slow, fast)]
        return self.head(self.drop(torch.cat(pooled, dim=1)))


class TwoWays(nn.Module):
    """A recurrent layer along the frames of each band, then one along the bands of each frame."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.GroupNorm(1, width) for _ in range(2))
        self.layers = nn.ModuleList(nn.LSTM(width, hidden, batch_first=True, bidirectional=True) for _ in range(2))
        self.outs = nn.ModuleList(nn.Linear(2 * hidden, width) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        """`x`: sample, band, frame, channel."""
        for norm, layer, out in zip(self.norms, self.layers, self.outs, strict=True):
            inner = norm(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1).flatten(0, 1)
            found, _ = layer(inner)
            x = (x + out(found).unflatten(0, x.shape[:2])).transpose(1, 2)
        return x


class Karaoke(nn.Module):
    """The singer of a song: a complex mask of its spectrum, found band by band. Returns both spectra as real pairs."""

    def __init__(self, width: int = 128, depth: int = 6, window: int = 2048, hop: int = 512) -> None:
        super().__init__()
        self.window, self.hop = window, hop
        self.register_buffer("shape", torch.hann_window(window))
        self.bands = [*[10] * 20, *[25] * 17, *[100] * 4]
        sizes = [4 * band for band in self.bands]
        self.into = nn.ModuleList(nn.Sequential(nn.LayerNorm(size), nn.Linear(size, width)) for size in sizes)
        self.layers = nn.Sequential(*(TwoWays(width, 2 * width) for _ in range(depth)))
        self.out = nn.ModuleList(
            nn.Sequential(
                *(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Tanh()),
                *(nn.Linear(4 * width, 2 * size), nn.GLU(dim=-1)),
            )
            for size in sizes
        )

    def spectrum(self, sound: Tensor) -> Tensor:
        """Sample, frame, frequency, side, real or imaginary."""
        flat = torch.stft(sound.flatten(0, 1).float(), self.window, self.hop, window=self.shape, return_complex=True)
        pairs = torch.view_as_real(flat).unflatten(0, sound.shape[:2])
        return pairs[:, :, : sum(self.bands)].permute(0, 3, 2, 1, 4)

    def forward(self, song: Tensor, singer: Tensor) -> tuple[Tensor, Tensor]:
        mixed = self.spectrum(song)
        parts = mixed.split(self.bands, dim=2)
        x = torch.stack([layer(part.flatten(2)) for layer, part in zip(self.into, parts, strict=True)], dim=1)
        x = self.layers(x)
        masks = [out(band).unflatten(-1, (-1, 2, 2)) for out, band in zip(self.out, x.unbind(1), strict=True)]
        mask = torch.view_as_complex(torch.cat(masks, dim=2).float().contiguous())
        found = torch.view_as_real(torch.view_as_complex(mixed.contiguous()) * mask)
        return found, self.spectrum(singer)


class Sine(nn.Module):
    def __init__(self, width: int, rate: float = 10.0) -> None:
        super().__init__()
        self.rates = nn.Parameter(torch.full((width,), rate))

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(self.rates * x)


class LongFilter(nn.Module):
    """A causal convolution as long as the sequence, whose weights a small network makes from the distance."""

    def __init__(self, width: int, length: int, features: int = 33, hidden: int = 64) -> None:
        super().__init__()
        distance = torch.linspace(0, 1, length)[:, None]
        angles = 2 * math.pi * distance * torch.linspace(1e-4, features // 2 - 1, features // 2)
        self.register_buffer("features", torch.cat((distance, angles.cos(), angles.sin()), dim=-1))
        rates = torch.linspace(math.log(0.01) / 0.3, math.log(0.01) / 1.5, width).abs()
        self.register_buffer("decay", torch.exp(-distance * rates))
        self.weigh = nn.Sequential(
            *(nn.Linear(features, hidden), Sine(hidden), nn.Linear(hidden, hidden), Sine(hidden)),
            nn.Linear(hidden, width, bias=False),
        )
        self.direct = nn.Parameter(torch.randn(width))

    def forward(self, x: Tensor) -> Tensor:
        """`x`: sample, channel, place."""
        length = x.shape[-1]
        weights = (self.weigh(self.features) * self.decay)[:length].transpose(0, 1).float()
        spectrum = torch.fft.rfft(x.float(), n=2 * length) * torch.fft.rfft(weights, n=2 * length)
        found = torch.fft.irfft(spectrum, n=2 * length)[..., :length]
        return (found + x.float() * self.direct[:, None]).to(x.dtype)


class LongFilterBlock(nn.Module):
    """Three projections with short filters; a long filter between two gates; a feed-forward part."""

    def __init__(self, width: int, length: int) -> None:
        super().__init__()
        self.norm, self.joint, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.short = nn.Conv1d(3 * width, 3 * width, 3, padding=2, groups=3 * width)
        self.long = LongFilter(width, length)
        self.step = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        joint = self.short(self.joint(self.norm(x)).transpose(1, 2))[..., : x.shape[1]]
        first, second, value = joint.chunk(3, dim=1)
        x = x + self.out((first * self.long(second * value)).transpose(1, 2))
        return x + self.step(x)


class LongFilters(nn.Module):
    """A language model of long convolutions by Fourier transforms."""

    def __init__(self, vocabulary: int, width: int, depth: int, length: int) -> None:
        super().__init__()
        self.words = nn.Embedding(vocabulary, width)
        self.blocks = nn.Sequential(*(LongFilterBlock(width, length) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.words(words))))


class Dispatched(nn.Module):
    """Two experts for each token, at most `room` tokens of a text for each expert, by products with masks."""

    def __init__(self, width: int, experts: int, room: float = 1.25) -> None:
        super().__init__()
        self.experts, self.room = experts, room
        self.router = nn.Linear(width, experts, bias=False)
        self.up = nn.Parameter(torch.randn(experts, width, 4 * width) * width**-0.5)
        self.down = nn.Parameter(torch.randn(experts, 4 * width, width) * (4 * width) ** -0.5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        places = int(2 * self.room * x.shape[1] / self.experts)
        chances = self.router(x).float().softmax(dim=-1)
        first = F.one_hot(chances.argmax(dim=-1), self.experts).float()
        second = F.one_hot((chances * (1 - first)).argmax(dim=-1), self.experts).float()
        balance = (first.mean(dim=1) * chances.mean(dim=1)).sum(dim=-1).mean() * self.experts
        first_place = first.cumsum(dim=1) * first - 1
        second_place = (second.cumsum(dim=1) + first.sum(dim=1, keepdim=True)) * second - 1
        combine = x.new_zeros(*x.shape[:2], self.experts, places, dtype=torch.float32)
        both = ((chances * first).sum(dim=-1) + (chances * second).sum(dim=-1))[..., None]
        slots = torch.arange(places, device=x.device)
        for chosen, place in ((first, first_place), (second, second_place)):
            combine = combine + (chances * chosen / both)[..., None] * (place[..., None] == slots)
        dispatch = (combine > 0).to(x.dtype)
        inner = torch.einsum("bsec,bsd->ebcd", dispatch, x)
        inner = F.gelu(torch.einsum("ebcd,edf->ebcf", inner, self.up))
        found = torch.einsum("ebcf,efd->ebcd", inner, self.down)
        return torch.einsum("bsec,ebcd->bsd", combine.to(found.dtype), found), balance


class DispatchedBlock(nn.Module):
    """Causal attention, then a feed-forward part of experts or a dense one."""

    def __init__(self, width: int, heads: int, experts: int) -> None:
        super().__init__()
        self.heads, self.norms = heads, nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.joint, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        dense = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.step = Dispatched(width, experts) if experts else dense

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | float]:
        q, k, v = self.joint(self.norms[0](x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        found = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(found.transpose(1, 2).flatten(2))
        found = self.step(self.norms[1](x))
        found, balance = found if isinstance(found, tuple) else (found, 0.0)
        return x + found, balance


class DispatchedWords(nn.Module):
    """A language model with experts in every other block. Returns also how unevenly experts are used."""

    def __init__(self, vocabulary: int, width: int, depth: int, length: int, experts: int = 8) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(
            DispatchedBlock(width, width // 64, experts if place % 2 else 0) for place in range(depth)
        )
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, words: Tensor) -> tuple[Tensor, Tensor]:
        x = self.words(words) + self.places.weight[: words.shape[1]]
        balances = []
        for block in self.blocks:
            x, balance = block(x)
            balances.append(balance)
        return self.head(self.norm(x)), torch.stack([each for each in balances if isinstance(each, Tensor)]).mean()


def perceptron(before: int, width: int, after: int | None = None) -> nn.Sequential:
    """Two products with a SiLU between them, and a norm."""
    after = width if after is None else after
    return nn.Sequential(nn.Linear(before, width), nn.SiLU(), nn.Linear(width, after), nn.LayerNorm(after))


class EdgeMessages(nn.Module):
    """Edges are updated from both their ends, then targets from the sums of their edges."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.edge, self.node = perceptron(3 * width, width), perceptron(2 * width, width)

    def forward(
        self, source: Tensor, target: Tensor, edges: Tensor, begins: Tensor, ends: Tensor
    ) -> tuple[Tensor, Tensor]:
        joined = torch.cat((edges, source.index_select(1, begins), target.index_select(1, ends)), dim=-1)
        messages = self.edge(joined)
        sums = torch.zeros_like(target, dtype=messages.dtype).index_add(1, ends, messages)
        return target + self.node(torch.cat((target, sums), dim=-1)), edges + messages


class Weather(nn.Module):
    """The weather six hours later: from a grid of the earth to a coarser mesh, messages there, and back."""

    def __init__(
        self, rows: int = 90, columns: int = 180, variables: int = 78, width: int = 512, depth: int = 12
    ) -> None:
        super().__init__()
        places = rows * columns
        coarse = (rows // 3) * (columns // 3)
        row, column = torch.arange(places) // columns, torch.arange(places) % columns
        near = (row // 3) * (columns // 3) + column // 3
        self.register_buffer("into_begins", torch.arange(places).repeat(2))
        self.register_buffer("into_ends", torch.cat((near, (near + 1) % coarse)))
        steps = torch.tensor([1, -1, columns // 3, -columns // 3, 4, -4, 4 * (columns // 3), -4 * (columns // 3)])
        self.register_buffer("begins", torch.arange(coarse).repeat(len(steps)))
        self.register_buffer("ends", ((torch.arange(coarse) + steps[:, None]) % coarse).flatten())
        self.grid, self.mesh = perceptron(variables, width), nn.Parameter(torch.randn(coarse, width) * 0.02)
        self.into_edges = nn.Parameter(torch.randn(2 * places, width) * 0.02)
        self.edges = nn.Parameter(torch.randn(len(steps) * coarse, width) * 0.02)
        self.back_edges = nn.Parameter(torch.randn(2 * places, width) * 0.02)
        self.encode, self.decode = EdgeMessages(width), EdgeMessages(width)
        self.process = nn.ModuleList(EdgeMessages(width) for _ in range(depth))
        self.head = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, variables))

    def forward(self, now: Tensor) -> Tensor:
        """`now`: sample, place, variable."""

        def for_all(parameter: Tensor) -> Tensor:
            return parameter.expand(len(now), -1, -1)

        grid, mesh = self.grid(now), for_all(self.mesh)
        mesh, _ = self.encode(grid, mesh, for_all(self.into_edges), self.into_begins, self.into_ends)
        edges = for_all(self.edges)
        for layer in self.process:
            mesh, edges = layer(mesh, mesh, edges, self.begins, self.ends)
        grid, _ = self.decode(mesh, grid, for_all(self.back_edges), self.into_ends, self.into_begins)
        return now + self.head(grid)


class Grouped(nn.Module):
    """A bottleneck whose middle convolution has groups."""

    def __init__(self, before: int, inner: int, after: int, stride: int, groups: int = 32) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *(conv_norm(before, inner, 1), nn.ReLU(inplace=True)),
            *(conv_norm(inner, inner, 3, stride, groups), nn.ReLU(inplace=True)),
            conv_norm(inner, after, 1),
        )
        self.around = conv_norm(before, after, 1, stride) if before != after else nn.Identity()
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(self.body(x) + self.around(x))


class Twins(nn.Module):
    """Two views of each picture as vectors whose features should agree and be independent of each other."""

    def __init__(self, depths: tuple[int, ...] = (3, 4, 6, 3), features: int = 8192) -> None:
        super().__init__()
        layers: list[nn.Module] = [conv_norm(3, 64, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)]
        before = 64
        for place, depth in enumerate(depths):
            for step in range(depth):
                stride = 2 if place and step == 0 else 1
                layers.append(Grouped(before, 128 * 2**place, 256 * 2**place, stride))
                before = 256 * 2**place
        self.body = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.project = nn.Sequential(
            *(nn.Linear(before, features, bias=False), nn.BatchNorm1d(features), nn.ReLU(inplace=True)),
            *(nn.Linear(features, features, bias=False), nn.BatchNorm1d(features), nn.ReLU(inplace=True)),
            nn.Linear(features, features, bias=False),
        )
        self.norm = nn.BatchNorm1d(features, affine=False)

    def forward(self, views: Tensor) -> Tensor:
        """How each feature of one view correlates with each of the other."""
        first, second = (self.norm(self.project(self.body(view))) for view in views.unbind(1))
        return first.T @ second / len(views)


class CrossLayers(nn.Module):
    """Products of features of growing order, all with the first."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        first = x
        for layer in self.layers:
            x = first * layer(x) + x
        return x


class Advertising(nn.Module):
    """Whether a customer clicks and buys, from what was seen before: experts shared by two tasks, each with a gate."""

    def __init__(self, items: int, fields: int, rows: int, width: int = 64, experts: int = 6, tasks: int = 2) -> None:
        super().__init__()
        self.items = nn.Embedding(items, width)
        self.fields = nn.ModuleList(nn.Embedding(rows, width) for _ in range(fields))
        self.attend = nn.Sequential(
            *(nn.Linear(4 * width, 80), nn.PReLU(), nn.Linear(80, 40), nn.PReLU(), nn.Linear(40, 1))
        )
        wide = (fields + 2) * width
        self.cross = CrossLayers(wide, 3)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(wide, 512), nn.BatchNorm1d(512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU())
            for _ in range(experts)
        )
        self.gates = nn.ModuleList(nn.Linear(wide, experts) for _ in range(tasks))
        self.towers = nn.ModuleList(
            nn.Sequential(nn.Linear(256, 128), nn.ReLU(), nn.Dropout(0.2), nn.Linear(128, 1)) for _ in range(tasks)
        )

    def forward(self, item: Tensor, seen: Tensor, fields: Tensor) -> Tensor:
        wanted, history = self.items(item), self.items(seen)
        query = wanted[:, None].expand_as(history)
        weights = self.attend(torch.cat((query, history, query - history, query * history), dim=-1))
        weights = weights.masked_fill((seen == 0)[..., None], -1e4).softmax(dim=1)
        interest = (weights * history).sum(dim=1)
        customer = [table(column) for table, column in zip(self.fields, fields.unbind(1), strict=True)]
        x = self.cross(torch.cat((wanted, interest, *customer), dim=-1))
        found = torch.stack([expert(x) for expert in self.experts], dim=1)
        answers = [
            tower((gate(x).softmax(dim=-1)[..., None] * found).sum(dim=1))
            for gate, tower in zip(self.gates, self.towers, strict=True)
        ]
        return torch.cat(answers, dim=-1)


class GatedPart(nn.Module):
    """A small network with a gate and a way around it, which may also read a context."""

    def __init__(self, before: int, width: int, after: int | None = None, context: bool = False) -> None:
        super().__init__()
        after = width if after is None else after
        self.first, self.second = nn.Linear(before, width), nn.Linear(width, width)
        self.context = nn.Linear(width, width, bias=False) if context else None
        self.gate, self.drop, self.norm = nn.Linear(width, 2 * after), nn.Dropout(0.1), nn.LayerNorm(after)
        self.around = nn.Linear(before, after) if before != after else nn.Identity()

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        inner = self.first(x)
        if self.context is not None:
            inner = inner + self.context(context)
        inner = self.drop(self.second(F.elu(inner)))
        return self.norm(self.around(x) + F.glu(self.gate(inner)))


class ChosenVariables(nn.Module):
    """A weighted mean over variables, with weights found from all of them."""

    def __init__(self, variables: int, width: int, context: bool) -> None:
        super().__init__()
        self.weigh = GatedPart(variables * width, width, variables, context)
        self.parts = nn.ModuleList(GatedPart(width, width) for _ in range(variables))

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        """`x`: ..., variable, channel."""
        weights = self.weigh(x.flatten(-2), context).softmax(dim=-1)
        parts = torch.stack([part(each) for part, each in zip(self.parts, x.unbind(-2), strict=True)], dim=-2)
        return (weights[..., None] * parts).sum(dim=-2)


class Demand(nn.Module):
    """Quantiles of sales in the coming days: chosen variables, a recurrent layer, and attention over the past."""

    def __init__(
        self, past: int, known: int, kinds: tuple[int, ...], width: int = 160, heads: int = 4, quantiles: int = 3
    ) -> None:
        super().__init__()
        self.heads, self.kinds = heads, nn.ModuleList(nn.Embedding(rows, width) for rows in kinds)
        self.past, self.known = nn.ModuleList(), nn.ModuleList()
        for side, count in ((self.past, past), (self.known, known)):
            side.extend(nn.Linear(1, width) for _ in range(count))
        self.choose_kinds = ChosenVariables(len(kinds), width, context=False)
        self.choose_past, self.choose_known = (ChosenVariables(count, width, True) for count in (past, known))
        self.contexts = nn.ModuleList(GatedPart(width, width) for _ in range(4))
        self.encoder, self.decoder = (nn.LSTM(width, width, batch_first=True) for _ in range(2))
        self.gates = nn.ModuleList(nn.Sequential(nn.Linear(width, 2 * width), nn.GLU(dim=-1)) for _ in range(3))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))
        self.enrich, self.step = GatedPart(width, width, context=True), GatedPart(width, width)
        self.query, self.key = nn.Linear(width, width), nn.Linear(width, width)
        self.value, self.out = nn.Linear(width, width // heads), nn.Linear(width // heads, width)
        self.head = nn.Linear(width, quantiles)

    @staticmethod
    def _embed(layers: nn.ModuleList, values: Tensor) -> Tensor:
        return torch.stack([layer(each[..., None]) for layer, each in zip(layers, values.unbind(-1), strict=True)], -2)

    def forward(self, kinds: Tensor, past: Tensor, known: Tensor) -> Tensor:
        still = torch.stack([table(kind) for table, kind in zip(self.kinds, kinds.unbind(1), strict=True)], dim=1)
        still = self.choose_kinds(still)
        chosen, hidden, cell, enriched = (context(still) for context in self.contexts)
        before = self.choose_past(self._embed(self.past, past), chosen[:, None])
        after = self.choose_known(self._embed(self.known, known), chosen[:, None])
        found_before, state = self.encoder(before, (hidden[None], cell[None]))
        found_after, _ = self.decoder(after, state)
        found = torch.cat((found_before, found_after), dim=1)
        found = self.norms[0](torch.cat((before, after), dim=1) + self.gates[0](found))
        inner = self.enrich(found, enriched[:, None])
        x = inner[:, past.shape[1] :]
        x = self.norms[1](x + self.gates[1](self._attend(x, inner, past.shape[1])))
        x = self.norms[2](found[:, past.shape[1] :] + self.gates[2](self.step(x)))
        return self.head(x)

    def _attend(self, x: Tensor, everything: Tensor, past: int) -> Tensor:
        q, k = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (self.query(x), self.key(everything)))
        scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
        later = torch.ones(x.shape[1], everything.shape[1], dtype=torch.bool, device=x.device).triu(past + 1)
        weights = scores.masked_fill(later, -1e4).softmax(dim=-1).mean(dim=1)
        return self.out(weights @ self.value(everything))


class Seeing(nn.Module):
    """A convolution, a pool, and two residual units with ReLUs before their convolutions."""

    def __init__(self, before: int, width: int) -> None:
        super().__init__()
        self.begin, self.pool = nn.Conv2d(before, width, 3, padding=1), nn.MaxPool2d(3, 2, 1)
        self.units = nn.ModuleList(
            nn.Sequential(nn.ReLU(), self._conv(width), nn.ReLU(), self._conv(width)) for _ in range(2)
        )

    @staticmethod
    def _conv(width: int) -> nn.Conv2d:
        return nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(self.begin(x))
        for unit in self.units:
            x = x + unit(x)
        return x


class Players(nn.Module):
    """What to do in a game and what it is worth, from screens: a cell whose state is cleared where a game begins."""

    def __init__(self, actions: int, widths: tuple[int, ...] = (64, 128, 128), cell: int = 512) -> None:
        super().__init__()
        self.see = nn.Sequential(*(Seeing(before, after) for before, after in pairwise((4, *widths))), nn.ReLU())
        self.reduce = nn.Linear(widths[-1] * 121, cell)
        self.cell = nn.LSTMCell(cell + 1, cell)
        self.policy, self.value = nn.Linear(cell, actions), nn.Linear(cell, 1)

    def forward(self, screens: Tensor, rewards: Tensor, begun: Tensor) -> tuple[Tensor, Tensor]:
        """`screens`: game, time, channel, row, column, in bytes."""
        games, length = screens.shape[:2]
        seen = self.see(screens.flatten(0, 1).to(self.reduce.weight.dtype) / 255)
        seen = F.relu(self.reduce(seen.flatten(1))).unflatten(0, (games, length))
        x = torch.cat((seen, rewards.clamp(-1, 1)[..., None].to(seen.dtype)), dim=-1)
        state = tuple(x.new_zeros(2, games, self.cell.hidden_size).unbind(0))
        outputs = []
        for step, fresh in zip(x.unbind(1), begun.unbind(1), strict=True):
            kept = (~fresh).to(x.dtype)[:, None]
            state = self.cell(step, (state[0] * kept, state[1] * kept))
            outputs.append(state[0])
        found = torch.stack(outputs, dim=1)
        return self.policy(found), self.value(found).squeeze(-1)


def player_loss(output: tuple[Tensor, Tensor], batch: dict[str, Tensor], decay: float = 0.99) -> Tensor:
    """Policy gradient with clipped weights of old actions, values by targets corrected for them, and entropy."""
    chances, values = output[0].float().log_softmax(dim=-1), output[1].float()
    chosen = chances.gather(-1, batch["actions"][..., None]).squeeze(-1)
    with torch.no_grad():
        weights = (chosen - batch["old"]).exp().clamp(max=1)
        going = decay * (~batch["begun"]).float()
        following = torch.cat((values[:, 1:], values[:, -1:]), dim=1)
        errors = weights * (batch["rewards"] + going * following - values)
        behind, corrections = torch.zeros_like(values[:, 0]), []
        for place in reversed(range(values.shape[1])):
            behind = errors[:, place] + going[:, place] * weights[:, place] * behind
            corrections.append(behind)
        targets = values + torch.stack(corrections[::-1], dim=1)
        after = torch.cat((targets[:, 1:], values[:, -1:]), dim=1)
        gains = weights * (batch["rewards"] + going * after - values)
    entropy = -(chances.exp() * chances).sum(dim=-1)
    return (-chosen * gains + 0.5 * (targets - values).square() - 0.01 * entropy).sum()


class ChannelNorm(nn.Module):
    """Layer norm over the channels of pictures."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class ChannelAttention(nn.Module):
    """Attention of channels to channels, over all pixels."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.warmth = heads, nn.Parameter(torch.ones(heads, 1, 1))
        self.joint = nn.Conv2d(width, 3 * width, 1, bias=False)
        self.near = nn.Conv2d(3 * width, 3 * width, 3, padding=1, groups=3 * width, bias=False)
        self.out = nn.Conv2d(width, width, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.near(self.joint(x)).flatten(2).unflatten(1, (3, self.heads, -1)).unbind(1)
        scores = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).transpose(-1, -2) * self.warmth
        found = scores.softmax(dim=-1) @ v
        return self.out(found.flatten(1, 2).unflatten(-1, x.shape[2:]))


class RestoreBlock(nn.Module):
    def __init__(self, width: int, heads: int, growth: float = 2.66) -> None:
        super().__init__()
        hidden = int(width * growth)
        self.norms = nn.ModuleList(ChannelNorm(width) for _ in range(2))
        self.attention, self.up = ChannelAttention(width, heads), nn.Conv2d(width, 2 * hidden, 1, bias=False)
        self.near = nn.Conv2d(2 * hidden, 2 * hidden, 3, padding=1, groups=2 * hidden, bias=False)
        self.down = nn.Conv2d(hidden, width, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norms[0](x))
        value, gate = self.near(self.up(self.norms[1](x))).chunk(2, dim=1)
        return x + self.down(F.gelu(gate) * value)


class Restore(nn.Module):
    """Pictures without rain or blur: a U-Net of attention over channels, with pixel shuffles between its sizes."""

    def __init__(self, width: int = 48, depths: tuple[int, ...] = (4, 6, 6, 8), refine: int = 4) -> None:
        super().__init__()
        self.begin = nn.Conv2d(3, width, 3, padding=1, bias=False)
        sizes = [width * 2**level for level in range(len(depths))]
        self.down = nn.ModuleList(
            nn.Sequential(*(RestoreBlock(size, 2**level) for _ in range(depth)))
            for level, (size, depth) in enumerate(zip(sizes, depths, strict=True))
        )
        self.smaller = nn.ModuleList(
            nn.Sequential(nn.Conv2d(size, size // 2, 3, padding=1, bias=False), nn.PixelUnshuffle(2))
            for size in sizes[:-1]
        )
        self.larger = nn.ModuleList(
            nn.Sequential(nn.Conv2d(size, 2 * size, 3, padding=1, bias=False), nn.PixelShuffle(2))
            for size in reversed(sizes[1:])
        )
        self.joins, self.up = nn.ModuleList(), nn.ModuleList()
        for level in reversed(range(len(depths) - 1)):
            size = sizes[max(level, 1)]  # the finest level keeps both halves
            self.joins.append(nn.Conv2d(2 * sizes[level], size, 1, bias=False) if level else nn.Identity())
            self.up.append(nn.Sequential(*(RestoreBlock(size, 2**level) for _ in range(depths[level]))))
        self.refine = nn.Sequential(*(RestoreBlock(sizes[1], 1) for _ in range(refine)))
        self.end = nn.Conv2d(sizes[1], 3, 3, padding=1, bias=False)

    def forward(self, images: Tensor) -> Tensor:
        x, kept = self.begin(images), []
        for level, blocks in enumerate(self.down):
            x = blocks(x)
            if level < len(self.smaller):
                kept.append(x)
                x = self.smaller[level](x)
        for larger, join, blocks in zip(self.larger, self.joins, self.up, strict=True):
            x = blocks(join(torch.cat((larger(x), kept.pop()), dim=1)))
        return images + self.end(self.refine(x))


class Adapted(nn.Module):
    """A frozen product and a trained one of low rank beside it."""

    def __init__(self, before: int, after: int, rank: int, scale: float = 2.0) -> None:
        super().__init__()
        self.base = nn.Linear(before, after, bias=False).requires_grad_(False)
        self.down, self.up = nn.Linear(before, rank, bias=False), nn.Linear(rank, after, bias=False)
        self.drop, self.scale = nn.Dropout(0.05), scale
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.scale * self.up(self.down(self.drop(x)))


def turned(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Rotary positions."""
    first, second = x.chunk(2, dim=-1)
    return x * cosines + torch.cat((-second, first), dim=-1) * sines


class AdaptedBlock(nn.Module):
    """Attention and a gated feed-forward part, side by side after one norm."""

    def __init__(self, width: int, heads: int, rank: int) -> None:
        super().__init__()
        inner = 8 * width // 3 // 64 * 64
        self.heads, self.norm = heads, nn.RMSNorm(width).requires_grad_(False)
        self.query, self.key, self.value, self.out = (Adapted(width, width, rank) for _ in range(4))
        self.gate, self.up = (Adapted(width, inner, rank) for _ in range(2))
        self.down = Adapted(inner, width, rank)

    def forward(self, x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        inner = self.norm(x)
        q, k, v = (
            product(inner).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for product in (self.query, self.key, self.value)
        )
        q, k = turned(q, cosines, sines), turned(k, cosines, sines)
        found = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return x + self.out(found) + self.down(F.silu(self.gate(inner)) * self.up(inner))


class AdaptedWords(nn.Module):
    """A frozen language model with trained adapters on all its products."""

    def __init__(self, vocabulary: int, width: int, depth: int, heads: int, rank: int = 16) -> None:
        super().__init__()
        self.words = nn.Embedding(vocabulary, width).requires_grad_(False)
        self.blocks = nn.ModuleList(AdaptedBlock(width, heads, rank) for _ in range(depth))
        self.norm = nn.RMSNorm(width).requires_grad_(False)
        self.head = nn.Linear(width, vocabulary, bias=False).requires_grad_(False)
        self.size = width // heads

    def forward(self, words: Tensor) -> Tensor:
        x = self.words(words)
        rates = 10000 ** -(torch.arange(0, self.size, 2, device=words.device) / self.size)
        angles = torch.arange(words.shape[1], device=words.device)[:, None] * rates.repeat(2)
        cosines, sines = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        for block in self.blocks:
            x = block(x, cosines, sines)
        return self.head(self.norm(x))


class SliceAttention(nn.Module):
    """Attention among few soft slices of many points; each point reads the slices that it belongs to."""

    def __init__(self, width: int, heads: int, slices: int) -> None:
        super().__init__()
        size = width // heads
        self.heads, self.warmth = heads, nn.Parameter(torch.full((heads, 1, 1), 0.5))
        self.keys, self.values, self.belong = nn.Linear(width, width), nn.Linear(width, width), nn.Linear(size, slices)
        self.joint, self.out = nn.Linear(size, 3 * size, bias=False), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        keys, values = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (self.keys(x), self.values(x)))
        shares = (self.belong(keys) / self.warmth.clamp(0.1, 5)).softmax(dim=-1)
        sums = torch.einsum("bhnc,bhns->bhsc", values, shares)
        tokens = sums / (shares.sum(dim=2)[..., None] + 1e-5)
        found = F.scaled_dot_product_attention(*self.joint(tokens).chunk(3, dim=-1))
        return self.out(torch.einsum("bhsc,bhns->bhnc", found, shares).transpose(1, 2).flatten(2))


class Surfaces(nn.Module):
    """Pressure and speed of air at the points around a car."""

    def __init__(self, inputs: int = 7, outputs: int = 4, width: int = 256, depth: int = 8, slices: int = 64) -> None:
        super().__init__()
        self.begin = nn.Sequential(nn.Linear(inputs, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2 * depth + 1))
        self.attentions = nn.ModuleList(SliceAttention(width, 8, slices) for _ in range(depth))
        self.steps = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)) for _ in range(depth)
        )
        self.head = nn.Linear(width, outputs)

    def forward(self, points: Tensor) -> Tensor:
        x = self.begin(points)
        for place, (attention, step) in enumerate(zip(self.attentions, self.steps, strict=True)):
            x = x + attention(self.norms[2 * place](x))
            x = x + step(self.norms[2 * place + 1](x))
        return self.head(self.norms[-1](x))
