"""Plain PyTorch models of the fifth round: pictures, scenes, faces, proteins, equations, speech, cars and genomes."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm


class FeatureClassifier(nn.Module):
    """A vision transformer of transformers without a head of its own, and a linear layer on its first token."""

    def __init__(self, features: nn.Module, width: int, labels: int) -> None:
        super().__init__()
        self.features, self.head = features, nn.Linear(width, labels)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.features(pixel_values=images).pooler_output)


def squash(x: Tensor) -> Tensor:
    """Shrink vectors to a length below one, and keep their direction."""
    squares = x.square().sum(dim=-1, keepdim=True)
    return x * squares / ((1 + squares) * (squares + 1e-8).sqrt())


class Capsules(nn.Module):
    """Image classes as lengths of vectors, which agree with the vectors of parts in three rounds of routing."""

    def __init__(self, side: int, labels: int, width: int = 256, kinds: int = 32, rounds: int = 3) -> None:
        super().__init__()
        grid = (side - 16 + 1) // 2
        self.rounds, self.side = rounds, side
        self.begin, self.parts = nn.Conv2d(3, width, 9), nn.Conv2d(width, 8 * kinds, 9, 2)
        self.votes = nn.Parameter(torch.randn(labels, kinds * grid**2, 8, 16) * 0.02)
        self.rebuild = nn.Sequential(
            nn.Linear(16 * labels, 512), nn.ReLU(), nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 3 * side**2)
        )

    def forward(self, images: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
        parts = squash(
            self.parts(F.relu(self.begin(images))).unflatten(1, (-1, 8)).permute(0, 1, 3, 4, 2).flatten(1, 3)
        )
        votes = torch.einsum("bpi,lpio->blpo", parts, self.votes)
        still, agreement = votes.detach(), votes.new_zeros(votes.shape[:3])
        for _ in range(self.rounds - 1):
            wholes = squash((agreement.softmax(dim=1)[..., None] * still).sum(dim=2))
            agreement = agreement + (still * wholes[:, :, None]).sum(dim=-1)
        wholes = squash((agreement.softmax(dim=1)[..., None] * votes).sum(dim=2))
        kept = wholes * F.one_hot(wanted, wholes.shape[1]).to(wholes.dtype)[..., None]
        return (wholes.square().sum(dim=-1) + 1e-8).sqrt(), torch.sigmoid(self.rebuild(kept.flatten(1)))


class HashGrid(nn.Module):
    """Features of places in a cube, from tables at several resolutions whose rows are found by hashing."""

    PRIMES = (1, 2654435761, 805459861)

    def __init__(self, levels: int, rows: int, width: int, coarsest: int = 16, finest: int = 2048) -> None:
        super().__init__()
        growth = (finest / coarsest) ** (1 / (levels - 1))
        self.sizes, self.rows = [int(coarsest * growth**level) for level in range(levels)], rows
        self.tables = nn.ModuleList(nn.Embedding(rows, width) for _ in range(levels))

    def forward(self, places: Tensor) -> Tensor:
        found, axes = [], torch.arange(3, device=places.device)
        corners = (torch.arange(8, device=places.device)[:, None] >> axes) & 1
        for size, table in zip(self.sizes, self.tables, strict=True):
            scaled = places * size
            low = scaled.floor()
            apart = (scaled - low)[:, None]
            shares = torch.where(corners == 1, apart, 1 - apart).prod(dim=-1, keepdim=True)
            x, y, z = (low.long()[:, None] + corners).unbind(-1)
            hashed = (x * self.PRIMES[0]) ^ (y * self.PRIMES[1]) ^ (z * self.PRIMES[2])
            found.append((table(hashed % self.rows) * shares).sum(dim=1))
        return torch.cat(found, dim=-1)


class HashField(nn.Module):
    """Colours of rays through a scene that is kept in hash tables and two small networks."""

    def __init__(self, points: int, levels: int = 16, rows: int = 2**19, width: int = 64) -> None:
        super().__init__()
        self.points, self.grid = points, HashGrid(levels, rows, 2)
        self.density = nn.Sequential(nn.Linear(2 * levels, width), nn.ReLU(), nn.Linear(width, 16))
        self.colour = nn.Sequential(
            *(nn.Linear(16 + 9, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 3))
        )

    def forward(self, begin: Tensor, way: Tensor) -> Tensor:
        way = F.normalize(way, dim=-1)
        depths = torch.linspace(0.05, 1, self.points, device=way.device)
        places = torch.sigmoid(begin[:, None] + way[:, None] * depths[:, None])
        inner = self.density(self.grid(places.flatten(0, 1)))
        products = (way[:, :, None] * way[:, None, :]).flatten(1)
        seen = products[:, None].expand(-1, self.points, -1).flatten(0, 1)
        colours = torch.sigmoid(self.colour(torch.cat((inner, seen), dim=-1))).unflatten(0, (-1, self.points))
        thickness = F.softplus(inner[:, 0]).unflatten(0, (-1, self.points)) / self.points
        passed = torch.exp(-(thickness.cumsum(dim=1) - thickness))
        return ((passed * (1 - torch.exp(-thickness)))[..., None] * colours).sum(dim=1)


class FaceUnit(nn.Module):
    """Two convolutions between batch norms, with a parametric ReLU."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.BatchNorm2d(before),
            nn.Conv2d(before, after, 3, 1, 1, bias=False),
            nn.BatchNorm2d(after),
            nn.PReLU(after),
            nn.Conv2d(after, after, 3, stride, 1, bias=False),
            nn.BatchNorm2d(after),
        )
        self.around = (
            nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after))
            if stride > 1
            else nn.Identity()
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x) + self.around(x)


class Faces(nn.Module):
    """Faces as unit vectors, and their angles to the centres of many people, the right one with a margin."""

    def __init__(self, people: int, depths: tuple[int, ...] = (3, 13, 30, 3), margin: float = 0.5) -> None:
        super().__init__()
        self.begin = nn.Sequential(nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.BatchNorm2d(64), nn.PReLU(64))
        sizes = (64, 64, 128, 256, 512)
        self.units = nn.Sequential(
            *(
                FaceUnit(before if place == 0 else after, after, 2 if place == 0 else 1)
                for (before, after), depth in zip(pairwise(sizes), depths, strict=True)
                for place in range(depth)
            )
        )
        self.end = nn.Sequential(
            *(nn.BatchNorm2d(512), nn.Dropout(0.4), nn.Flatten(), nn.Linear(512 * 49, 512), nn.BatchNorm1d(512))
        )
        self.centres = nn.Parameter(torch.randn(people, 512) * 0.01)
        self.margin = margin

    def forward(self, images: Tensor, people: Tensor) -> Tensor:
        vectors = self.end(self.units(self.begin(images)))
        cosines = F.linear(F.normalize(vectors), F.normalize(self.centres)).float().clamp(-1 + 1e-6, 1 - 1e-6)
        right = cosines.gather(1, people[:, None])
        moved = right * math.cos(self.margin) - (1 - right.square()).sqrt() * math.sin(self.margin)
        return 64 * cosines.scatter(1, people[:, None], moved)


def normed(convolution: nn.Module, width: int) -> nn.Sequential:
    """A convolution of two or three dimensions and its batch norm."""
    flat = isinstance(convolution, nn.Conv2d)
    return nn.Sequential(convolution, nn.BatchNorm2d(width) if flat else nn.BatchNorm3d(width))


class Hourglass(nn.Module):
    """A volume to a quarter of its size a side and back, added to what came in."""

    def __init__(self, width: int) -> None:
        super().__init__()
        wide = 2 * width
        self.down = nn.ModuleList(
            nn.Sequential(
                *(normed(nn.Conv3d(before, wide, 3, 2, 1, bias=False), wide), nn.ReLU(inplace=True)),
                normed(nn.Conv3d(wide, wide, 3, 1, 1, bias=False), wide),
            )
            for before in (width, wide)
        )
        self.up = nn.ModuleList(
            normed(nn.ConvTranspose3d(wide, after, 3, 2, 1, 1, bias=False), after) for after in (wide, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        half = F.relu(self.down[0](x))
        quarter = F.relu(self.down[1](half))
        return self.up[1](F.relu(self.up[0](quarter) + half)) + x


class Stereo(nn.Module):
    """How far apart two cameras see each pixel: a volume of all shifts, stacked hourglasses, a mean over shifts."""

    def __init__(self, width: int = 32, shifts: int = 192, stacked: int = 3) -> None:
        super().__init__()
        self.shifts = shifts
        layers: list[nn.Module] = []
        for before, after, stride in ((3, width, 2), (width, width, 1), (width, 2 * width, 2)):
            layers += [normed(nn.Conv2d(before, after, 3, stride, 1, bias=False), after), nn.ReLU(inplace=True)]
        for rate in (1, 1, 2, 4):
            convolution = nn.Conv2d(2 * width, 2 * width, 3, 1, rate, rate, bias=False)
            layers += [normed(convolution, 2 * width), nn.ReLU(inplace=True)]
        self.features = nn.Sequential(*layers, nn.Conv2d(2 * width, width, 1, bias=False))
        self.begin = nn.Sequential(
            *(normed(nn.Conv3d(2 * width, width, 3, 1, 1, bias=False), width), nn.ReLU(inplace=True)),
            *(normed(nn.Conv3d(width, width, 3, 1, 1, bias=False), width), nn.ReLU(inplace=True)),
        )
        self.hourglasses = nn.ModuleList(Hourglass(width) for _ in range(stacked))
        self.ends = nn.ModuleList(
            nn.Sequential(
                *(normed(nn.Conv3d(width, width, 3, 1, 1, bias=False), width), nn.ReLU(inplace=True)),
                nn.Conv3d(width, 1, 3, 1, 1, bias=False),
            )
            for _ in range(stacked)
        )

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        a, b = self.features(left), self.features(right)
        batch, width, rows, columns = a.shape
        volume = a.new_zeros(batch, 2 * width, self.shifts // 4, rows, columns)
        for shift in range(self.shifts // 4):
            volume[:, :width, shift, :, shift:] = a[..., shift:]
            volume[:, width:, shift, :, shift:] = b[..., : columns - shift]
        x, found = self.begin(volume), []
        values = torch.arange(self.shifts, device=a.device, dtype=torch.float32)
        for hourglass, end in zip(self.hourglasses, self.ends, strict=True):
            x = hourglass(x)
            size = (self.shifts, *left.shape[2:])
            costs = F.interpolate(end(x), size=size, mode="trilinear", align_corners=False).squeeze(1)
            found.append(torch.einsum("bdhw,d->bhw", costs.float().softmax(dim=1), values))
        return torch.stack(found, dim=1)


class TriangleProduct(nn.Module):
    """Update of each pair by all thirds: sums over products of two other pairs."""

    def __init__(self, width: int, outgoing: bool) -> None:
        super().__init__()
        self.rule = "bikc,bjkc->bijc" if outgoing else "bkic,bkjc->bijc"
        self.norm, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.sides, self.gates = nn.Linear(width, 2 * width), nn.Linear(width, 2 * width)
        self.out, self.gate = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, pairs: Tensor) -> Tensor:
        x = self.norm(pairs)
        a, b = (self.sides(x) * torch.sigmoid(self.gates(x))).chunk(2, dim=-1)
        found = torch.einsum(self.rule, a, b)
        return self.out(self.after(found)) * torch.sigmoid(self.gate(x))


class TriangleAttention(nn.Module):
    """Attention among the pairs of one row or of one column, with a bias from the third pair."""

    def __init__(self, width: int, heads: int, columns: bool) -> None:
        super().__init__()
        self.heads, self.columns, self.norm = heads, columns, nn.LayerNorm(width)
        self.joint, self.bias = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, heads, bias=False)
        self.gate, self.out = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, pairs: Tensor) -> Tensor:
        x = self.norm(pairs.transpose(1, 2) if self.columns else pairs)
        q, k, v = self.joint(x).unflatten(-1, (3, self.heads, -1)).permute(3, 0, 1, 4, 2, 5)
        scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5 + self.bias(x).permute(0, 3, 1, 2)[:, None]
        found = (scores.softmax(dim=-1) @ v).transpose(2, 3).flatten(3)
        found = self.out(found * torch.sigmoid(self.gate(x)))
        return found.transpose(1, 2) if self.columns else found


class FoldingBlock(nn.Module):
    """Pairs of residues by triangles, then residues by attention with a bias from pairs."""

    def __init__(self, width: int, pair_width: int, heads: int) -> None:
        super().__init__()
        self.products = nn.ModuleList(TriangleProduct(pair_width, outgoing) for outgoing in (True, False))
        self.attentions = nn.ModuleList(TriangleAttention(pair_width, 4, columns) for columns in (False, True))
        self.pair_step, self.step = self._step(pair_width), self._step(width)
        self.heads, self.norm, self.pair_norm = heads, nn.LayerNorm(width), nn.LayerNorm(pair_width)
        self.joint, self.bias = nn.Linear(width, 3 * width), nn.Linear(pair_width, heads, bias=False)
        self.out = nn.Linear(width, width)

    @staticmethod
    def _step(width: int) -> nn.Sequential:
        return nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width))

    def forward(self, residues: Tensor, pairs: Tensor) -> tuple[Tensor, Tensor]:
        for update in (*self.products, *self.attentions, self.pair_step):
            pairs = pairs + update(pairs)
        q, k, v = self.joint(self.norm(residues)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        bias = self.bias(self.pair_norm(pairs)).permute(0, 3, 1, 2)
        weights = (q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5 + bias).softmax(dim=-1)
        residues = residues + self.out((weights @ v).transpose(1, 2).flatten(2))
        return residues + self.step(residues), pairs


class Folding(nn.Module):
    """Distances between the residues of a protein, in bins."""

    def __init__(self, width: int = 384, pair_width: int = 128, depth: int = 16, bins: int = 64) -> None:
        super().__init__()
        self.kinds, self.left, self.right = (nn.Embedding(21, size) for size in (width, pair_width, pair_width))
        self.apart = nn.Embedding(65, pair_width)
        self.blocks = nn.ModuleList(FoldingBlock(width, pair_width, 12) for _ in range(depth))
        self.head, self.kind_head = nn.Linear(pair_width, bins), nn.Linear(width, 21)

    def forward(self, kinds: Tensor) -> tuple[Tensor, Tensor]:
        places = torch.arange(kinds.shape[1], device=kinds.device)
        apart = (places[:, None] - places[None, :]).clamp(-32, 32) + 32
        residues = self.kinds(kinds)
        pairs = self.left(kinds)[:, :, None] + self.right(kinds)[:, None] + self.apart(apart)
        for block in self.blocks:
            residues, pairs = block(residues, pairs)
        return self.head(pairs + pairs.transpose(1, 2)), self.kind_head(residues)


class Equations(nn.Module):
    """How far a network's fluid is from the equations of its motion, by derivatives of the network itself."""

    def __init__(self, width: int, depth: int, viscosity: float = 0.01) -> None:
        super().__init__()
        self.viscosity = viscosity
        layers: list[nn.Module] = [nn.Linear(3, width), nn.Tanh()]
        for _ in range(depth - 1):
            layers += [nn.Linear(width, width), nn.Tanh()]
        self.net = nn.Sequential(*layers, nn.Linear(width, 3))

    def forward(self, points: Tensor, known: Tensor) -> tuple[Tensor, Tensor]:
        points = points.detach().requires_grad_()
        u, v, pressure = self.net(points).unbind(-1)
        u_t, u_x, u_y = self._slopes(u, points)
        v_t, v_x, v_y = self._slopes(v, points)
        _, p_x, p_y = self._slopes(pressure, points)
        curved = [
            self._slopes(first, points)[place] + self._slopes(second, points)[place + 1]
            for first, second, place in ((u_x, u_y, 1), (v_x, v_y, 1))
        ]
        along = u_t + u * u_x + v * u_y + p_x - self.viscosity * curved[0]
        across = v_t + u * v_x + v * v_y + p_y - self.viscosity * curved[1]
        return torch.stack((along, across, u_x + v_y), dim=-1), self.net(known)

    @staticmethod
    def _slopes(value: Tensor, points: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(value.sum(), points, create_graph=True)[0].unbind(-1)


class Transducer(nn.Module):
    """Speech to pieces of words: a recurrent encoder, a recurrent language model, and all pairs of their steps."""

    def __init__(self, bands: int, pieces: int, width: int = 1024, layers: int = 5, joint: int = 640) -> None:
        super().__init__()
        self.encoder = nn.LSTM(4 * bands, width, layers, batch_first=True, dropout=0.1)
        self.pieces, self.predictor = nn.Embedding(pieces, 512), nn.LSTM(512, 512, 2, batch_first=True)
        self.left, self.right = nn.Linear(width, joint), nn.Linear(512, joint)
        self.head = nn.Linear(joint, pieces)

    def forward(self, frames: Tensor, pieces: Tensor) -> Tensor:
        heard, _ = self.encoder(frames.unflatten(1, (-1, 4)).flatten(2))
        said, _ = self.predictor(self.pieces(F.pad(pieces, (1, 0))))
        return self.head(torch.tanh(self.left(heard)[:, :, None] + self.right(said)[:, None]))


def transducer_loss(logits: Tensor, pieces: Tensor) -> Tensor:
    """Minus the log-likelihood of all ways from the first frame to the last: piece 0 moves on to the next frame."""
    chances = logits.float().log_softmax(dim=-1)
    wait = chances[..., 0]
    index = pieces[:, None, :, None].expand(-1, logits.shape[1], -1, -1)
    say = F.pad(chances[:, :, :-1].gather(-1, index).squeeze(-1).cumsum(dim=-1), (1, 0))
    reached = say[:, 0]
    for frame in range(1, logits.shape[1]):
        reached = say[:, frame] + torch.logcumsumexp(reached + wait[:, frame - 1] - say[:, frame], dim=-1)
    return -(reached[:, -1] + wait[:, -1, -1]).sum()


class Pillars(nn.Module):
    """Cars in a cloud of points: features of columns, scattered to a map that convolutions read."""

    def __init__(self, rows: int, columns: int, width: int = 64, anchors: int = 6, labels: int = 3) -> None:
        super().__init__()
        self.rows, self.columns = rows, columns
        self.point, self.norm = nn.Linear(9, width, bias=False), nn.BatchNorm1d(width)
        sizes = (width, width, 2 * width, 4 * width)
        self.down = nn.ModuleList(
            nn.Sequential(*self._layers(before, after, depth))
            for (before, after), depth in zip(pairwise(sizes), (4, 6, 6), strict=True)
        )
        self.up = nn.ModuleList(
            nn.Sequential(
                nn.ConvTranspose2d(size, 2 * width, 2**level, 2**level, bias=False),
                nn.BatchNorm2d(2 * width),
                nn.ReLU(),
            )
            for level, size in enumerate(sizes[1:])
        )
        self.kinds, self.boxes = nn.Conv2d(6 * width, anchors * labels, 1), nn.Conv2d(6 * width, anchors * 7, 1)

    @staticmethod
    def _layers(before: int, after: int, depth: int) -> list[nn.Module]:
        layers: list[nn.Module] = []
        for place in range(depth):
            inside = before if place == 0 else after
            layers += [nn.Conv2d(inside, after, 3, 2 if place == 0 else 1, 1, bias=False), nn.BatchNorm2d(after)]
            layers += [nn.ReLU(inplace=True)]
        return layers

    def forward(self, points: Tensor, cells: Tensor) -> tuple[Tensor, Tensor]:
        batch, pillars, _, _ = points.shape
        x = self.point(points.flatten(0, 1)).transpose(1, 2)
        x = F.relu(self.norm(x)).amax(dim=2).unflatten(0, (batch, pillars)).transpose(1, 2)
        index = cells[:, None].expand(-1, x.shape[1], -1)
        x = x.new_zeros(batch, x.shape[1], self.rows * self.columns).scatter(2, index, x)
        x, found = x.unflatten(2, (self.rows, self.columns)), []
        for down, up in zip(self.down, self.up, strict=True):
            x = down(x)
            found.append(up(x))
        x = torch.cat(found, dim=1)
        return self.kinds(x), self.boxes(x)


def both_signs(x: Tensor) -> Tensor:
    return F.elu(torch.cat((x, -x), dim=1))


class ShiftedConvolution(nn.Module):
    """A convolution that sees the rows above, and where asked also the pixels on the left in its own row."""

    def __init__(self, before: int, after: int, left: bool, stride: int = 1, up: bool = False) -> None:
        super().__init__()
        self.pad, self.up = (1, 0, 1, 0) if left else (1, 1, 1, 0), up
        kernel = (2, 2) if left else (2, 3)
        kind = nn.ConvTranspose2d if up else nn.Conv2d
        self.inner = weight_norm(kind(before, after, kernel, 2 if up else stride))

    def forward(self, x: Tensor) -> Tensor:
        if not self.up:
            return self.inner(F.pad(x, self.pad))
        rows, columns = 2 * x.shape[2], 2 * x.shape[3]
        first = self.pad[1]
        return self.inner(x)[:, :, :rows, first : first + columns]


class GatedResidual(nn.Module):
    def __init__(self, width: int, left: bool, beside: int) -> None:
        super().__init__()
        self.first = ShiftedConvolution(2 * width, width, left)
        self.beside = weight_norm(nn.Conv2d(2 * beside * width, width, 1)) if beside else None
        self.second = ShiftedConvolution(2 * width, 2 * width, left)

    def forward(self, x: Tensor, *beside: Tensor) -> Tensor:
        inner = self.first(both_signs(x))
        if self.beside is not None:
            inner = inner + self.beside(both_signs(torch.cat(beside, dim=1)))
        inner = F.dropout(both_signs(inner), 0.5, self.training)
        value, gate = self.second(inner).chunk(2, dim=1)
        return x + value * torch.sigmoid(gate)


class Pixels(nn.Module):
    """Each pixel's colour as a mixture, from all pixels above and on the left; two streams of gated convolutions."""

    def __init__(self, width: int = 160, depth: int = 5, levels: int = 3, mixture: int = 10) -> None:
        super().__init__()
        self.begin_above, self.begin_left = ShiftedConvolution(4, width, False), ShiftedConvolution(4, width, True)

        def streams(above_beside: int, left_beside: int) -> nn.ModuleList:
            sides = ((False, above_beside), (True, left_beside))
            return nn.ModuleList(GatedResidual(width, left, beside) for left, beside in sides)

        def resized(**how: Any) -> nn.ModuleList:
            return nn.ModuleList(ShiftedConvolution(width, width, left, **how) for left in (False, True))

        self.down = nn.ModuleList(nn.ModuleList(streams(0, 1) for _ in range(depth)) for _ in range(levels))
        self.up = nn.ModuleList(
            nn.ModuleList(streams(1, 2) for _ in range(depth + (level > 0))) for level in range(levels)
        )
        self.smaller = nn.ModuleList(resized(stride=2) for _ in range(levels - 1))
        self.larger = nn.ModuleList(resized(up=True) for _ in range(levels - 1))
        self.end = weight_norm(nn.Conv2d(width, 10 * mixture, 1))

    def forward(self, images: Tensor) -> Tensor:
        x = torch.cat((images, torch.ones_like(images[:, :1])), dim=1)
        above = F.pad(self.begin_above(x), (0, 0, 1, 0))[:, :, :-1]
        left = above + F.pad(self.begin_left(x), (1, 0))[..., :-1]
        kept = [(above, left)]
        for level, layers in enumerate(self.down):
            for over, beside in layers:
                above = over(above)
                left = beside(left, above)
                kept.append((above, left))
            if level < len(self.smaller):
                above, left = self.smaller[level][0](above), self.smaller[level][1](left)
                kept.append((above, left))
        above, left = kept.pop()
        for level, layers in enumerate(self.up):
            for over, beside in layers:
                old_above, old_left = kept.pop()
                above = over(above, old_above)
                left = beside(left, above, old_left)
            if level < len(self.larger):
                above, left = self.larger[level][0](above), self.larger[level][1](left)
        return self.end(F.elu(left))


def mixture_loss(found: Tensor, images: Tensor) -> Tensor:
    """Minus the log-likelihood of 8-bit colours from -1 to 1 under mixtures of logistics with linked channels."""
    logits, rest = found.float().unflatten(1, (10, -1)).split((1, 9), dim=1)
    means, scales, links = rest.unflatten(1, (3, 3)).unbind(1)
    scales, links, x = scales.clamp(min=-7), torch.tanh(links), images[:, :, None]
    red, green = x[:, 0], x[:, 1]
    green_mean = means[:, 1] + links[:, 0] * red
    blue_mean = means[:, 2] + links[:, 1] * red + links[:, 2] * green
    apart = x - torch.stack((means[:, 0], green_mean, blue_mean), dim=1)
    inverse = torch.exp(-scales)
    high, low = inverse * (apart + 1 / 255), inverse * (apart - 1 / 255)
    share = torch.sigmoid(high) - torch.sigmoid(low)
    middle = inverse * apart
    density = middle - scales - 2 * F.softplus(middle) - 4.848
    inside = torch.where(share > 1e-5, share.clamp(min=1e-12).log(), density)
    each = torch.where(x < -0.999, high - F.softplus(high), torch.where(x > 0.999, -F.softplus(low), inside))
    return -(each.sum(dim=1) + logits.squeeze(1).log_softmax(dim=1)).logsumexp(dim=1).sum()


class SplineLayer(nn.Module):
    """A learnt spline on every edge from inputs to outputs, and a linear part beside them."""

    def __init__(self, inputs: int, outputs: int, grid: int = 8, order: int = 3) -> None:
        super().__init__()
        self.order, self.base = order, nn.Linear(inputs, outputs)
        self.splines = nn.Parameter(torch.randn(outputs, inputs * (grid + order)) * 0.01)
        knots = torch.arange(-order, grid + order + 1) * (2 / grid) - 1
        self.register_buffer("knots", knots)

    def forward(self, x: Tensor) -> Tensor:
        knots, places = self.knots, x[..., None]
        bases = ((places >= knots[:-1]) & (places < knots[1:])).to(x.dtype)
        for order in range(1, self.order + 1):
            rising = (places - knots[: -(order + 1)]) / (knots[order:-1] - knots[: -(order + 1)])
            falling = (knots[order + 1 :] - places) / (knots[order + 1 :] - knots[1:-order])
            bases = rising * bases[..., :-1] + falling * bases[..., 1:]
        return self.base(F.silu(x)) + F.linear(bases.flatten(1), self.splines)


class Splines(nn.Module):
    """A network whose weights are functions."""

    def __init__(self, inputs: int, width: int, depth: int) -> None:
        super().__init__()
        sizes = (inputs, *[width] * (depth - 1), 1)
        self.layers = nn.ModuleList(SplineLayer(before, after) for before, after in pairwise(sizes))
        self.norms = nn.ModuleList(nn.LayerNorm(before) for before in sizes[:-1])

    def forward(self, x: Tensor) -> Tensor:
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = layer(norm(x))
        return x.squeeze(-1)


class SoftPool(nn.Module):
    """Half as many places: a mean of each two, weighted by a softmax over them, channel by channel."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weigh = nn.Conv1d(width, width, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        weights = self.weigh(x).unflatten(2, (-1, 2)).softmax(dim=-1)
        return (x.unflatten(2, (-1, 2)) * weights).sum(dim=-1)


class GenomeUnit(nn.Module):
    """Batch norm, an approximate GELU and a convolution."""

    def __init__(self, before: int, after: int, kernel: int, rate: int = 1) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(before)
        self.convolution = nn.Conv1d(before, after, kernel, padding=rate * (kernel // 2), dilation=rate)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        return self.convolution(x * torch.sigmoid(1.702 * x))


class Genome(nn.Module):
    """Activity along a piece of DNA in many experiments: a tower of pooled convolutions, then dilated ones."""

    def __init__(self, width: int = 768, stages: int = 7, dilated: int = 11, tracks: int = 5313) -> None:
        super().__init__()
        sizes = [width // 2 + (width // 2) * stage // (stages - 1) // 64 * 64 for stage in range(stages)]
        self.begin = nn.Conv1d(4, sizes[0], 15, padding=7)
        self.first = nn.ModuleList(
            GenomeUnit(before, after, 5) for before, after in zip((sizes[0], *sizes[:-1]), sizes, strict=True)
        )
        self.second = nn.ModuleList(GenomeUnit(size, size, 1) for size in sizes)
        self.pools = nn.ModuleList(SoftPool(size) for size in sizes)
        end = sizes[-1]
        self.dilated = nn.ModuleList(
            nn.Sequential(
                GenomeUnit(end, end // 2, 3, round(1.5**place)), GenomeUnit(end // 2, end, 1), nn.Dropout(0.3)
            )
            for place in range(dilated)
        )
        self.end, self.head = GenomeUnit(end, 2 * end, 1), nn.Linear(2 * end, tracks)

    def forward(self, letters: Tensor) -> Tensor:
        x = self.begin(F.one_hot(letters, 4).transpose(1, 2).to(self.begin.weight.dtype))
        for first, second, pool in zip(self.first, self.second, self.pools, strict=True):
            x = first(x)
            x = pool(x + second(x))
        for layer in self.dilated:
            x = x + layer(x)
        return F.softplus(self.head(F.gelu(self.end(x)).transpose(1, 2)))
