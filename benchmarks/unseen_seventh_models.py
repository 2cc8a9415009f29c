"""Plain PyTorch models of the seventh round: fixed points, dreams, clouds, atoms, boards, sounds, films and tables."""

from __future__ import annotations

import math
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class EquilibriumCell(nn.Module):
    """One step of the layer whose fixed point is sought."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(width, inner, 3, padding=1, bias=False)
        self.second = nn.Conv2d(inner, width, 3, padding=1, bias=False)
        self.norms = nn.ModuleList((nn.GroupNorm(8, inner), nn.GroupNorm(8, width), nn.GroupNorm(8, width)))

    def forward(self, state: Tensor, inputs: Tensor) -> Tensor:
        inner = self.norms[0](F.relu(self.first(state)))
        return self.norms[2](F.relu(state + self.norms[1](inputs + self.second(inner))))


class Equilibrium(nn.Module):
    """Images by two layers of unlimited depth: Anderson's solver without gradients, then a few steps with them."""

    def __init__(self, width: int = 128, labels: int = 1000, steps: int = 16, last: int = 4, memory: int = 5) -> None:
        super().__init__()
        self.steps, self.last, self.memory = steps, last, memory
        self.begin = nn.Sequential(
            *(nn.Conv2d(3, width, 7, 4, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU()),
            nn.Conv2d(width, width, 3, padding=1),
        )
        self.between = nn.Sequential(nn.BatchNorm2d(width), nn.Conv2d(width, 2 * width, 3, 2, 1))
        self.cells = nn.ModuleList((EquilibriumCell(width, 2 * width), EquilibriumCell(2 * width, 4 * width)))
        self.norm, self.head = nn.BatchNorm2d(2 * width), nn.Linear(2 * width, labels)

    @torch.no_grad()
    def solve(self, cell: EquilibriumCell, inputs: Tensor, damping: float = 1e-4) -> Tensor:
        """The state that combines the last few so that what is left of each step is smallest."""
        state = torch.zeros_like(inputs)
        states, results = [state], [cell(state, inputs)]
        for _ in range(self.steps - 1):
            states, results = states[-self.memory :], results[-self.memory :]
            left = torch.stack([(after - before).flatten(1) for before, after in zip(states, results, strict=True)], 1)
            products = left @ left.transpose(1, 2)
            ridge = damping * torch.eye(len(states), device=inputs.device)
            weights = torch.linalg.solve(products + ridge, torch.ones_like(products[..., :1]))
            weights = (weights / weights.sum(dim=1, keepdim=True)).squeeze(-1)
            state = torch.einsum("bm,bmcij->bcij", weights, torch.stack(results, dim=1))
            states.append(state)
            results.append(cell(state, inputs))
        return results[-1]

    def settled(self, cell: EquilibriumCell, inputs: Tensor) -> Tensor:
        state = self.solve(cell, inputs)
        for _ in range(self.last):
            state = cell(state, inputs)
        return state

    def forward(self, images: Tensor) -> Tensor:
        x = self.settled(self.cells[0], self.begin(images))
        x = self.settled(self.cells[1], self.between(x))
        return self.head(self.norm(x).mean(dim=(2, 3)))


def dense(before: int, after: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(before, after), nn.LayerNorm(after), nn.SiLU())


class FrameNorm(nn.GroupNorm):
    """Group norm of one group, and a SiLU."""

    def forward(self, x: Tensor) -> Tensor:
        return F.silu(super().forward(x))


class Dreams(nn.Module):
    """What a player sees next: a recurrent state and drawn classes, learnt from films of its play."""

    def __init__(self, actions: int = 18, deep: int = 2048, drawn: int = 32, kinds: int = 32, width: int = 64) -> None:
        super().__init__()
        self.drawn, self.kinds = drawn, kinds
        sizes, classes = [width * 2**level for level in range(4)], drawn * kinds
        seen, inner = sizes[-1] * 16, deep // 2
        self.see = nn.Sequential(
            *(part for before, after in pairwise((3, *sizes)) for part in self._smaller(before, after)), nn.Flatten()
        )
        self.into, self.cell = dense(classes + actions, inner), nn.GRUCell(inner, deep)
        self.guess = nn.Sequential(dense(deep, inner), nn.Linear(inner, classes))
        self.know = nn.Sequential(dense(deep + seen, inner), nn.Linear(inner, classes))
        self.unfold = nn.Linear(deep + classes, seen)
        self.draw = nn.Sequential(
            *(part for before, after in pairwise(sizes[::-1]) for part in self._larger(before, after)),
            nn.ConvTranspose2d(width, 3, 4, 2, 1),
        )
        self.reward, self.going = (
            nn.Sequential(dense(deep + classes, inner), dense(inner, inner), nn.Linear(inner, outputs))
            for outputs in (255, 1)
        )

    @staticmethod
    def _smaller(before: int, after: int) -> tuple[nn.Module, nn.Module]:
        return nn.Conv2d(before, after, 4, 2, 1, bias=False), FrameNorm(1, after)

    @staticmethod
    def _larger(before: int, after: int) -> tuple[nn.Module, nn.Module]:
        return nn.ConvTranspose2d(before, after, 4, 2, 1, bias=False), FrameNorm(1, after)

    def _draw_classes(self, logits: Tensor) -> Tensor:
        return F.gumbel_softmax(logits.unflatten(-1, (self.drawn, self.kinds)), hard=True).flatten(1)

    def forward(self, frames: Tensor, actions: Tensor) -> tuple[Tensor, ...]:
        """Frames, rewards and ends as the model dreams them, and its classes before and after it saw each frame."""
        seen = self.see(frames.flatten(0, 1)).unflatten(0, frames.shape[:2])
        state = seen.new_zeros(len(seen), self.cell.hidden_size)
        drawn = seen.new_zeros(len(seen), self.drawn * self.kinds)
        states, guesses, known = [], [], []
        for view, action in zip(seen.unbind(1), actions.unbind(1), strict=True):
            state = self.cell(self.into(torch.cat((drawn, action), dim=-1)), state)
            guesses.append(self.guess(state))
            known.append(self.know(torch.cat((state, view), dim=-1)))
            drawn = self._draw_classes(known[-1])
            states.append(torch.cat((state, drawn), dim=-1))
        features = torch.stack(states, dim=1)
        shown = self.draw(self.unfold(features.flatten(0, 1)).unflatten(-1, (-1, 4, 4))).unflatten(0, frames.shape[:2])
        chances = (torch.stack(each, dim=1).unflatten(-1, (self.drawn, self.kinds)) for each in (guesses, known))
        return shown, self.reward(features), self.going(features).squeeze(-1), *chances


def divergence(first: Tensor, second: Tensor, free: float = 1.0) -> Tensor:
    """How far classes are from others, above what is free."""
    first, second = first.float().log_softmax(dim=-1), second.float().log_softmax(dim=-1)
    return (first.exp() * (first - second)).sum(dim=(-1, -2)).clamp(min=free)


def near(values: Tensor, places: Tensor) -> Tensor:
    """Rows of `values` (sample, row, channel) at `places` (sample, row, neighbour)."""
    rows = places.flatten(1)[..., None].expand(-1, -1, values.shape[-1])
    return values.gather(1, rows).unflatten(1, places.shape[1:])


class EdgeConvolution(nn.Module):
    """The largest feature of each point's edges to those whose features are nearest."""

    def __init__(self, before: int, after: int, count: int) -> None:
        super().__init__()
        self.count = count
        self.first, self.second = nn.Conv2d(2 * before, after, 1, bias=False), nn.Conv2d(after, after, 1, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(after) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        apart = torch.cdist(x.detach(), x.detach())
        neighbours = near(x, apart.topk(self.count, dim=-1, largest=False).indices)
        centres = x[:, :, None].expand_as(neighbours)
        edges = torch.cat((neighbours - centres, centres), dim=-1).permute(0, 3, 1, 2)
        edges = F.leaky_relu(self.norms[0](self.first(edges)), 0.2)
        return F.leaky_relu(self.norms[1](self.second(edges)), 0.2).amax(dim=-1).transpose(1, 2)


class Neighbours(nn.Module):
    """The part of a thing that each of its points belongs to, by graphs that are made anew at each layer."""

    def __init__(self, parts: int = 50, widths: tuple[int, ...] = (64, 64, 128, 256), count: int = 24) -> None:
        super().__init__()
        self.layers = nn.ModuleList(EdgeConvolution(before, after, count) for before, after in pairwise((3, *widths)))
        self.whole, wide = nn.Linear(sum(widths), 1024), sum(widths) + 1024
        self.head = nn.Sequential(
            *(nn.Conv1d(wide, 512, 1), nn.BatchNorm1d(512), nn.LeakyReLU(0.2), nn.Dropout(0.4)),
            *(nn.Conv1d(512, 256, 1), nn.BatchNorm1d(256), nn.LeakyReLU(0.2), nn.Conv1d(256, parts, 1)),
        )

    def forward(self, points: Tensor) -> Tensor:
        x, found = points, []
        for layer in self.layers:
            x = layer(x)
            found.append(x)
        each = torch.cat(found, dim=-1)
        whole = self.whole(each).amax(dim=1, keepdim=True).expand(-1, points.shape[1], -1)
        return self.head(torch.cat((each, whole), dim=-1).transpose(1, 2)).transpose(1, 2)


class TurnedConvolution(nn.Module):
    """A convolution over places and quarter turns: one set of weights, turned four times."""

    def __init__(self, before: int, after: int, stride: int = 1, turns: int = 4) -> None:
        super().__init__()
        self.stride = stride
        self.weight = nn.Parameter(torch.empty(after, before, turns, 3, 3))
        nn.init.kaiming_normal_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """`x`: sample, channel, turn (or none), row, column."""
        turned = [torch.rot90(self.weight, turn, (3, 4)).roll(turn, dims=2) for turn in range(4)]
        weight = torch.stack(turned, dim=1).flatten(0, 1).flatten(1, 2)
        found = F.conv2d(x.flatten(1, 2), weight, stride=self.stride, padding=1)
        return found.unflatten(1, (-1, 4))


class TurnedUnit(nn.Module):
    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.first, self.second = TurnedConvolution(before, after, stride), TurnedConvolution(after, after)
        self.norms = nn.ModuleList((nn.BatchNorm3d(before), nn.BatchNorm3d(after)))
        self.around = nn.Conv3d(before, after, 1, (1, stride, stride), bias=False)

    def forward(self, x: Tensor) -> Tensor:
        inner = F.relu(self.norms[0](x))
        return self.around(inner) + self.second(F.relu(self.norms[1](self.first(inner))))


class Rotations(nn.Module):
    """Tissue in pictures from a microscope, whose class does not change when they are turned."""

    def __init__(self, width: int = 64, depths: tuple[int, ...] = (3, 3, 3), labels: int = 9) -> None:
        super().__init__()
        self.begin = TurnedConvolution(3, width, turns=1)
        units, before = [], width
        for level, depth in enumerate(depths):
            for place in range(depth):
                units.append(TurnedUnit(before, width * 2**level, 2 if level and not place else 1))
                before = width * 2**level
        self.units = nn.Sequential(*units, nn.BatchNorm3d(before), nn.ReLU())
        self.head = nn.Linear(before, labels)

    def forward(self, pictures: Tensor) -> Tensor:
        x = self.units(self.begin(pictures[:, :, None]))
        return self.head(x.amax(dim=2).mean(dim=(2, 3)))


class VectorMessages(nn.Module):
    """Messages between atoms that have both numbers and directions."""

    def __init__(self, width: int, waves: int) -> None:
        super().__init__()
        self.numbers = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 3 * width))
        self.filters = nn.Linear(waves, 3 * width)

    def forward(
        self, numbers: Tensor, vectors: Tensor, waves: Tensor, directions: Tensor, places: Tensor
    ) -> tuple[Tensor, Tensor]:
        """`vectors`: sample, atom, axis, channel."""
        sent = near(self.numbers(numbers), places) * self.filters(waves)
        add, keep, turn = sent.chunk(3, dim=-1)
        others = near(vectors.flatten(2), places).unflatten(-1, vectors.shape[2:])
        moved = others * keep[..., None, :] + directions[..., None] * turn[..., None, :]
        return numbers + add.sum(dim=2), vectors + moved.sum(dim=2)


class VectorUpdate(nn.Module):
    """Numbers and directions of an atom change each other."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mix = nn.Linear(width, 2 * width, bias=False)
        self.weigh = nn.Sequential(nn.Linear(2 * width, width), nn.SiLU(), nn.Linear(width, 3 * width))

    def forward(self, numbers: Tensor, vectors: Tensor) -> tuple[Tensor, Tensor]:
        first, second = self.mix(vectors).chunk(2, dim=-1)
        lengths = (second.square().sum(dim=-2) + 1e-6).sqrt()
        scale, link, add = self.weigh(torch.cat((numbers, lengths), dim=-1)).chunk(3, dim=-1)
        return numbers + add + link * (first * second).sum(dim=-2), vectors + scale[..., None, :] * first


class Forces(nn.Module):
    """Energies of molecules and the forces on their atoms, which are the energy's slope."""

    def __init__(self, width: int = 256, depth: int = 6, waves: int = 32, reach: float = 5.0) -> None:
        super().__init__()
        self.width, self.reach = width, reach
        self.register_buffer("rates", torch.arange(1, waves + 1) * math.pi / reach)
        self.kinds = nn.Embedding(100, width)
        self.messages = nn.ModuleList(VectorMessages(width, waves) for _ in range(depth))
        self.updates = nn.ModuleList(VectorUpdate(width) for _ in range(depth))
        self.head = nn.Sequential(nn.Linear(width, width // 2), nn.SiLU(), nn.Linear(width // 2, 1))

    def energy(self, kinds: Tensor, atoms: Tensor, places: Tensor) -> Tensor:
        edges = near(atoms, places) - atoms[:, :, None]
        lengths = (edges.square().sum(dim=-1, keepdim=True) + 1e-6).sqrt()
        fade = 0.5 * ((lengths.clamp(max=self.reach) * math.pi / self.reach).cos() + 1)
        waves = torch.sin(lengths * self.rates) / lengths * fade
        numbers = self.kinds(kinds)
        vectors = numbers.new_zeros(*numbers.shape[:2], 3, self.width)
        for message, update in zip(self.messages, self.updates, strict=True):
            numbers, vectors = message(numbers, vectors, waves, edges / lengths, places)
            numbers, vectors = update(numbers, vectors)
        return self.head(numbers).sum(dim=(1, 2))

    def forward(self, kinds: Tensor, atoms: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            atoms = atoms.detach().requires_grad_()
            energy = self.energy(kinds, atoms, places)
            (slope,) = torch.autograd.grad(energy.sum(), atoms, create_graph=True)
        return energy, -slope


def conv_silu(before: int, after: int, kernel: int = 1, stride: int = 1) -> nn.Sequential:
    convolution = nn.Conv2d(before, after, kernel, stride, kernel // 2, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(after), nn.SiLU(inplace=True))


class Shortcut(nn.Module):
    def __init__(self, width: int, add: bool) -> None:
        super().__init__()
        self.add, self.body = add, nn.Sequential(conv_silu(width, width), conv_silu(width, width, 3))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x) if self.add else self.body(x)


class Partial(nn.Module):
    """Half of the channels pass through units, the other half around them."""

    def __init__(self, before: int, after: int, depth: int, add: bool = True) -> None:
        super().__init__()
        half = after // 2
        self.through, self.around = conv_silu(before, half), conv_silu(before, half)
        self.units = nn.Sequential(*(Shortcut(half, add) for _ in range(depth)))
        self.join = conv_silu(after, after)

    def forward(self, x: Tensor) -> Tensor:
        return self.join(torch.cat((self.units(self.through(x)), self.around(x)), dim=1))


class Pooled(nn.Module):
    """Features beside their maxima over growing windows."""

    def __init__(self, before: int, after: int, windows: tuple[int, ...] = (5, 9, 13)) -> None:
        super().__init__()
        self.begin = conv_silu(before, before // 2)
        self.pools = nn.ModuleList(nn.MaxPool2d(window, 1, window // 2) for window in windows)
        self.join = conv_silu(before // 2 * (len(windows) + 1), after)

    def forward(self, x: Tensor) -> Tensor:
        x = self.begin(x)
        return self.join(torch.cat((x, *(pool(x) for pool in self.pools)), dim=1))


class Anchors(nn.Module):
    """Things in a street: partial stages, a pyramid that goes up and down again, and apart heads for kind and box."""

    def __init__(self, kinds: int = 80, width: int = 64, depths: tuple[int, ...] = (3, 9, 9, 3)) -> None:
        super().__init__()
        sizes = [width * 2**level for level in range(5)]
        self.begin = nn.Sequential(nn.PixelUnshuffle(2), conv_silu(12, width, 3))
        self.stages = nn.ModuleList()
        for (before, after), depth in zip(pairwise(sizes), depths, strict=True):
            parts = [conv_silu(before, after, 3, 2), Partial(after, after, depth)]
            last = len(self.stages) == len(depths) - 1
            self.stages.append(
                nn.Sequential(*parts[:1], Pooled(after, after), parts[1]) if last else nn.Sequential(*parts)
            )
        fine, middle, coarse = sizes[2:]
        self.narrow = nn.ModuleList((conv_silu(coarse, middle), conv_silu(middle, fine)))
        self.up = nn.ModuleList((Partial(2 * middle, middle, 3, False), Partial(2 * fine, fine, 3, False)))
        self.smaller = nn.ModuleList((conv_silu(fine, fine, 3, 2), conv_silu(middle, middle, 3, 2)))
        self.down = nn.ModuleList((Partial(2 * fine, middle, 3, False), Partial(2 * middle, coarse, 3, False)))
        self.into = nn.ModuleList(conv_silu(size, 4 * width) for size in sizes[2:])
        self.kinds = nn.ModuleList(self._head(4 * width, kinds) for _ in range(3))
        self.boxes = nn.ModuleList(self._head(4 * width, 5) for _ in range(3))

    @staticmethod
    def _head(width: int, outputs: int) -> nn.Sequential:
        return nn.Sequential(conv_silu(width, width, 3), conv_silu(width, width, 3), nn.Conv2d(width, outputs, 1))

    def _pyramid(self, fine: Tensor, middle: Tensor, coarse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        coarse = self.narrow[0](coarse)
        middle = self.up[0](torch.cat((F.interpolate(coarse, scale_factor=2.0), middle), dim=1))
        thin = self.narrow[1](middle)
        fine = self.up[1](torch.cat((F.interpolate(thin, scale_factor=2.0), fine), dim=1))
        middle = self.down[0](torch.cat((self.smaller[0](fine), thin), dim=1))
        return fine, middle, self.down[1](torch.cat((self.smaller[1](middle), coarse), dim=1))

    def forward(self, images: Tensor) -> Tensor:
        """For each place: the box, whether there is a thing, and its kind."""
        x, kept = self.begin(images), []
        for stage in self.stages:
            x = stage(x)
            kept.append(x)
        found = []
        for place, grid in enumerate(self._pyramid(*kept[1:])):
            inner = self.into[place](grid)
            found.append(torch.cat((self.boxes[place](inner), self.kinds[place](inner)), dim=1).flatten(2))
        return torch.cat(found, dim=2).transpose(1, 2)


def box_loss(output: Tensor, target: Tensor, kinds: Tensor, there: Tensor) -> Tensor:
    """Overlaps of boxes, given as distances to their four sides, and kinds where there is a thing; things anywhere."""
    sides = F.softplus(output[..., :4].float())
    shared = torch.minimum(sides, target)
    area = (shared[..., 0] + shared[..., 2]) * (shared[..., 1] + shared[..., 3])
    areas = sum((box[..., 0] + box[..., 2]) * (box[..., 1] + box[..., 3]) for box in (sides, target))
    overlap = area / (areas - area + 1e-7)
    named = F.one_hot(kinds, output.shape[-1] - 5) * overlap.detach()[..., None]
    kind = F.binary_cross_entropy_with_logits(output[..., 5:].float(), named, reduction="none").sum(dim=-1)
    thing = F.binary_cross_entropy_with_logits(output[..., 4].float(), there, reduction="none")
    return (there * (5 * (1 - overlap.square()) + kind) + thing).sum()


class SmallUNet(nn.Module):
    """A U-Net in place of a unit: down by pools, dilated at its end, up again, added to what came in."""

    def __init__(self, before: int, inner: int, after: int, depth: int, flat: bool = False) -> None:
        super().__init__()
        self.flat, rates = flat, [2**level if flat else 1 for level in range(depth)]
        self.begin = self._layer(before, after)
        widths = [after, *[inner] * depth]
        self.down = nn.ModuleList(
            self._layer(wide, thin, rate) for (wide, thin), rate in zip(pairwise(widths), rates, strict=True)
        )
        self.bottom = self._layer(inner, inner, 2 * rates[-1] if flat else 2)
        outs = [*[inner] * (depth - 1), after]
        self.up = nn.ModuleList(
            self._layer(2 * inner, out, rate) for out, rate in zip(outs, reversed(rates), strict=True)
        )

    @staticmethod
    def _layer(before: int, after: int, rate: int = 1) -> nn.Sequential:
        convolution = nn.Conv2d(before, after, 3, padding=rate, dilation=rate)
        return nn.Sequential(convolution, nn.BatchNorm2d(after), nn.ReLU(inplace=True))

    def forward(self, x: Tensor) -> Tensor:
        begun = inner = self.begin(x)
        kept = []
        for place, layer in enumerate(self.down):
            if place and not self.flat:
                inner = F.max_pool2d(inner, 2, ceil_mode=True)
            inner = layer(inner)
            kept.append(inner)
        inner = self.bottom(inner)
        for layer in self.up:
            beside = kept.pop()
            if inner.shape[2:] != beside.shape[2:]:
                inner = F.interpolate(inner, size=beside.shape[2:], mode="bilinear")
            inner = layer(torch.cat((inner, beside), dim=1))
        return begun + inner


class Nested(nn.Module):
    """What stands out in a picture: a U-Net of U-Nets, with a mask from each of its sizes and one from all."""

    def __init__(self, depths: tuple[int, ...] = (6, 5, 4, 3)) -> None:
        super().__init__()
        sizes = [64, 128, 256, 512]
        flats = (SmallUNet(512, 256, 512, 3, flat=True), SmallUNet(512, 256, 512, 3, flat=True))
        self.down = nn.ModuleList(
            SmallUNet(before, after // 2 if after > 64 else 32, after, depth)
            for (before, after), depth in zip(pairwise((3, *sizes)), depths, strict=True)
        ).extend(flats)
        outs = [512, 256, 128, 64, 64]
        befores = [1024, 1024, 512, 256, 128]
        self.up = nn.ModuleList([SmallUNet(1024, 256, 512, 3, flat=True)]).extend(
            SmallUNet(before, max(out // 2, 16), out, depth)
            for before, out, depth in zip(befores[1:], outs[1:], reversed(depths), strict=True)
        )
        self.masks = nn.ModuleList(nn.Conv2d(width, 1, 3, padding=1) for width in (512, *outs))
        self.join = nn.Conv2d(len(self.masks), 1, 1)

    def forward(self, pictures: Tensor) -> Tensor:
        x, kept = pictures, []
        for place, unit in enumerate(self.down):
            x = unit(F.max_pool2d(x, 2, ceil_mode=True) if place else x)
            kept.append(x)
        found = [kept.pop()]
        for unit in self.up:
            beside = kept.pop()
            larger = F.interpolate(found[-1], size=beside.shape[2:], mode="bilinear")
            found.append(unit(torch.cat((larger, beside), dim=1)))
        masks = [mask(x) for mask, x in zip(self.masks, found, strict=True)]
        masks = [F.interpolate(mask, size=pictures.shape[2:], mode="bilinear") for mask in masks]
        each = torch.cat(masks, dim=1)
        return torch.cat((self.join(each), each), dim=1)


class TreeLayer(nn.Module):
    """Soft trees that ask one question for each of their levels."""

    def __init__(self, inputs: int, trees: int, depth: int, outputs: int) -> None:
        super().__init__()
        self.choose = nn.Parameter(torch.rand(inputs, trees * depth))
        self.borders, self.warmth = (
            nn.Parameter(value) for value in (torch.randn(trees, depth), torch.zeros(trees, depth))
        )
        self.leaves = nn.Parameter(torch.randn(trees, 2**depth, outputs))

    def forward(self, x: Tensor) -> Tensor:
        asked = (x @ self.choose.softmax(dim=0)).unflatten(-1, self.borders.shape)
        right = torch.sigmoid((asked - self.borders) * torch.exp(-self.warmth))
        reached = torch.ones_like(right[..., :1])
        for level in right.unbind(-1):
            sides = torch.stack((1 - level, level), dim=-1)
            reached = (reached[..., None] * sides[..., None, :]).flatten(-2)
        return torch.einsum("btl,tlo->bto", reached, self.leaves)


class Trees(nn.Module):
    """Numbers from rows of a table: layers of trees, each of which also reads the answers of all before it."""

    def __init__(self, columns: int, trees: int = 512, depth: int = 6, layers: int = 4, outputs: int = 3) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(columns)
        self.layers = nn.ModuleList(
            TreeLayer(columns + place * trees * outputs, trees, depth, outputs) for place in range(layers)
        )

    def forward(self, rows: Tensor) -> Tensor:
        x, answers = self.norm(rows), []
        for layer in self.layers:
            found = layer(x)
            x = torch.cat((x, found.flatten(1)), dim=-1)
            answers.append(found[..., 0])
        return torch.cat(answers, dim=-1).mean(dim=-1)


class Deflection(nn.Module):
    """A field at asked places, from another field: a convolutional branch for it and a trunk for the places."""

    def __init__(self, fields: int = 3, width: int = 512, modes: int = 256, outputs: int = 2) -> None:
        super().__init__()
        sizes = [64, 128, 256, 512]
        self.outputs = outputs
        self.branch = nn.Sequential(
            *(part for before, after in pairwise((fields, *sizes)) for part in self._stage(before, after)),
            *(nn.Flatten(), nn.Linear(sizes[-1] * 64, width), nn.GELU(), nn.Linear(width, modes * outputs)),
        )
        self.trunk = nn.Sequential(
            *(nn.Linear(34, width), nn.Tanh()),
            *(part for _ in range(4) for part in (nn.Linear(width, width), nn.Tanh())),
            nn.Linear(width, modes * outputs),
        )
        self.offset = nn.Parameter(torch.zeros(outputs))

    @staticmethod
    def _stage(before: int, after: int) -> tuple[nn.Module, ...]:
        layers = nn.Conv2d(before, after, 3, padding=1), nn.GELU(), nn.Conv2d(after, after, 3, padding=1), nn.GELU()
        return *layers, nn.AvgPool2d(2)

    def forward(self, fields: Tensor, places: Tensor) -> Tensor:
        rates = 2.0 ** torch.arange(8, device=places.device) * math.pi
        angles = (places[..., None] * rates).flatten(-2)
        waves = torch.cat((places, angles.sin(), angles.cos()), dim=-1)
        weights = self.branch(fields).unflatten(-1, (self.outputs, -1))
        shapes = self.trunk(waves).unflatten(-1, (self.outputs, -1))
        return torch.einsum("bom,bnom->bno", weights, shapes) + self.offset


class PointwiseAttention(nn.Module):
    """Causal attention with SiLUs in place of softmaxes, with biases of distance in places and in time."""

    def __init__(self, width: int, heads: int, length: int, buckets: int = 64) -> None:
        super().__init__()
        self.heads, self.length = heads, length
        self.before, self.after = nn.LayerNorm(width), nn.LayerNorm(width, elementwise_affine=False)
        self.joint, self.out = nn.Linear(width, 4 * width, bias=False), nn.Linear(width, width)
        self.places, self.times = nn.Parameter(torch.zeros(length)), nn.Embedding(buckets, 1)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor, gaps: Tensor, back: Tensor) -> Tensor:
        gate, *others = F.silu(self.joint(self.before(x))).chunk(4, dim=-1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in others)
        bias = self.places[back.clamp(min=0)] + self.times(gaps).squeeze(-1)
        weights = F.silu(q @ k.transpose(-1, -2) + bias[:, None]) / self.length
        found = (weights * (back >= 0)) @ v
        return x + self.out(self.drop(gate * self.after(found.transpose(1, 2).flatten(2))))


class Histories(nn.Module):
    """What each customer chooses next, from long histories of items and their times."""

    def __init__(self, items: int, length: int, width: int = 512, depth: int = 12, heads: int = 8) -> None:
        super().__init__()
        self.items, self.places = nn.Embedding(items, width), nn.Embedding(length, width)
        self.layers = nn.ModuleList(PointwiseAttention(width, heads, length) for _ in range(depth))

    def forward(self, items: Tensor, times: Tensor, drawn: Tensor) -> Tensor:
        """Likeness of each state to the next item, first, and to drawn ones."""
        order = torch.arange(items.shape[1] - 1, device=items.device)
        x = self.items(items[:, :-1]) + self.places(order)
        apart = (times[:, :-1, None] - times[:, None, :-1]).abs()
        gaps = (apart + 1).float().log().mul(3).long().clamp(max=63)
        for layer in self.layers:
            x = layer(x, gaps, order[:, None] - order)
        x = F.normalize(x, dim=-1)
        right = F.normalize(self.items(items[:, 1:]), dim=-1)
        others = F.normalize(self.items(drawn), dim=-1)
        return torch.cat(((x * right).sum(dim=-1, keepdim=True), x @ others.transpose(-1, -2)), dim=-1) / 0.05


class BoardUnit(nn.Module):
    """Two convolutions whose channels are weighed by what is on the whole board."""

    def __init__(self, width: int, squeeze: int = 4) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *(nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True)),
            *(nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)),
        )
        self.weigh = nn.Sequential(
            *(nn.Linear(width, width // squeeze), nn.ReLU(inplace=True), nn.Linear(width // squeeze, 2 * width)),
        )

    def forward(self, x: Tensor) -> Tensor:
        inner = self.body(x)
        scale, shift = self.weigh(inner.mean(dim=(2, 3)))[..., None, None].chunk(2, dim=1)
        return F.relu(x + inner * scale.sigmoid() + shift)


class Planning(nn.Module):
    """Moves, worth and rewards of a game some moves ahead, in states that the model makes up by itself."""

    def __init__(self, planes: int = 17, side: int = 19, width: int = 256, depth: int = 16, ahead: int = 8) -> None:
        super().__init__()
        self.side, self.actions = side, side * side + 1
        self.see = nn.Sequential(self._begin(planes, width), *(BoardUnit(width) for _ in range(depth)))
        self.move = nn.Sequential(self._begin(width + 1, width), *(BoardUnit(width) for _ in range(ahead)))
        self.policy, self.value = self._head(width, self.actions), self._head(width, 1)
        self.reward = self._head(width, 1)

    @staticmethod
    def _begin(before: int, width: int) -> nn.Sequential:
        convolution = nn.Conv2d(before, width, 3, padding=1, bias=False)
        return nn.Sequential(convolution, nn.BatchNorm2d(width), nn.ReLU(inplace=True))

    def _head(self, width: int, outputs: int, planes: int = 32) -> nn.Sequential:
        return nn.Sequential(
            *(nn.Conv2d(width, planes, 1, bias=False), nn.BatchNorm2d(planes), nn.ReLU(inplace=True), nn.Flatten()),
            *(nn.Linear(planes * self.side**2, 256), nn.ReLU(inplace=True), nn.Linear(256, outputs)),
        )

    def _placed(self, actions: Tensor, like: Tensor) -> Tensor:
        """A plane with a one where a stone is set; zeros for a pass."""
        ones = F.one_hot(actions, self.actions)[:, :-1].to(like.dtype)
        return ones.unflatten(1, (1, self.side, self.side))

    def forward(self, boards: Tensor, actions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        state = self.see(boards)
        policies, values, rewards = [self.policy(state)], [self.value(state)], []
        for action in actions.unbind(1):
            state = self.move(torch.cat((state, self._placed(action, state)), dim=1))
            state = 0.5 * state + 0.5 * state.detach()
            policies.append(self.policy(state))
            values.append(self.value(state))
            rewards.append(self.reward(state))
        return torch.stack(policies, dim=1), torch.cat(values, dim=1), torch.cat(rewards, dim=1)


def wave_features(times: Tensor, width: int) -> Tensor:
    rates = torch.exp(torch.arange(width // 2, device=times.device) * (-math.log(10000) / (width // 2)))
    angles = times.float()[:, None] * 1000 * rates
    return torch.cat((angles.cos(), angles.sin()), dim=-1)


class UnmaskingBlock(nn.Module):
    """Attention in both directions and a feed-forward part, each scaled, shifted and gated by the time."""

    def __init__(self, width: int, heads: int, time: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width, elementwise_affine=False) for _ in range(2))
        self.joint, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.step = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width))
        self.change, self.drop = nn.Linear(time, 6 * width), nn.Dropout(0.1)
        nn.init.zeros_(self.change.weight)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        shift, scale, gate, late_shift, late_scale, late_gate = self.change(time)[:, None].chunk(6, dim=-1)
        inner = self.norms[0](x) * (1 + scale) + shift
        q, k, v = self.joint(inner).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        x = x + gate * self.drop(self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)))
        inner = self.norms[1](x) * (1 + late_scale) + late_shift
        return x + late_gate * self.drop(self.step(inner))


class Unmasking(nn.Module):
    """Words under masks of any share, as in diffusion of texts."""

    def __init__(
        self, vocabulary: int, width: int = 1536, depth: int = 20, heads: int = 24, length: int = 1024, time: int = 256
    ) -> None:
        super().__init__()
        self.time_waves = time
        self.words, self.places = nn.Embedding(vocabulary + 1, width), nn.Embedding(length, width)
        self.time = nn.Sequential(nn.Linear(time, time), nn.SiLU(), nn.Linear(time, time), nn.SiLU())
        self.blocks = nn.ModuleList(UnmaskingBlock(width, heads, time) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary)

    def forward(self, words: Tensor, times: Tensor) -> Tensor:
        x = self.words(words) + self.places.weight[: words.shape[1]]
        time = self.time(wave_features(times, self.time_waves).to(x.dtype))
        for block in self.blocks:
            x = block(x, time)
        return self.head(self.norm(x))


class Looking(nn.Module):
    """Vectors of pictures of any size: a small vision transformer with layer scales, and a head of prototypes."""

    def __init__(self, width: int = 384, depth: int = 12, heads: int = 6, patch: int = 16, kinds: int = 32768) -> None:
        super().__init__()
        self.side = 224 // patch
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.first = nn.Parameter(torch.zeros(1, 1, width))
        self.places = nn.Parameter(torch.randn(1, width, self.side, self.side) * 0.02)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, heads, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
            for _ in range(depth)
        )
        self.norm = nn.LayerNorm(width)
        self.project = nn.Sequential(
            *(nn.Linear(width, 2048), nn.GELU(), nn.Linear(2048, 2048), nn.GELU(), nn.Linear(2048, 256)),
        )
        self.kinds = nn.utils.parametrizations.weight_norm(nn.Linear(256, kinds, bias=False))

    def forward(self, pictures: Tensor) -> Tensor:
        x = self.patches(pictures)
        places = self.places
        if x.shape[-1] != self.side:
            places = F.interpolate(places, size=x.shape[2:], mode="bicubic", align_corners=False)
        x = (x + places).flatten(2).transpose(1, 2)
        x = torch.cat((self.first.expand(len(x), -1, -1), x), dim=1)
        for block in self.blocks:
            x = block(x)
        return self.kinds(F.normalize(self.project(self.norm(x)[:, 0]), dim=-1))


class Distilled(nn.Module):
    """A student that sees all cuts of a picture, and a teacher, moved only by hand, that sees the large ones."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = Looking(), Looking()
        self.teacher.load_state_dict(self.student.state_dict())
        self.teacher.requires_grad_(False)

    def forward(self, large: Tensor, small: Tensor) -> tuple[Tensor, Tensor]:
        """What the student says of each cut, and what the teacher says of each large one."""
        seen = [self.student(cuts.flatten(0, 1)).unflatten(0, cuts.shape[:2]) for cuts in (large, small)]
        with torch.no_grad():
            known = self.teacher(large.flatten(0, 1)).unflatten(0, large.shape[:2])
        return torch.cat(seen, dim=1), known


def balanced(scores: Tensor, rounds: int = 3, warmth: float = 0.04) -> Tensor:
    """Classes of all samples, in turn made equally large in sum and one in sum for each sample."""
    shares = (scores.float() / warmth - (scores.float() / warmth).amax()).exp()
    for _ in range(rounds):
        shares = shares / shares.sum(dim=0, keepdim=True).clamp(min=1e-12)
        shares = shares / shares.sum(dim=1, keepdim=True).clamp(min=1e-12)
    return shares


class BiasedAttention(nn.Module):
    """A block of attention that adds a bias for each pair to its scores."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.joint, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.step = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        q, k, v = self.joint(self.norms[0](x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        found = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        x = x + self.drop(self.out(found.transpose(1, 2).flatten(2)))
        return x + self.drop(self.step(self.norms[1](x)))


class Graphs(nn.Module):
    """A property of each graph: attention with biases from shortest ways and from the bonds along them."""

    def __init__(
        self, kinds: int = 512, width: int = 768, depth: int = 12, heads: int = 32, far: int = 20, steps: int = 5
    ) -> None:
        super().__init__()
        self.heads = heads
        self.kinds, self.degrees = nn.Embedding(kinds, width), nn.Embedding(64, width)
        self.whole, self.to_whole = nn.Parameter(torch.randn(1, 1, width)), nn.Parameter(torch.randn(heads))
        self.ways, self.bonds = nn.Embedding(far, heads), nn.Embedding(64, heads)
        self.along = nn.Parameter(torch.randn(steps, heads, heads) * 0.02)
        self.blocks = nn.ModuleList(BiasedAttention(width, heads) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 1)

    def bias(self, ways: Tensor, bonds: Tensor) -> Tensor:
        """`bonds`: sample, from, to, step on the way."""
        along = torch.einsum("bnmsh,shk->bnmk", self.bonds(bonds), self.along) / bonds.shape[-1]
        pairs = (self.ways(ways) + along).permute(0, 3, 1, 2)
        pairs = F.pad(pairs, (1, 0, 1, 0))
        edge = torch.zeros(pairs.shape[-2:], dtype=torch.bool, device=pairs.device)
        edge[0], edge[:, 0] = True, True
        return torch.where(edge, self.to_whole[:, None, None], pairs)

    def forward(self, kinds: Tensor, degrees: Tensor, ways: Tensor, bonds: Tensor) -> Tensor:
        x = self.kinds(kinds).sum(dim=2) + self.degrees(degrees)
        x = torch.cat((self.whole.expand(len(x), -1, -1), x), dim=1)
        bias = self.bias(ways, bonds)
        for block in self.blocks:
            x = block(x, bias)
        return self.head(self.norm(x)[:, 0]).squeeze(-1)


def conv_leaky(before: int, after: int, stride: int = 1, rate: int = 1) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(before, after, 3, stride, rate, rate), nn.LeakyReLU(0.1, inplace=True))


class FlowLevel(nn.Module):
    """Where the pixels of one size go: densely joined convolutions over likenesses, features and what is known."""

    def __init__(self, before: int, reach: int, widths: tuple[int, ...] = (128, 128, 96, 64, 32)) -> None:
        super().__init__()
        self.reach = reach
        self.layers = nn.ModuleList()
        for width in widths:
            self.layers.append(conv_leaky(before, width))
            before += width
        self.flow, self.width = nn.Conv2d(before, 2, 3, padding=1), before

    def likeness(self, first: Tensor, second: Tensor) -> Tensor:
        side, (height, width) = 2 * self.reach + 1, first.shape[2:]
        around = F.pad(second, (self.reach,) * 4)
        shifts = [(row, column) for row in range(side) for column in range(side)]
        found = [(first * around[:, :, row : row + height, column : column + width]).mean(1) for row, column in shifts]
        return F.leaky_relu(torch.stack(found, dim=1), 0.1)

    def forward(self, first: Tensor, second: Tensor, known: list[Tensor]) -> tuple[Tensor, Tensor]:
        x = torch.cat((self.likeness(first, second), first, *known), dim=1)
        for layer in self.layers:
            x = torch.cat((layer(x), x), dim=1)
        return self.flow(x), x


def shifted(x: Tensor, flow: Tensor) -> Tensor:
    """Features moved back along a flow."""
    height, width = x.shape[2:]
    rows = torch.arange(height, device=x.device, dtype=x.dtype)
    columns = torch.arange(width, device=x.device, dtype=x.dtype)
    across = 2 * (columns + flow[:, 0]) / (width - 1) - 1
    down = 2 * (rows[:, None] + flow[:, 1]) / (height - 1) - 1
    return F.grid_sample(x, torch.stack((across, down), dim=-1), align_corners=True)


class Pyramid(nn.Module):
    """Where each pixel goes between two pictures, from coarse to fine: at each size the second is moved back first."""

    def __init__(self, sizes: tuple[int, ...] = (16, 32, 64, 96, 128, 196), finest: int = 2, reach: int = 4) -> None:
        super().__init__()
        self.finest = finest
        self.features = nn.ModuleList(
            nn.Sequential(conv_leaky(before, after, 2), conv_leaky(after, after), conv_leaky(after, after))
            for before, after in pairwise((3, *sizes))
        )
        self.levels, self.larger_flow, self.larger = nn.ModuleList(), nn.ModuleList(), nn.ModuleList()
        for place, size in enumerate(reversed(sizes[finest - 1 :])):
            self.levels.append(FlowLevel((2 * reach + 1) ** 2 + size + (4 if place else 0), reach))
            if len(self.levels) <= len(sizes) - finest:
                self.larger_flow.append(nn.ConvTranspose2d(2, 2, 4, 2, 1))
                self.larger.append(nn.ConvTranspose2d(self.levels[-1].width, 2, 4, 2, 1))
        wide = self.levels[-1].width
        rates, widths = (1, 2, 4, 8, 16, 1), (wide, 128, 128, 128, 96, 64, 32)
        self.around = nn.Sequential(
            *(
                conv_leaky(before, after, 1, rate)
                for (before, after), rate in zip(pairwise(widths), rates, strict=True)
            ),
            nn.Conv2d(32, 2, 3, padding=1),
        )

    def _seen(self, picture: Tensor) -> list[Tensor]:
        found = []
        for layer in self.features:
            picture = layer(picture)
            found.append(picture)
        return found[self.finest - 1 :][::-1]

    def forward(self, first: Tensor, second: Tensor) -> list[Tensor]:
        flows: list[Tensor] = []
        known: list[Tensor] = []
        for place, (one, other) in enumerate(zip(self._seen(first), self._seen(second), strict=True)):
            if known:
                other = shifted(other, known[0] * (20 / 2 ** (len(self.features) - place)))
            flow, x = self.levels[place](one, other, known)
            if place < len(self.larger):
                known = [self.larger_flow[place](flow), self.larger[place](x)]
            else:
                flow = flow + self.around(x)
            flows.append(flow)
        return flows


class CodeUnit(nn.Module):
    """A dilated convolution and a small one, with a way around them."""

    def __init__(self, width: int, rate: int) -> None:
        super().__init__()
        weighted = nn.utils.parametrizations.weight_norm
        self.wide = weighted(nn.Conv1d(width, width // 2, 7, padding=3 * rate, dilation=rate))
        self.narrow = weighted(nn.Conv1d(width // 2, width, 1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.narrow(F.elu(self.wide(F.elu(x))))


class Codebooks(nn.Module):
    """Vectors as sums of codes: each codebook has what those before it have left."""

    def __init__(self, books: int, codes: int, width: int, small: int = 8) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(codes, small) for _ in range(books))
        self.into = nn.ModuleList(nn.Linear(width, small) for _ in range(books))
        self.out = nn.ModuleList(nn.Linear(small, width) for _ in range(books))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        left, found, apart = x, torch.zeros_like(x), x.new_zeros(())
        for table, into, out in zip(self.tables, self.into, self.out, strict=True):
            inner = into(left)
            likeness = F.normalize(inner, dim=-1) @ F.normalize(table.weight, dim=-1).transpose(0, 1)
            chosen = table(likeness.argmax(dim=-1))
            apart = apart + F.mse_loss(chosen, inner.detach()) + 0.25 * F.mse_loss(inner, chosen.detach())
            part = out(inner + (chosen - inner).detach())
            left, found = left - part, found + part
        return found, apart


class Codes(nn.Module):
    """Sound to few numbers and back: strided convolutions, a recurrent layer, and codebooks one after another."""

    def __init__(self, width: int = 32, strides: tuple[int, ...] = (2, 4, 5, 8), books: int = 8) -> None:
        super().__init__()
        weighted = nn.utils.parametrizations.weight_norm
        sizes = [width * 2**level for level in range(len(strides) + 1)]
        down, up = [weighted(nn.Conv1d(1, width, 7, padding=3))], []
        for (before, after), stride in zip(pairwise(sizes), strides, strict=True):
            smaller = nn.Conv1d(before, after, 2 * stride, stride, math.ceil(stride / 2))
            larger = nn.ConvTranspose1d(after, before, 2 * stride, stride, math.ceil(stride / 2), stride % 2)
            down += [*(CodeUnit(before, rate) for rate in (1, 3, 9)), nn.ELU(), weighted(smaller)]
            up = [nn.ELU(), weighted(larger), *(CodeUnit(before, rate) for rate in (1, 3, 9)), *up]
        wide = sizes[-1]
        self.down = nn.Sequential(*down)
        self.up = nn.Sequential(*up, nn.ELU(), weighted(nn.Conv1d(width, 1, 7, padding=3)))
        self.before, self.after = (nn.LSTM(wide, wide, 2, batch_first=True) for _ in range(2))
        self.books = Codebooks(books, 1024, wide)

    def forward(self, sound: Tensor) -> tuple[Tensor, Tensor]:
        x = self.down(sound).transpose(1, 2)
        codes, apart = self.books(x + self.before(x)[0])
        return self.up((codes + self.after(codes)[0]).transpose(1, 2)), apart


def spectra_apart(found: Tensor, sound: Tensor, windows: tuple[int, ...] = (2048, 1024, 512, 256, 128)) -> Tensor:
    """How far sounds are from each other in spectra of several windows, and in logarithms of them."""
    apart = found.new_zeros(())
    for window in windows:
        shape = torch.hann_window(window, device=found.device)
        spectra = (
            torch.stft(each.squeeze(1).float(), window, window // 4, window=shape, return_complex=True).abs() + 1e-5
            for each in (found, sound)
        )
        first, second = spectra
        apart = apart + F.l1_loss(first, second) + F.l1_loss(first.log(), second.log())
    return apart


def log_scan(keeps: Tensor, values: Tensor) -> Tensor:
    """Logarithms of states that are kept in part and added to at each place; both arguments are logarithms."""
    kept = keeps.cumsum(dim=1)
    return kept + (values - kept).logcumsumexp(dim=1)


class ScanBlock(nn.Module):
    """A short convolution, a gated recurrent part without memory in its gates, and a feed-forward part."""

    def __init__(self, width: int, growth: float = 1.5, kernel: int = 4) -> None:
        super().__init__()
        inner = int(width * growth)
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2))
        self.short = nn.Conv1d(width, width, kernel, padding=kernel - 1, groups=width)
        self.joint, self.out = nn.Linear(width, 2 * inner, bias=False), nn.Linear(inner, width, bias=False)
        self.gated, self.down = nn.Linear(width, 6 * width, bias=False), nn.Linear(3 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.short(self.norms[0](x).transpose(1, 2))[..., : x.shape[1]].transpose(1, 2)
        values, gates = self.joint(inner).float().chunk(2, dim=-1)
        positive = torch.where(values >= 0, (F.relu(values) + 0.5).log(), -F.softplus(-values))
        states = log_scan(-F.softplus(gates), -F.softplus(-gates) + positive).exp()
        x = x + self.out(states.to(x.dtype))
        gate, value = self.gated(self.norms[1](x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * value)


class ScanWords(nn.Module):
    """A language model of recurrent layers that are trained in parallel."""

    def __init__(self, vocabulary: int, width: int = 1280, depth: int = 16) -> None:
        super().__init__()
        self.words = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(ScanBlock(width) for _ in range(depth))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, words: Tensor) -> Tensor:
        x = self.words(words)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class SlotAttention(nn.Module):
    """Few slots that compete for the pixels of a picture, in rounds."""

    def __init__(self, width: int, slots: int, rounds: int = 3) -> None:
        super().__init__()
        self.rounds = rounds
        self.start, self.spread = nn.Parameter(torch.randn(1, slots, width)), nn.Parameter(torch.zeros(1, 1, width))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))
        self.query, self.joint = nn.Linear(width, width, bias=False), nn.Linear(width, 2 * width, bias=False)
        self.cell = nn.GRUCell(width, width)
        self.step = nn.Sequential(nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        keys, values = self.joint(self.norms[0](x)).chunk(2, dim=-1)
        start = self.start.expand(len(x), -1, -1)
        slots = start + self.spread.exp() * torch.randn_like(start)
        for _ in range(self.rounds):
            scores = self.query(self.norms[1](slots)) @ keys.transpose(1, 2) * keys.shape[-1] ** -0.5
            shares = scores.softmax(dim=1) + 1e-8
            seen = (shares / shares.sum(dim=-1, keepdim=True)) @ values
            slots = self.cell(seen.flatten(0, 1), slots.flatten(0, 1)).unflatten(0, slots.shape[:2])
            slots = slots + self.step(self.norms[2](slots))
        return slots


class Places(nn.Module):
    """Adds a product of the distances to the four sides."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weigh = nn.Linear(4, width)

    def forward(self, x: Tensor) -> Tensor:
        rows, columns = (torch.linspace(0, 1, size, device=x.device, dtype=x.dtype) for size in x.shape[2:])
        down, across = torch.meshgrid(rows, columns, indexing="ij")
        return x + self.weigh(torch.stack((down, across, 1 - down, 1 - across), dim=-1)).permute(2, 0, 1)


class Slots(nn.Module):
    """Pictures as sums of things: each slot is drawn by itself, with a mask that says where it is seen."""

    def __init__(self, width: int = 192, slots: int = 8) -> None:
        super().__init__()
        sizes = (3, width, width, width, width)
        self.see = nn.Sequential(
            *(
                part
                for place, (before, after) in enumerate(pairwise(sizes))
                for part in (nn.Conv2d(before, after, 5, 2 if place == 0 else 1, 2), nn.ReLU())
            ),
            Places(width),
        )
        self.read = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))
        self.slots, self.places = SlotAttention(width, slots), Places(width)
        self.draw = nn.Sequential(
            *(
                part
                for _ in range(4)
                for part in (nn.ConvTranspose2d(width, width, 5, 2, 2, output_padding=1), nn.ReLU())
            ),
            *(nn.Conv2d(width, width, 5, padding=2), nn.ReLU(), nn.Conv2d(width, 4, 3, padding=1)),
        )

    def forward(self, pictures: Tensor) -> Tensor:
        x = self.read(self.see(pictures).flatten(2).transpose(1, 2))
        slots = self.slots(x)
        spread = self.places(slots.flatten(0, 1)[..., None, None].expand(-1, -1, 8, 8))
        drawn = self.draw(spread).unflatten(0, slots.shape[:2])
        colours, masks = drawn.split((3, 1), dim=2)
        return (colours * masks.softmax(dim=1)).sum(dim=1)


class GatedPlaces(nn.Module):
    """A feed-forward part with a gate that mixes all places."""

    def __init__(self, width: int, inner: int, length: int) -> None:
        super().__init__()
        self.norm, self.gate_norm = nn.LayerNorm(width), nn.LayerNorm(inner // 2)
        self.into, self.out = nn.Linear(width, inner), nn.Linear(inner // 2, width)
        self.mix = nn.Conv1d(length, length, 1)
        nn.init.normal_(self.mix.weight, std=1e-6)
        nn.init.ones_(self.mix.bias)

    def forward(self, x: Tensor) -> Tensor:
        kept, gate = F.gelu(self.into(self.norm(x))).chunk(2, dim=-1)
        return x + self.out(kept * self.mix(self.gate_norm(gate)))


class Gates(nn.Sequential):
    """Masked words without attention."""

    def __init__(self, vocabulary: int, width: int = 1024, depth: int = 36, length: int = 512) -> None:
        blocks = (GatedPlaces(width, 6 * width, length) for _ in range(depth))
        super().__init__(
            *(nn.Embedding(vocabulary, width), *blocks, nn.LayerNorm(width), nn.Linear(width, vocabulary)),
        )


class FewShots(nn.Module):
    """Classes of pictures after a few steps on a handful of others; gradients pass through the steps."""

    def __init__(self, width: int = 64, ways: int = 5, steps: int = 3, rate: float = 0.01) -> None:
        super().__init__()
        self.steps, self.rate = steps, rate
        self.net = nn.Sequential(
            *(part for before in (3, width, width, width) for part in self._layer(before, width)),
            *(nn.Flatten(), nn.Linear(width * 25, ways)),
        )

    @staticmethod
    def _layer(before: int, after: int) -> tuple[nn.Module, ...]:
        return nn.Conv2d(before, after, 3, padding=1), nn.GroupNorm(8, after), nn.ReLU(), nn.MaxPool2d(2)

    def _adapted(self, weights: dict[str, Tensor], shown: Tensor, labels: Tensor, asked: Tensor) -> Tensor:
        """Logits of asked pictures for one task."""

        def loss(weights: dict[str, Tensor]) -> Tensor:
            return F.cross_entropy(torch.func.functional_call(self.net, weights, (shown,)), labels)

        for _ in range(self.steps):
            slopes = torch.func.grad(loss)(weights)
            weights = {name: value - self.rate * slopes[name] for name, value in weights.items()}
        return torch.func.functional_call(self.net, weights, (asked,))

    def forward(self, shown: Tensor, labels: Tensor, asked: Tensor) -> Tensor:
        weights = dict(self.net.named_parameters())
        return torch.func.vmap(self._adapted, in_dims=(None, 0, 0, 0))(weights, shown, labels, asked)


class ManyKernels(nn.Module):
    """Convolutions of three lengths side by side, and one after a pool."""

    def __init__(self, before: int, width: int, kernels: tuple[int, ...] = (9, 19, 39)) -> None:
        super().__init__()
        self.begin = nn.Conv1d(before, width, 1, bias=False)
        self.sides = nn.ModuleList(nn.Conv1d(width, width, size, padding=size // 2, bias=False) for size in kernels)
        self.pooled = nn.Sequential(nn.MaxPool1d(3, 1, 1), nn.Conv1d(before, width, 1, bias=False))
        self.norm = nn.BatchNorm1d(width * (len(kernels) + 1))

    def forward(self, x: Tensor) -> Tensor:
        begun = self.begin(x)
        return F.relu(self.norm(torch.cat((*(side(begun) for side in self.sides), self.pooled(x)), dim=1)))


class Heartbeats(nn.Module):
    """What is wrong with a heart, from twelve leads."""

    def __init__(self, leads: int = 12, width: int = 64, depth: int = 9, labels: int = 71) -> None:
        super().__init__()
        wide = 4 * width
        self.layers = nn.ModuleList(ManyKernels(leads if not place else wide, width) for place in range(depth))
        self.around = nn.ModuleList(
            nn.Sequential(nn.Conv1d(leads if not place else wide, wide, 1, bias=False), nn.BatchNorm1d(wide))
            for place in range(depth // 3)
        )
        self.head = nn.Linear(wide, labels)

    def forward(self, leads: Tensor) -> Tensor:
        x = kept = leads
        for place, layer in enumerate(self.layers):
            x = layer(x)
            if place % 3 == 2:
                x = kept = F.relu(x + self.around[place // 3](kept))
        return self.head(x.mean(dim=-1))
