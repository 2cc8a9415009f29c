"""Plain PyTorch models of the fourth round, written as users write them: images, sounds, tables, graphs and words."""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm


def waves(times: Tensor, width: int) -> Tensor:
    """Sines and cosines of times in many frequencies."""
    steps = torch.arange(width // 2, device=times.device) / (width // 2)
    angles = 1000 * times[:, None] * torch.exp(-9.2 * steps)
    return torch.cat((angles.sin(), angles.cos()), dim=-1)


class TimedBlock(nn.Module):
    """Two convolutions that know a time, and attention over pixels where asked."""

    def __init__(self, before: int, after: int, width: int, attends: bool) -> None:
        super().__init__()
        self.first_norm, self.first = nn.GroupNorm(32, before), nn.Conv2d(before, after, 3, padding=1)
        self.time = nn.Linear(width, 2 * after)
        self.second_norm, self.second = nn.GroupNorm(32, after), nn.Conv2d(after, after, 3, padding=1)
        self.aside = nn.Conv2d(before, after, 1) if before != after else nn.Identity()
        self.joint = nn.Conv2d(after, 3 * after, 1) if attends else None
        self.out = nn.Conv2d(after, after, 1) if attends else None

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        inner = self.first(F.silu(self.first_norm(x)))
        scale, shift = self.time(F.silu(time))[:, :, None, None].chunk(2, dim=1)
        inner = self.second_norm(inner) * (1 + scale) + shift
        x = self.aside(x) + self.second(F.dropout(F.silu(inner), 0.1, self.training))
        if self.joint is None or self.out is None:
            return x
        heads = self.joint(x).flatten(2).unflatten(1, (3, -1, 64)).transpose(-1, -2).unbind(1)
        found = F.scaled_dot_product_attention(*heads)
        return x + self.out(found.transpose(-1, -2).reshape(x.shape))


class FlowNet(nn.Module):
    """The speed of noisy images on their way to clean ones: a U-Net of four sizes."""

    def __init__(self, width: int, depth: int = 2, levels: tuple[int, ...] = (1, 2, 3, 4)) -> None:
        super().__init__()
        self.width, sizes, timed = width, [width * level for level in levels], 4 * width
        self.time = nn.Sequential(nn.Linear(width, timed), nn.SiLU(), nn.Linear(timed, timed))
        self.begin = nn.Conv2d(3, width, 3, padding=1)
        self.down, self.up, kept = nn.ModuleList(), nn.ModuleList(), [width]
        before = width
        for level, size in enumerate(sizes):
            for _ in range(depth):
                self.down.append(TimedBlock(before, size, timed, level >= 2))
                kept.append(before := size)
            if level < len(sizes) - 1:
                self.down.append(nn.Conv2d(size, size, 3, 2, 1))
                kept.append(size)
        self.middle = TimedBlock(before, before, timed, True)
        for level, size in reversed(list(enumerate(sizes))):
            for _ in range(depth + 1):
                self.up.append(TimedBlock(before + kept.pop(), size, timed, level >= 2))
                before = size
            if level:
                self.up.append(nn.Conv2d(size, size, 3, padding=1))
        self.end = nn.Sequential(nn.GroupNorm(32, before), nn.SiLU(), nn.Conv2d(before, 3, 3, padding=1))

    def forward(self, images: Tensor, times: Tensor) -> Tensor:
        time = self.time(waves(times, self.width).to(images.dtype))
        x = self.begin(images)
        kept = [x]
        for layer in self.down:
            x = layer(x, time) if isinstance(layer, TimedBlock) else layer(x)
            kept.append(x)
        x = self.middle(x, time)
        for layer in self.up:
            if isinstance(layer, TimedBlock):
                x = layer(torch.cat((x, kept.pop()), dim=1), time)
            else:
                x = layer(F.interpolate(x, scale_factor=2, mode="nearest"))
        return self.end(x)


class Receptive(nn.Module):
    """Residual convolutions of one kernel and several dilations."""

    def __init__(self, channels: int, kernel: int) -> None:
        super().__init__()
        self.wide = nn.ModuleList(
            weight_norm(nn.Conv1d(channels, channels, kernel, padding=rate * (kernel // 2), dilation=rate))
            for rate in (1, 3, 5)
        )
        self.near = nn.ModuleList(
            weight_norm(nn.Conv1d(channels, channels, kernel, padding=kernel // 2)) for _ in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        for wide, near in zip(self.wide, self.near, strict=True):
            x = x + near(F.leaky_relu(wide(F.leaky_relu(x, 0.1)), 0.1))
        return x


class Vocoder(nn.Module):
    """Spectra to sound: transposed convolutions, each followed by the mean of three receptive fields."""

    def __init__(self, bands: int, width: int, rates: tuple[int, ...] = (8, 8, 2, 2)) -> None:
        super().__init__()
        sizes = [width // 2**level for level in range(len(rates) + 1)]
        self.begin = weight_norm(nn.Conv1d(bands, width, 7, padding=3))
        self.up = nn.ModuleList(
            weight_norm(nn.ConvTranspose1d(a, b, 2 * rate, rate, rate // 2))
            for (a, b), rate in zip(pairwise(sizes), rates, strict=True)
        )
        self.fields = nn.ModuleList(nn.ModuleList(Receptive(size, k) for k in (3, 7, 11)) for size in sizes[1:])
        self.end = weight_norm(nn.Conv1d(sizes[-1], 1, 7, padding=3))

    def forward(self, spectra: Tensor) -> Tensor:
        x = self.begin(spectra)
        for up, fields in zip(self.up, self.fields, strict=True):
            x = up(F.leaky_relu(x, 0.1))
            x = sum(field(x) for field in fields) / len(fields)
        return torch.tanh(self.end(F.leaky_relu(x)))


class Retrieval(nn.Module):
    """Questions and articles as unit vectors: a transformer for words, a bag of features beside it."""

    def __init__(self, words: int, features: int, width: int, depth: int) -> None:
        super().__init__()
        self.words, self.features = nn.Embedding(words, width), nn.EmbeddingBag(features, width, mode="mean")
        self.places = nn.Parameter(torch.randn(1, 256, width) * 0.02)

        def tower() -> nn.Module:
            layer = nn.TransformerEncoderLayer(width, width // 64, 4 * width, 0.1, "gelu", batch_first=True)
            return nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)

        self.question, self.article = tower(), tower()
        self.mix = nn.Sequential(nn.Linear(2 * width, width), nn.GELU(), nn.Linear(width, width))
        self.scale = nn.Parameter(torch.tensor(3.0))

    def forward(self, question: Tensor, article: Tensor, features: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        asked = self.question(self.words(question) + self.places[:, : question.shape[1]]).mean(dim=1)
        found = self.article(self.words(article) + self.places[:, : article.shape[1]]).mean(dim=1)
        found = self.mix(torch.cat((found, self.features(features)), dim=-1))
        return F.normalize(asked, dim=-1), F.normalize(found, dim=-1), self.scale.exp()


class Coupling(nn.Module):
    """A step of a normalising flow: scales, a mixing of channels, and one half that moves the other."""

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.log, self.shift = (
            nn.Parameter(torch.zeros(1, channels, 1, 1)),
            nn.Parameter(torch.zeros(1, channels, 1, 1)),
        )
        self.mix = nn.Parameter(torch.linalg.qr(torch.randn(channels, channels))[0])
        self.net = nn.Sequential(
            nn.Conv2d(channels // 2, width, 3, padding=1),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 1),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, channels, 3, padding=1),
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        pixels = x.shape[2] * x.shape[3]
        x = F.conv2d((x + self.shift) * self.log.exp(), self.mix[:, :, None, None])
        still, moved = x.chunk(2, dim=1)
        scale, shift = self.net(still).chunk(2, dim=1)
        scale = torch.sigmoid(scale + 2)
        volume = pixels * (self.log.sum() + torch.linalg.slogdet(self.mix.float())[1])
        return torch.cat((still, moved * scale + shift), dim=1), volume + scale.log().sum(dim=(1, 2, 3))


class NormalisingFlow(nn.Module):
    """The likelihood of images, by invertible steps on three scales."""

    def __init__(self, width: int, steps: int, scales: int = 3) -> None:
        super().__init__()
        self.scales = nn.ModuleList(
            nn.ModuleList(Coupling(3 * 4 * 2**scale, width) for _ in range(steps)) for scale in range(scales)
        )

    def forward(self, images: Tensor) -> Tensor:
        x, found = images, images.new_zeros(len(images))
        for place, steps in enumerate(self.scales):
            x = F.pixel_unshuffle(x, 2)
            for step in steps:
                x, volume = step(x)
                found = found + volume
            if place < len(self.scales) - 1:
                x, done = x.chunk(2, dim=1)
                found = found - 0.5 * done.square().sum(dim=(1, 2, 3))
        return found - 0.5 * x.square().sum(dim=(1, 2, 3))


class Speed(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.GroupNorm(32, width) for _ in range(3))
        self.first, self.second = nn.Conv2d(width + 1, width, 3, 1, 1), nn.Conv2d(width + 1, width, 3, 1, 1)

    def forward(self, time: float, x: Tensor) -> Tensor:
        now = torch.full_like(x[:, :1], time)
        x = self.first(torch.cat((now, F.relu(self.norms[0](x))), dim=1))
        x = self.second(torch.cat((now, F.relu(self.norms[1](x))), dim=1))
        return self.norms[2](x)


class Continuous(nn.Module):
    """An image moved along a learnt vector field by Runge and Kutta's steps, which share their weights."""

    def __init__(self, width: int, steps: int, labels: int) -> None:
        super().__init__()
        self.begin = nn.Sequential(
            nn.Conv2d(3, width, 3), nn.GroupNorm(32, width), nn.ReLU(), nn.Conv2d(width, width, 4, 2, 1)
        )
        self.speed, self.steps = Speed(width), steps
        self.end = nn.Sequential(nn.GroupNorm(32, width), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.head = nn.Linear(width, labels)

    def forward(self, images: Tensor) -> Tensor:
        x, h = self.begin(images), 1 / self.steps
        for step in range(self.steps):
            t = step * h
            a = self.speed(t, x)
            b = self.speed(t + h / 2, x + h / 2 * a)
            c = self.speed(t + h / 2, x + h / 2 * b)
            d = self.speed(t + h, x + h * c)
            x = x + h / 6 * (a + 2 * b + 2 * c + d)
        return self.head(self.end(x))


class Bottleneck(nn.Module):
    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        after = 4 * width
        self.body = nn.Sequential(
            *(nn.Conv2d(before, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True)),
            *(nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True)),
            *(nn.Conv2d(width, after, 1, bias=False), nn.BatchNorm2d(after)),
        )
        self.aside = (
            nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after))
            if stride > 1 or before != after
            else nn.Identity()
        )

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.aside(x), inplace=True)


class Detector(nn.Module):
    """Boxes and kinds at every place of five grids: a backbone, a pyramid, and heads that the grids share."""

    def __init__(self, labels: int, anchors: int = 9, width: int = 256) -> None:
        super().__init__()
        self.begin = nn.Sequential(nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(True))
        self.stages, before = nn.ModuleList(), 64
        for stage, depth in enumerate((3, 4, 6, 3)):
            inner = 64 * 2**stage
            layers = [
                Bottleneck(before if i == 0 else 4 * inner, inner, 2 if stage and not i else 1) for i in range(depth)
            ]
            self.stages.append(nn.Sequential(*layers))
            before = 4 * inner
        self.aside = nn.ModuleList(nn.Conv2d(size, width, 1) for size in (512, 1024, 2048))
        self.smooth = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1) for _ in range(3))
        self.sixth, self.seventh = nn.Conv2d(2048, width, 3, 2, 1), nn.Conv2d(width, width, 3, 2, 1)
        self.kinds, self.boxes = self._head(width, anchors * labels), self._head(width, anchors * 4)
        self.labels = labels

    @staticmethod
    def _head(width: int, outputs: int) -> nn.Sequential:
        layers = [nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.ReLU(inplace=True)) for _ in range(4)]
        return nn.Sequential(*layers, nn.Conv2d(width, outputs, 3, padding=1))

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        x, kept = F.max_pool2d(self.begin(images), 3, 2, 1), []
        for stage in self.stages:
            x = stage(x)
            kept.append(x)
        above = self.aside[2](kept[3])
        grids = [self.smooth[2](above)]
        for level in (1, 0):
            above = self.aside[level](kept[level + 1]) + F.interpolate(above, scale_factor=2, mode="nearest")
            grids.insert(0, self.smooth[level](above))
        grids.append(self.sixth(kept[3]))
        grids.append(self.seventh(F.relu(grids[-1])))
        return self._flat(self.kinds, grids, self.labels), self._flat(self.boxes, grids, 4)

    @staticmethod
    def _flat(head: nn.Module, grids: list[Tensor], size: int) -> Tensor:
        return torch.cat([head(grid).permute(0, 2, 3, 1).flatten(1).unflatten(1, (-1, size)) for grid in grids], dim=1)


class Motion(nn.Module):
    """Where each pixel of one image is in the next: correlations, and a recurrent cell that corrects a field."""

    def __init__(self, width: int, radius: int = 4, steps: int = 8) -> None:
        super().__init__()
        self.width, self.radius, self.steps = width, radius, steps
        self.features, self.context = self._encoder(width), self._encoder(2 * width)
        seen = 3 * (2 * radius + 1) ** 2
        self.look = nn.Sequential(nn.Conv2d(seen + 2, width, 1), nn.ReLU(), nn.Conv2d(width, width, 3, 1, 1), nn.ReLU())
        self.gates, self.new = nn.Conv2d(3 * width, 2 * width, 3, 1, 1), nn.Conv2d(3 * width, width, 3, 1, 1)
        self.correct = nn.Sequential(nn.Conv2d(width, width, 3, 1, 1), nn.ReLU(), nn.Conv2d(width, 2, 3, 1, 1))

    @staticmethod
    def _encoder(outputs: int) -> nn.Sequential:
        layers: list[nn.Module] = []
        for before, after in pairwise((3, 64, 96, 128)):
            layers += [nn.Conv2d(before, after, 3, 2, 1), nn.InstanceNorm2d(after), nn.ReLU()]
            layers += [nn.Conv2d(after, after, 3, 1, 1), nn.InstanceNorm2d(after), nn.ReLU()]
        return nn.Sequential(*layers, nn.Conv2d(128, outputs, 1))

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        before, after = self.features(torch.cat((first, second))).chunk(2)
        state, context = self.context(first).chunk(2, dim=1)
        state, context = torch.tanh(state), F.relu(context)
        batch, _, rows, columns = before.shape
        all_pairs = torch.einsum("bcij,bckl->bijkl", before, after) / self.width**0.5
        level = all_pairs.reshape(batch * rows * columns, 1, rows, columns)
        levels = [level, F.avg_pool2d(level, 2), F.avg_pool2d(level, 4)]
        grid = torch.stack(
            torch.meshgrid(
                torch.arange(columns, device=first.device), torch.arange(rows, device=first.device), indexing="xy"
            )
        )
        start = grid.to(first.dtype)[None].expand(batch, -1, -1, -1)
        place, found = start, []
        for _ in range(self.steps):
            place = place.detach()
            seen = self.look(torch.cat((self._around(levels, place), place - start), dim=1))
            inputs = torch.cat((state, context, seen), dim=1)
            update, forget = torch.sigmoid(self.gates(inputs)).chunk(2, dim=1)
            new = torch.tanh(self.new(torch.cat((forget * state, context, seen), dim=1)))
            state = (1 - update) * state + update * new
            place = place + self.correct(state)
            found.append(F.interpolate(place - start, scale_factor=8, mode="bilinear", align_corners=True))
        return torch.stack(found)

    def _around(self, levels: list[Tensor], place: Tensor) -> Tensor:
        batch, _, rows, columns = place.shape
        side = torch.arange(-self.radius, self.radius + 1, device=place.device, dtype=place.dtype)
        offsets = torch.stack(torch.meshgrid(side, side, indexing="xy"), dim=-1)[None]
        centre = place.permute(0, 2, 3, 1).reshape(-1, 1, 1, 2)
        looked = []
        for depth, level in enumerate(levels):
            size = torch.tensor([level.shape[3] - 1, level.shape[2] - 1], device=place.device)
            points = 2 * (centre / 2**depth + offsets) / size - 1
            picked = F.grid_sample(level, points.to(level.dtype), align_corners=True)
            looked.append(picked.reshape(batch, rows, columns, -1))
        return torch.cat(looked, dim=-1).permute(0, 3, 1, 2)


class ConvolutionalCell(nn.Module):
    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.gates = nn.Conv2d(inputs + width, 4 * width, 5, padding=2)

    def forward(self, x: Tensor, hidden: Tensor, cell: Tensor) -> tuple[Tensor, Tensor]:
        i, f, o, g = self.gates(torch.cat((x, hidden), dim=1)).chunk(4, dim=1)
        cell = torch.sigmoid(f) * cell + torch.sigmoid(i) * torch.tanh(g)
        return torch.sigmoid(o) * torch.tanh(cell), cell


class NextFrames(nn.Module):
    """The next frame of each: recurrent cells of convolutions, a frame at a time."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.width = width
        self.begin = nn.Sequential(nn.Conv2d(3, width, 3, 2, 1), nn.GroupNorm(8, width), nn.LeakyReLU(0.2))
        self.cells = nn.ModuleList(ConvolutionalCell(width, width) for _ in range(depth))
        self.end = nn.ConvTranspose2d(width, 3, 4, 2, 1)

    def forward(self, frames: Tensor) -> Tensor:
        batch, _, _, rows, columns = frames.shape
        states = [(frames.new_zeros(batch, self.width, rows // 2, columns // 2),) * 2 for _ in range(len(self.cells))]
        found = []
        for frame in frames.unbind(1):
            x = self.begin(frame)
            for place, cell in enumerate(self.cells):
                x, memory = cell(x, *states[place])
                states[place] = (x, memory)
            found.append(self.end(x))
        return torch.stack(found, dim=1)


class ChosenExperts(nn.Module):
    """Experts that choose their tokens, as many each."""

    def __init__(self, width: int, inner: int, experts: int, share: int) -> None:
        super().__init__()
        self.share, self.router = share, nn.Linear(width, experts, bias=False)
        self.up = nn.Parameter(torch.randn(experts, width, inner) * width**-0.5)
        self.down = nn.Parameter(torch.randn(experts, inner, width) * inner**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        scores = self.router(rows).softmax(dim=-1)
        weights, chosen = scores.t().topk(len(rows) * self.share // scores.shape[1], dim=-1)
        inner = F.gelu(torch.bmm(rows[chosen], self.up))
        found = torch.bmm(inner, self.down) * weights[..., None]
        return torch.zeros_like(rows).index_add(0, chosen.flatten(), found.flatten(0, 1)).view_as(x)


class RotatedAttention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.joint, self.out = heads, nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width)

    def forward(self, x: Tensor, turns: Tensor) -> Tensor:
        q, k, v = self.joint(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        q, k = (self._turn(one, turns) for one in (q, k))
        found = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(found.transpose(1, 2).flatten(2))

    @staticmethod
    def _turn(x: Tensor, turns: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)).contiguous())
        return torch.view_as_real(pairs * turns).flatten(-2).to(x.dtype)


class ExpertLayer(nn.Module):
    def __init__(self, width: int, heads: int, experts: int) -> None:
        super().__init__()
        self.attention_norm, self.attention = nn.RMSNorm(width), RotatedAttention(width, heads)
        self.norm, self.experts = nn.RMSNorm(width), ChosenExperts(width, 2 * width, experts, 2)

    def forward(self, x: Tensor, turns: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), turns)
        return x + self.experts(self.norm(x))


class ExpertWords(nn.Module):
    """A language model whose experts choose tokens."""

    def __init__(self, vocabulary: int, width: int, depth: int, heads: int, experts: int) -> None:
        super().__init__()
        self.words, self.width = nn.Embedding(vocabulary, width), width // heads
        self.layers = nn.ModuleList(ExpertLayer(width, heads, experts) for _ in range(depth))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        rates = 10000.0 ** -(torch.arange(0, self.width, 2, device=tokens.device) / self.width)
        angles = torch.outer(torch.arange(tokens.shape[1], device=tokens.device), rates)
        turns, x = torch.polar(torch.ones_like(angles), angles), self.words(tokens)
        for layer in self.layers:
            x = layer(x, turns)
        return self.head(self.norm(x))


class Retention(nn.Module):
    """Attention that decays with distance, in chunks: within each at once, between them by a state."""

    def __init__(self, width: int, heads: int, chunk: int = 256) -> None:
        super().__init__()
        self.heads, self.chunk = heads, chunk
        self.joint, self.gate = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.norm, self.out = nn.GroupNorm(heads, width), nn.Linear(width, width, bias=False)
        self.register_buffer("decay", torch.log(1 - 2.0 ** (-5 - torch.arange(heads, dtype=torch.float32))))

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(self.chunk, device=x.device)
        apart = places[:, None] - places[None, :]
        within = torch.exp(self.decay[:, None, None] * apart).tril().to(x.dtype)
        arrives = torch.exp(self.decay[:, None] * (places + 1)).to(x.dtype)[..., None]
        leaves = torch.exp(self.decay[:, None] * (self.chunk - 1 - places)).to(x.dtype)[..., None]
        whole = torch.exp(self.decay * self.chunk).to(x.dtype)[:, None, None]
        q, k, v = self.joint(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        k, state, found = k * q.shape[-1] ** -0.5, None, []
        for q_part, k_part, v_part in zip(*(one.split(self.chunk, dim=2) for one in (q, k, v)), strict=True):
            part = (q_part @ k_part.transpose(-1, -2) * within) @ v_part
            if state is not None:
                part = part + (q_part * arrives) @ state
            new = (k_part * leaves).transpose(-1, -2) @ v_part
            state = new if state is None else state * whole + new
            found.append(part)
        rows = torch.cat(found, dim=2).transpose(1, 2).flatten(2)
        return self.out(F.silu(self.gate(x)) * self.norm(rows.flatten(0, 1)).view_as(rows))


class RetentionLayer(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.before, self.retention, self.after = nn.LayerNorm(width), Retention(width, heads), nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.retention(self.before(x))
        a, b = self.up(self.after(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(a) * b)


class RetentionWords(nn.Module):
    """A language model without attention. The head is the embedding."""

    def __init__(self, vocabulary: int, width: int, depth: int, heads: int) -> None:
        super().__init__()
        self.words = nn.Embedding(vocabulary, width)
        self.layers = nn.Sequential(*(RetentionLayer(width, heads) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.words.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.layers(self.words(tokens))))


class AtomLayer(nn.Module):
    """Messages between all pairs of atoms by their distances, which also move the atoms."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.message = nn.Sequential(nn.Linear(2 * width + 1, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU())
        self.move = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 1, bias=False))
        self.renew = nn.Sequential(nn.Linear(2 * width, width), nn.SiLU(), nn.Linear(width, width))

    def forward(self, x: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        count = x.shape[1]
        apart = places[:, :, None] - places[:, None]
        squares = apart.square().sum(dim=-1, keepdim=True)
        pairs = (x[:, :, None].expand(-1, -1, count, -1), x[:, None].expand(-1, count, -1, -1), squares)
        messages = self.message(torch.cat(pairs, dim=-1))
        places = places + (apart / (squares.sqrt() + 1) * self.move(messages)).mean(dim=2)
        return x + self.renew(torch.cat((x, messages.sum(dim=2)), dim=-1)), places


class Atoms(nn.Module):
    """The energy of molecules that may be turned and moved."""

    def __init__(self, kinds: int, width: int, depth: int) -> None:
        super().__init__()
        self.kinds = nn.Embedding(kinds, width)
        self.layers = nn.ModuleList(AtomLayer(width) for _ in range(depth))
        self.head = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 1))

    def forward(self, kinds: Tensor, places: Tensor) -> Tensor:
        x = self.kinds(kinds)
        for layer in self.layers:
            x, places = layer(x, places)
        return self.head(x).sum(dim=(1, 2))


class ResidualStack(nn.Module):
    """What is left of a series, explained a block at a time; each also tells a part of the future."""

    def __init__(self, before: int, after: int, width: int, blocks: int, depth: int = 4) -> None:
        super().__init__()
        self.before = before
        self.blocks = nn.ModuleList()
        for _ in range(blocks):
            layers: list[nn.Module] = [nn.Linear(before, width), nn.ReLU()]
            for _ in range(depth - 1):
                layers += [nn.Linear(width, width), nn.ReLU()]
            self.blocks.append(nn.Sequential(*layers, nn.Linear(width, before + after)))

    def forward(self, series: Tensor) -> Tensor:
        scale = series.abs().mean(dim=1, keepdim=True) + 1e-3
        left, told = series / scale, torch.zeros((), device=series.device)
        for block in self.blocks:
            back, part = block(left).split((self.before, block[-1].out_features - self.before), dim=1)
            left, told = left - back, told + part
        return told * scale


class Shopping(nn.Module):
    """The next thing that each customer buys, among those bought and others drawn at random."""

    def __init__(self, things: int, width: int, depth: int, length: int) -> None:
        super().__init__()
        self.things, self.places = nn.Embedding(things, width, padding_idx=0), nn.Embedding(length, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2 * depth))
        self.attention = nn.ModuleList(nn.MultiheadAttention(width, 4, 0.2, batch_first=True) for _ in range(depth))
        self.inner = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Dropout(0.2), nn.Linear(width, width))
            for _ in range(depth)
        )
        self.last = nn.LayerNorm(width)

    def forward(self, bought: Tensor, asked: Tensor) -> Tensor:
        length = bought.shape[1]
        x = self.things(bought) + self.places(torch.arange(length, device=bought.device))
        later = torch.ones(length, length, dtype=torch.bool, device=bought.device).triu(1)
        for place, (attention, inner) in enumerate(zip(self.attention, self.inner, strict=True)):
            before = self.norms[2 * place](x)
            x = x + attention(before, before, before, attn_mask=later, need_weights=False)[0]
            x = x + inner(self.norms[2 * place + 1](x))
        return torch.einsum("blw,blnw->bln", self.last(x), self.things(asked))
