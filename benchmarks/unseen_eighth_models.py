"""Plain PyTorch models of the eighth round: films, robots, memories, spelling, voices, soft experts and compression."""

from __future__ import annotations

import math
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def wave_features(times: Tensor, width: int) -> Tensor:
    """Sines and cosines of times at many rates."""
    rates = torch.exp(torch.arange(width // 2, device=times.device) * (-math.log(10000) / (width // 2)))
    angles = times.float()[:, None] * rates
    return torch.cat((angles.sin(), angles.cos()), dim=-1)


class HeadAttention(nn.Module):
    """Attention over all places but the last two dimensions', with norms of queries and keys."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.joint, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norms = nn.ModuleList(nn.RMSNorm(width // heads) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.joint(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        found = F.scaled_dot_product_attention(self.norms[0](q), self.norms[1](k), v)
        return self.out(found.transpose(1, 2).flatten(2))


class TextAttention(nn.Module):
    """Attention of places to the words of a text."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.joint, self.out = (nn.Linear(width, size) for size in (width, 2 * width, width))

    def forward(self, x: Tensor, text: Tensor) -> Tensor:
        q = self.query(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        k, v = self.joint(text).unflatten(-1, (2, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class FilmBlock(nn.Module):
    """Attention within each picture, between pictures at each place, to the text, and a feed-forward part."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width, elementwise_affine=False) for _ in range(3))
        self.within, self.between = HeadAttention(width, heads), HeadAttention(width, heads)
        self.read = TextAttention(width, heads)
        self.step = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width))
        self.change = nn.Parameter(torch.randn(9, width) * width**-0.5)

    def forward(self, x: Tensor, text: Tensor, time: Tensor) -> Tensor:
        """`x`: sample, picture, place, channel. `time`: sample, nine changes, channel."""
        changes = (self.change + time)[:, :, None, None].unbind(1)
        shape = x.shape[:3]
        inner = self.norms[0](x) * (1 + changes[1]) + changes[0]
        x = x + changes[2] * self.within(inner.flatten(0, 1)).unflatten(0, shape[:2])
        inner = (self.norms[1](x) * (1 + changes[4]) + changes[3]).transpose(1, 2)
        x = x + changes[5] * self.between(inner.flatten(0, 1)).unflatten(0, (shape[0], shape[2])).transpose(1, 2)
        x = x + self.read(x.flatten(1, 2), text).unflatten(1, shape[1:])
        inner = self.norms[2](x) * (1 + changes[7]) + changes[6]
        return x + changes[8] * self.step(inner)


class Films(nn.Module):
    """The speed of noisy latent films on their way to clean ones, given a text."""

    def __init__(
        self, width: int = 1152, depth: int = 24, heads: int = 16, channels: int = 4, side: int = 16, length: int = 16
    ) -> None:
        super().__init__()
        self.width, self.side = width, side
        self.patches = nn.Conv2d(channels, width, 2, 2)
        self.places = nn.Parameter(torch.randn(side * side, width) * 0.02)
        self.moments = nn.Parameter(torch.randn(length, 1, width) * 0.02)
        self.text = nn.Sequential(nn.Linear(1024, width), nn.GELU(approximate="tanh"), nn.Linear(width, width))
        self.time = nn.Sequential(nn.Linear(256, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU())
        self.changes = nn.Linear(width, 9 * width)
        self.blocks = nn.ModuleList(FilmBlock(width, heads) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 4 * channels)

    def forward(self, films: Tensor, times: Tensor, text: Tensor) -> Tensor:
        """`films`: sample, picture, channel, row, column."""
        x = self.patches(films.flatten(0, 1)).flatten(2).transpose(1, 2).unflatten(0, films.shape[:2])
        x = x + self.places + self.moments
        time = self.changes(self.time(wave_features(1000 * times, 256).to(x.dtype))).unflatten(-1, (9, -1))
        text = self.text(text.to(x.dtype))
        for block in self.blocks:
            x = block(x, text, time)
        found = self.head(self.norm(x)).unflatten(2, (self.side, self.side)).unflatten(-1, (2, 2, -1))
        return found.permute(0, 1, 6, 2, 4, 3, 5).flatten(3, 4).flatten(4, 5)


class ViewUnit(nn.Module):
    """Two convolutions with group norms and a way around them."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *(nn.Conv2d(before, after, 3, stride, 1, bias=False), nn.GroupNorm(after // 16, after), nn.ReLU()),
            *(nn.Conv2d(after, after, 3, padding=1, bias=False), nn.GroupNorm(after // 16, after)),
        )
        self.around = nn.Sequential()
        if stride > 1 or before != after:
            self.around.extend((nn.Conv2d(before, after, 1, stride, bias=False), nn.GroupNorm(after // 16, after)))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.around(x) + self.body(x))


class View(nn.Module):
    """Where things are in a picture: a residual network, then the mean place of each of its features."""

    def __init__(self, points: int = 32) -> None:
        super().__init__()
        units = [ViewUnit(64, 64, 1), ViewUnit(64, 64, 1)]
        for before, after in pairwise((64, 128, 256, 512)):
            units += [ViewUnit(before, after, 2), ViewUnit(after, after, 1)]
        self.body = nn.Sequential(
            *(nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.GroupNorm(4, 64), nn.ReLU(), nn.MaxPool2d(3, 2, 1)),
            *(*units, nn.Conv2d(512, points, 1)),
        )

    def forward(self, pictures: Tensor) -> Tensor:
        x = self.body(pictures)
        shares = x.flatten(2).softmax(dim=-1).unflatten(-1, x.shape[2:])
        rows, columns = (torch.linspace(-1, 1, size, device=x.device, dtype=x.dtype) for size in x.shape[2:])
        return torch.cat(((shares.sum(dim=3) * rows).sum(dim=-1), (shares.sum(dim=2) * columns).sum(dim=-1)), dim=-1)


class MoveUnit(nn.Module):
    """Two convolutions along the moves; what was seen scales and shifts the channels between them."""

    def __init__(self, before: int, after: int, seen: int, kernel: int = 5) -> None:
        super().__init__()
        self.first, self.second = self._layer(before, after, kernel), self._layer(after, after, kernel)
        self.change = nn.Sequential(nn.Mish(), nn.Linear(seen, 2 * after))
        self.around = nn.Conv1d(before, after, 1) if before != after else nn.Identity()

    @staticmethod
    def _layer(before: int, after: int, kernel: int) -> nn.Sequential:
        return nn.Sequential(nn.Conv1d(before, after, kernel, padding=kernel // 2), nn.GroupNorm(8, after), nn.Mish())

    def forward(self, x: Tensor, seen: Tensor) -> Tensor:
        scale, shift = self.change(seen)[..., None].chunk(2, dim=1)
        return self.second(self.first(x) * scale + shift) + self.around(x)


class Robots(nn.Module):
    """The noise in a robot's next moves, given what its cameras see: a U-Net along the moves."""

    def __init__(
        self,
        cameras: int = 2,
        moments: int = 2,
        joints: int = 9,
        moves: int = 10,
        widths: tuple[int, ...] = (512, 1024, 2048),
    ) -> None:
        super().__init__()
        self.views = nn.ModuleList(View() for _ in range(cameras))
        self.time = nn.Sequential(nn.Linear(128, 512), nn.Mish(), nn.Linear(512, 128))
        seen = moments * (64 * cameras + joints) + 128
        self.down = nn.ModuleList(
            nn.ModuleList((MoveUnit(before, after, seen), MoveUnit(after, after, seen)))
            for before, after in pairwise((moves, *widths))
        )
        self.smaller = nn.ModuleList(nn.Conv1d(width, width, 3, 2, 1) for width in widths[:-1])
        self.middle = nn.ModuleList(MoveUnit(widths[-1], widths[-1], seen) for _ in range(2))
        self.up = nn.ModuleList(
            nn.ModuleList((MoveUnit(2 * before, after, seen), MoveUnit(after, after, seen)))
            for before, after in pairwise(widths[::-1])
        )
        self.larger = nn.ModuleList(nn.ConvTranspose1d(width, width, 4, 2, 1) for width in widths[-2::-1])
        self.head = nn.Sequential(
            *(nn.Conv1d(widths[0], widths[0], 5, padding=2), nn.GroupNorm(8, widths[0]), nn.Mish()),
            nn.Conv1d(widths[0], moves, 1),
        )

    def forward(self, views: Tensor, joints: Tensor, moves: Tensor, times: Tensor) -> Tensor:
        """`views`: sample, moment, camera, channel, row, column."""
        points = [
            view(pictures.flatten(0, 1)).unflatten(0, pictures.shape[:2])
            for view, pictures in zip(self.views, views.unbind(2), strict=True)
        ]
        time = self.time(wave_features(times, 128).to(joints.dtype))
        seen = torch.cat((torch.cat((*points, joints), dim=-1).flatten(1), time), dim=-1)
        x, kept = moves.transpose(1, 2), []
        for place, units in enumerate(self.down):
            for unit in units:
                x = unit(x, seen)
            kept.append(x)
            if place < len(self.smaller):
                x = self.smaller[place](x)
        for unit in self.middle:
            x = unit(x, seen)
        for units, larger in zip(self.up, self.larger, strict=True):
            x = torch.cat((x, kept.pop()), dim=1)
            for unit in units:
                x = unit(x, seen)
            x = larger(x)
        return self.head(x).transpose(1, 2)


class DeltaMemory(nn.Module):
    """A matrix for each head that each token corrects at its key, computed in chunks: linear attention."""

    def __init__(self, width: int, heads: int, chunk: int = 128, kernel: int = 4) -> None:
        super().__init__()
        self.heads, self.chunk = heads, chunk
        self.joint, self.strength = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, heads, bias=False)
        self.short = nn.Conv1d(3 * width, 3 * width, kernel, padding=kernel - 1, groups=3 * width, bias=False)
        self.norm, self.out = nn.RMSNorm(width // heads), nn.Linear(width, width, bias=False)

    def _chunks(self, x: Tensor) -> Tensor:
        """Sample, head, chunk, place, channel."""
        return x.unflatten(1, (-1, self.chunk)).permute(0, 3, 1, 2, 4)

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        mixed = F.silu(self.short(self.joint(x).transpose(1, 2))[..., :length]).transpose(1, 2)
        q, k, v = mixed.unflatten(-1, (3, self.heads, -1)).unbind(2)
        q, k = F.normalize(q, dim=-1) * q.shape[-1] ** -0.5, F.normalize(k, dim=-1)
        q, k, v = (self._chunks(part) for part in (q, k, v))
        strength = self._chunks(self.strength(x).sigmoid()[..., None])
        keys = k * strength
        links, both = (keys @ k.transpose(-1, -2)).tril(-1), torch.cat((keys, v * strength), dim=-1)
        solved = torch.linalg.solve_triangular(links.float(), both.float(), upper=False, unitriangular=True)
        erased, written = solved.to(k.dtype).chunk(2, dim=-1)
        scores = (q @ k.transpose(-1, -2)).tril()
        state = k.new_zeros(*k.shape[:2], k.shape[-1], v.shape[-1])
        found = []
        for place in range(k.shape[2]):
            fresh = written[:, :, place] - erased[:, :, place] @ state
            found.append(q[:, :, place] @ state + scores[:, :, place] @ fresh)
            state = state + k[:, :, place].transpose(-1, -2) @ fresh
        result = torch.stack(found, dim=2).permute(0, 2, 3, 1, 4).flatten(1, 2)
        return self.out(self.norm(result).flatten(2))


class GatedStep(nn.Module):
    """A feed-forward part with a gate."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.joint, self.down = nn.Linear(width, 2 * inner, bias=False), nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.joint(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * value)


class AssociationBlock(nn.Module):
    def __init__(self, width: int, heads: int, inner: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2))
        self.memory, self.step = DeltaMemory(width, heads), GatedStep(width, inner)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.memory(self.norms[0](x))
        return x + self.step(self.norms[1](x))


class Associations(nn.Module):
    """A language model of memories that are corrected token by token."""

    def __init__(self, vocabulary: int, width: int = 2048, depth: int = 18, heads: int = 16, inner: int = 5632) -> None:
        super().__init__()
        self.words = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(AssociationBlock(width, heads, inner) for _ in range(depth))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.words(input_ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Letters(nn.Module):
    """Vectors of words from their letters: convolutions of many lengths, their maxima, and gated layers."""

    def __init__(self, letters: int, width: int, filters: tuple[tuple[int, int], ...], depth: int = 2) -> None:
        super().__init__()
        wide = sum(count for _, count in filters)
        self.letters = nn.Embedding(letters, 16)
        self.filters = nn.ModuleList(nn.Conv1d(16, count, kernel) for kernel, count in filters)
        self.gated = nn.ModuleList(nn.Linear(wide, 2 * wide) for _ in range(depth))
        self.out = nn.Linear(wide, width)

    def forward(self, letters: Tensor) -> Tensor:
        """`letters`: word, letter."""
        x = self.letters(letters).transpose(1, 2)
        x = torch.cat([F.relu(layer(x).amax(dim=-1)) for layer in self.filters], dim=-1)
        for layer in self.gated:
            value, gate = layer(x).chunk(2, dim=-1)
            gate = gate.sigmoid()
            x = gate * F.relu(value) + (1 - gate) * x
        return self.out(x)


class Direction(nn.Module):
    """Recurrent layers with projections, the second added to the first."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.first = nn.LSTM(width, inner, proj_size=width, batch_first=True)
        self.second = nn.LSTM(width, inner, proj_size=width, batch_first=True)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(self.drop(x))[0]
        return x + self.second(self.drop(x))[0]


class Spelling(nn.Module):
    """A language model in both directions that reads words letter by letter."""

    def __init__(
        self,
        words: int,
        letters: int = 262,
        width: int = 512,
        inner: int = 4096,
        filters: tuple[tuple[int, int], ...] = ((1, 32), (2, 32), (3, 64), (4, 128), (5, 256), (6, 512), (7, 1024)),
    ) -> None:
        super().__init__()
        self.read = Letters(letters, width, filters)
        self.forwards, self.backwards = Direction(width, inner), Direction(width, inner)
        self.head = nn.Linear(width, words)

    def forward(self, letters: Tensor) -> tuple[Tensor, Tensor]:
        """Logits of the word after each but the last, and of the word before each but the first."""
        x = self.read(letters.flatten(0, 1)).unflatten(0, letters.shape[:2])
        after = self.forwards(x[:, :-1])
        before = self.backwards(x[:, 1:].flip(1)).flip(1)
        return self.head(after), self.head(before)


class ShuffleUnit(nn.Module):
    """Half of the channels pass through narrow convolutions, the other half around them; then both are shuffled."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.stride, half = stride, after // 2
        inputs = before if stride > 1 else half
        self.through = nn.Sequential(
            *(nn.Conv2d(inputs, half, 1, bias=False), nn.BatchNorm2d(half), nn.ReLU(inplace=True)),
            *(nn.Conv2d(half, half, 3, stride, 1, groups=half, bias=False), nn.BatchNorm2d(half)),
            *(nn.Conv2d(half, half, 1, bias=False), nn.BatchNorm2d(half), nn.ReLU(inplace=True)),
        )
        self.around = nn.Sequential()
        if stride > 1:
            self.around.extend(
                (
                    *(nn.Conv2d(before, before, 3, stride, 1, groups=before, bias=False), nn.BatchNorm2d(before)),
                    *(nn.Conv2d(before, half, 1, bias=False), nn.BatchNorm2d(half), nn.ReLU(inplace=True)),
                )
            )

    def forward(self, x: Tensor) -> Tensor:
        kept, moved = (x, x) if self.stride > 1 else x.chunk(2, dim=1)
        joined = torch.cat((self.around(kept), self.through(moved)), dim=1)
        return joined.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)


class Shuffles(nn.Sequential):
    """Images on small devices."""

    def __init__(
        self,
        widths: tuple[int, ...] = (244, 488, 976),
        depths: tuple[int, ...] = (4, 8, 4),
        wide: int = 2048,
        labels: int = 1000,
    ) -> None:
        units = []
        for (before, after), depth in zip(pairwise((24, *widths)), depths, strict=True):
            units += [ShuffleUnit(before, after, 2), *(ShuffleUnit(after, after, 1) for _ in range(depth - 1))]
        super().__init__(
            *(nn.Conv2d(3, 24, 3, 2, 1, bias=False), nn.BatchNorm2d(24), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)),
            *units,
            *(nn.Conv2d(widths[-1], wide, 1, bias=False), nn.BatchNorm2d(wide), nn.ReLU(inplace=True)),
            *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(wide, labels)),
        )


def heard(before: int, after: int, kernel: int = 1, rate: int = 1) -> nn.Sequential:
    convolution = nn.Conv1d(before, after, kernel, padding=rate * (kernel // 2), dilation=rate)
    return nn.Sequential(convolution, nn.ReLU(), nn.BatchNorm1d(after))


class VoiceUnit(nn.Module):
    """Parts of the channels, each of which also hears the part before it; then channels are weighed by their means."""

    def __init__(self, width: int, rate: int, parts: int = 8, small: int = 128) -> None:
        super().__init__()
        self.parts = parts
        self.into, self.out = heard(width, width), heard(width, width)
        self.steps = nn.ModuleList(heard(width // parts, width // parts, 3, rate) for _ in range(parts - 1))
        self.weigh = nn.Sequential(
            *(nn.AdaptiveAvgPool1d(1), nn.Conv1d(width, small, 1), nn.ReLU()),
            *(nn.Conv1d(small, width, 1), nn.Sigmoid()),
        )

    def forward(self, x: Tensor) -> Tensor:
        first, *others = self.into(x).chunk(self.parts, dim=1)
        found = [first]
        for place, (step, part) in enumerate(zip(self.steps, others, strict=True)):
            found.append(step(part + found[-1] if place else part))
        inner = self.out(torch.cat(found, dim=1))
        return x + inner * self.weigh(inner)


class Voices(nn.Module):
    """Who speaks: dilated convolutions, weighted means and deviations over time, and angles to known speakers."""

    def __init__(
        self, bands: int = 80, width: int = 1024, speakers: int = 7205, small: int = 128, margin: float = 0.2
    ) -> None:
        super().__init__()
        wide = 3 * width // 2
        self.margin, self.scale = margin, 30.0
        self.begin = heard(bands, width, 5)
        self.units = nn.ModuleList(VoiceUnit(width, rate) for rate in (2, 3, 4))
        self.join = nn.Sequential(nn.Conv1d(3 * width, wide, 1), nn.ReLU())
        self.listen = nn.Sequential(
            *(nn.Conv1d(3 * wide, small, 1), nn.ReLU(), nn.BatchNorm1d(small), nn.Tanh(), nn.Conv1d(small, wide, 1)),
        )
        self.project = nn.Sequential(nn.BatchNorm1d(2 * wide), nn.Linear(2 * wide, 192), nn.BatchNorm1d(192))
        self.speakers = nn.Parameter(torch.empty(speakers, 192))
        nn.init.xavier_normal_(self.speakers)

    def forward(self, sounds: Tensor, who: Tensor) -> Tensor:
        """Scaled cosines, that of the right speaker with a margin."""
        x, found = self.begin(sounds), []
        for unit in self.units:
            found.append(unit(x))
            x = x + found[-1]
        x = self.join(torch.cat(found, dim=1))
        mean, deviation = x.mean(dim=-1, keepdim=True), x.var(dim=-1, keepdim=True).clamp(min=1e-4).sqrt()
        context = torch.cat((x, mean.expand_as(x), deviation.expand_as(x)), dim=1)
        shares = self.listen(context).softmax(dim=-1)
        mean = (shares * x).sum(dim=-1)
        deviation = ((shares * x.square()).sum(dim=-1) - mean.square()).clamp(min=1e-4).sqrt()
        voice = F.normalize(self.project(torch.cat((mean, deviation), dim=1)).float(), dim=-1)
        cosines = F.linear(voice, F.normalize(self.speakers.float(), dim=-1)).float()
        sines = (1 - cosines.square()).clamp(min=1e-6).sqrt()
        turned = cosines * math.cos(self.margin) - sines * math.sin(self.margin)
        right = F.one_hot(who, cosines.shape[-1]).bool()
        return self.scale * torch.where(right, turned, cosines)


class SoftMixture(nn.Module):
    """Experts whose inputs are means of all tokens, and tokens that are means of all results."""

    def __init__(self, width: int, experts: int, slots: int) -> None:
        super().__init__()
        self.slots = nn.Parameter(torch.randn(width, experts, slots) * width**-0.5)
        self.scale = nn.Parameter(torch.ones(()))
        self.first = nn.Parameter(torch.randn(experts, width, 4 * width) * width**-0.5)
        self.second = nn.Parameter(torch.randn(experts, 4 * width, width) * (4 * width) ** -0.5)
        self.first_bias = nn.Parameter(torch.zeros(experts, 1, 4 * width))
        self.second_bias = nn.Parameter(torch.zeros(experts, 1, width))

    def forward(self, x: Tensor) -> Tensor:
        wanted = self.scale * F.normalize(self.slots, dim=0)
        scores = torch.einsum("btw,wes->btes", F.normalize(x, dim=-1), wanted.to(x.dtype))
        given = torch.einsum("btes,btw->ebsw", scores.softmax(dim=1).to(x.dtype), x)
        inner = F.gelu(torch.baddbmm(self.first_bias, given.flatten(1, 2), self.first))
        done = torch.baddbmm(self.second_bias, inner, self.second).unflatten(1, given.shape[1:3])
        taken = scores.flatten(2).softmax(dim=-1).unflatten(-1, scores.shape[2:]).to(x.dtype)
        return torch.einsum("btes,ebsw->btw", taken, done)


class SoftBlock(nn.Module):
    """Attention, and a mixture or a plain feed-forward part."""

    def __init__(self, width: int, heads: int, experts: int, slots: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.joint, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        plain = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.step = SoftMixture(width, experts, slots) if experts else plain

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.joint(self.norms[0](x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.step(self.norms[1](x))


class SoftExperts(nn.Module):
    """Images by a vision transformer with soft mixtures of experts in its second half."""

    def __init__(
        self, width: int = 768, depth: int = 12, heads: int = 12, experts: int = 32, slots: int = 6, labels: int = 1000
    ) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 16, 16)
        self.places = nn.Parameter(torch.randn(196, width) * 0.02)
        self.blocks = nn.ModuleList(
            SoftBlock(width, heads, experts if place >= depth // 2 else 0, slots) for place in range(depth)
        )
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, labels)

    def forward(self, pictures: Tensor) -> Tensor:
        x = self.patches(pictures).flatten(2).transpose(1, 2) + self.places
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(dim=1))


class PooledAttention(nn.Module):
    """Attention over a clip whose queries, keys and values are pooled by strided convolutions first."""

    def __init__(self, before: int, after: int, heads: int, queries: int, keys: int) -> None:
        super().__init__()
        self.heads, wide = heads, after // heads
        self.joint, self.out = nn.Linear(before, 3 * after), nn.Linear(after, after)
        strides = (queries, keys, keys)
        self.pools = nn.ModuleList(
            nn.Conv3d(wide, wide, 3, (1, stride, stride), 1, groups=wide, bias=False) for stride in strides
        )
        self.norms = nn.ModuleList(nn.LayerNorm(wide) for _ in strides)

    def forward(self, x: Tensor) -> Tensor:
        """`x`: sample, moment, row, column, channel."""
        parts = self.joint(x).unflatten(-1, (3, self.heads, -1)).permute(4, 0, 5, 6, 1, 2, 3).unbind(0)
        pooled = []
        for part, pool, norm in zip(parts, self.pools, self.norms, strict=True):
            found = pool(part.flatten(0, 1))
            pooled.append((norm(found.permute(0, 2, 3, 4, 1)).unflatten(0, part.shape[:2]), found.shape[2:]))
        (q, shape), (k, _), (v, _) = pooled
        q, k, v = (part.flatten(2, 4) for part in (q, k, v))
        found = q + F.scaled_dot_product_attention(q, k, v)
        return self.out(found.transpose(1, 2).flatten(2)).unflatten(1, shape)


class PooledBlock(nn.Module):
    """Pooled attention and a feed-forward part; the way around the attention is pooled by maxima."""

    def __init__(self, before: int, after: int, heads: int, queries: int, keys: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList((nn.LayerNorm(before), nn.LayerNorm(after)))
        self.attention = PooledAttention(before, after, heads, queries, keys)
        self.around = nn.Linear(before, after) if before != after else nn.Identity()
        self.pool = nn.MaxPool3d((1, 3, 3), (1, 2, 2), (0, 1, 1)) if queries > 1 else nn.Identity()
        self.step = nn.Sequential(nn.Linear(after, 4 * after), nn.GELU(), nn.Linear(4 * after, after))

    def forward(self, x: Tensor) -> Tensor:
        inner = self.norms[0](x)
        kept = self.around(inner) if isinstance(self.around, nn.Linear) else x
        kept = self.pool(kept.permute(0, 4, 1, 2, 3)).permute(0, 2, 3, 4, 1)
        x = kept + self.attention(inner)
        return x + self.step(self.norms[1](x))


class PooledClips(nn.Module):
    """What happens in a clip: a transformer whose clips become smaller and wider on the way."""

    def __init__(self, width: int = 96, depths: tuple[int, ...] = (1, 2, 11, 2), labels: int = 400) -> None:
        super().__init__()
        self.patches = nn.Conv3d(3, width, (3, 7, 7), (2, 4, 4), (1, 3, 3))
        self.moments = nn.Parameter(torch.randn(8, 1, 1, width) * 0.02)
        self.places = nn.Parameter(torch.randn(56, 56, width) * 0.02)
        blocks, before = [], width
        for level, depth in enumerate(depths):
            for place in range(depth):
                after, queries = width * 2**level, 2 if level and not place else 1
                blocks.append(PooledBlock(before, after, 2**level, queries, 8 // 2**level))
                before = after
        self.blocks = nn.ModuleList(blocks)
        self.norm, self.head = nn.LayerNorm(before), nn.Linear(before, labels)

    def forward(self, clips: Tensor) -> Tensor:
        x = self.patches(clips).permute(0, 2, 3, 4, 1) + self.moments + self.places
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(dim=(1, 2, 3)))


class Divided(nn.Module):
    """Each channel over the root of a weighted sum of all channels' squares, or times it."""

    def __init__(self, width: int, times: bool = False) -> None:
        super().__init__()
        self.times = times
        self.least = nn.Parameter(torch.ones(width))
        self.weights = nn.Parameter(0.1 * torch.eye(width) + 1e-4)

    def forward(self, x: Tensor) -> Tensor:
        weights = self.weights.abs()[..., None, None]
        sizes = F.conv2d(x.square(), weights, self.least.abs() + 1e-6)
        return x * (sizes.sqrt() if self.times else sizes.rsqrt())


class Heights(nn.Module):
    """The share of numbers below a level, learnt for each channel apart."""

    def __init__(self, channels: int, widths: tuple[int, ...] = (3, 3, 3)) -> None:
        super().__init__()
        sizes = list(pairwise((1, *widths, 1)))
        self.weights = nn.ParameterList(
            torch.randn(channels, after, before) * 0.1 + math.log(math.expm1(1 / after)) for before, after in sizes
        )
        self.biases = nn.ParameterList(torch.rand(channels, after, 1) - 0.5 for _, after in sizes)
        self.bends = nn.ParameterList(torch.zeros(channels, after, 1) for _, after in sizes[:-1])

    def below(self, levels: Tensor) -> Tensor:
        """Logits. `levels`: channel, one, number."""
        x = levels
        for place, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            x = F.softplus(weight) @ x + bias
            if place < len(self.bends):
                x = x + self.bends[place].tanh() * x.tanh()
        return x

    def forward(self, x: Tensor) -> Tensor:
        """How likely each number is, within a half of it. `x`: sample, channel, row, column."""
        levels = x.transpose(0, 1).flatten(1)[:, None]
        low, high = self.below(levels - 0.5), self.below(levels + 0.5)
        chance = (high.sigmoid() - low.sigmoid()).abs().squeeze(1)
        return chance.unflatten(1, (len(x), *x.shape[2:])).transpose(0, 1)


class Compressed(nn.Module):
    """Pictures to few bits and back: a code, the spread of each of its numbers as a second code, and their costs."""

    def __init__(self, width: int = 192, wide: int = 320) -> None:
        super().__init__()
        self.into = nn.Sequential(
            *(self._smaller(3, width), Divided(width), self._smaller(width, width), Divided(width)),
            *(self._smaller(width, width), Divided(width), self._smaller(width, wide)),
        )
        self.out = nn.Sequential(
            *(self._larger(wide, width), Divided(width, True), self._larger(width, width), Divided(width, True)),
            *(self._larger(width, width), Divided(width, True), self._larger(width, 3)),
        )
        self.describe = nn.Sequential(
            *(nn.Conv2d(wide, width, 3, padding=1), nn.LeakyReLU(), self._smaller(width, width), nn.LeakyReLU()),
            self._smaller(width, width),
        )
        self.expect = nn.Sequential(
            *(self._larger(width, wide), nn.LeakyReLU(), self._larger(wide, wide * 3 // 2), nn.LeakyReLU()),
            nn.Conv2d(wide * 3 // 2, 2 * wide, 3, padding=1),
        )
        self.heights = Heights(width)

    @staticmethod
    def _smaller(before: int, after: int) -> nn.Conv2d:
        return nn.Conv2d(before, after, 5, 2, 2)

    @staticmethod
    def _larger(before: int, after: int) -> nn.ConvTranspose2d:
        return nn.ConvTranspose2d(before, after, 5, 2, 2, output_padding=1)

    @staticmethod
    def _rounded(x: Tensor) -> Tensor:
        """Noise in place of rounding, as far as rounding goes."""
        return x + torch.rand_like(x) - 0.5

    def forward(self, pictures: Tensor) -> tuple[Tensor, Tensor]:
        """The pictures again, and the bits of each."""
        code = self.into(pictures)
        second = self._rounded(self.describe(code))
        middle, spread = self.expect(second).chunk(2, dim=1)
        code = self._rounded(code)
        apart, spread = (code - middle).abs(), F.softplus(spread).clamp(min=0.11)
        near, far = (torch.erfc((apart + side) / (spread * 2**0.5)) for side in (-0.5, 0.5))
        chances = (0.5 * (near - far), self.heights(second))
        bits = [-chance.clamp(min=1e-9).log2().sum(dim=(1, 2, 3)) for chance in chances]
        return self.out(code), bits[0] + bits[1]


class ProductKeys(nn.Module):
    """A large table read at few rows, found as the best pairs of two halves of keys."""

    def __init__(self, width: int, table: nn.EmbeddingBag, side: int, heads: int, small: int, best: int) -> None:
        super().__init__()
        self.heads, self.side, self.best = heads, side, best
        self.table = table
        self.query, self.norm = nn.Linear(width, heads * small), nn.LayerNorm(small)
        self.keys = nn.Parameter(torch.randn(2, heads, side, small // 2) * small**-0.5)
        self.gate, self.out = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        halves = self.norm(self.query(x).unflatten(-1, (self.heads, -1))).chunk(2, dim=-1)
        found = [
            torch.einsum("blhs,hks->blhk", half, keys.to(half.dtype)).float().topk(self.best, dim=-1)
            for half, keys in zip(halves, self.keys, strict=True)
        ]
        (first, rows), (second, columns) = found
        scores, chosen = (first[..., :, None] + second[..., None, :]).flatten(-2).topk(self.best, dim=-1)
        row, column = chosen // self.best, chosen % self.best
        places = rows.gather(-1, row) * self.side + columns.gather(-1, column)
        weights = scores.softmax(dim=-1)
        weights = weights.to(self.table.weight.dtype).flatten(2).flatten(0, 1)
        read = self.table(places.flatten(2).flatten(0, 1), per_sample_weights=weights)
        return self.out(read.to(x.dtype).view_as(x) * F.silu(self.gate(x)))


class ProductKeyBlock(nn.Module):
    """Causal attention with rotated queries and keys, then a table or a feed-forward part."""

    def __init__(self, width: int, heads: int, step: nn.Module) -> None:
        super().__init__()
        self.heads, self.step = heads, step
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2))
        self.joint, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)

    @staticmethod
    def _rotated(x: Tensor, angles: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        q, k, v = self.joint(self.norms[0](x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        q, k = self._rotated(q, angles), self._rotated(k, angles)
        found = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(found.transpose(1, 2).flatten(2))
        return x + self.step(self.norms[1](x))


class ProductKeyWords(nn.Module):
    """A language model with one large table that three of its blocks read in place of a feed-forward part."""

    def __init__(
        self,
        vocabulary: int,
        width: int = 1536,
        depth: int = 18,
        heads: int = 12,
        side: int = 512,
        readers: tuple[int, ...] = (5, 10, 15),
    ) -> None:
        super().__init__()
        self.wide = width // heads
        self.words = nn.Embedding(vocabulary, width)
        table = nn.EmbeddingBag(side * side, width, mode="sum")
        nn.init.normal_(table.weight, std=width**-0.5)
        self.blocks = nn.ModuleList(
            ProductKeyBlock(
                width,
                heads,
                ProductKeys(width, table, side, 4, 512, 32) if place in readers else GatedStep(width, 4096),
            )
            for place in range(depth)
        )
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        rates = 10000 ** (-torch.arange(0, self.wide, 2, device=input_ids.device) / self.wide)
        angles = torch.arange(input_ids.shape[1], device=input_ids.device)[:, None] * rates
        x = self.words(input_ids)
        for block in self.blocks:
            x = block(x, angles)
        return self.head(self.norm(x))
