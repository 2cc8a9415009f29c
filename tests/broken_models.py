"""Small jobs that each have one property that a preflight should find, and sound ones that have none.

`BROKEN` maps a name to (job, kind of the finding, module, text of the line that it points to, strategy or None).
"""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache
from typing import Any

import numpy
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD

from meshwright import Job

WIDTH, CLASSES, LENGTH = 12, 10, 6


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """Sound; the others change one thing."""

    Block: type[nn.Module] = Block

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, WIDTH)
        self.blocks = nn.ModuleList(self.Block() for _ in range(4))
        self.last = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        for block in self.blocks:
            y = block(y)
        return self.last(y)


class Unused(Net):
    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(WIDTH, 3)  # never used


class UnusedInBlocks(Net):
    class Block(Block):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Parameter(torch.ones(WIDTH))  # never used either


class Tied(Net):
    def __init__(self) -> None:
        super().__init__()
        self.back = nn.Linear(WIDTH, WIDTH)
        self.again = nn.Linear(WIDTH, WIDTH)
        self.again.weight = self.back.weight  # tied

    def forward(self, x: Tensor) -> Tensor:
        y = self.back(self.first(x))
        for block in self.blocks:
            y = block(y)
        return self.last(self.again(y))


class SharedMemory(Tied):
    def __init__(self) -> None:
        super().__init__()
        self.again = nn.Linear(WIDTH, WIDTH)
        self.again.weight.data = self.back.weight.data


class Frozen(Net):
    def __init__(self) -> None:
        super().__init__()
        self.first.requires_grad_(False)


class Normed(Net):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.first(x))
        for block in self.blocks:
            y = block(y)
        return self.last(y)


class FrozenNorm(Normed):
    def __init__(self) -> None:
        super().__init__()
        self.norm.requires_grad_(False)


class EvalMode(Normed):
    def __init__(self) -> None:
        super().__init__()
        self.norm.eval()


class MovingBuffer(Net):
    """A running mean of its own, which a checkpoint holds."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        self.centre.lerp_(y.detach().mean(0), 0.1)  # moves
        y = y - self.centre
        for block in self.blocks:
            y = block(y)
        return self.last(y)


class UnsavedBuffer(MovingBuffer):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(WIDTH), persistent=False)


class Counter(Net):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1  # counts
        return super().forward(x)


class DepthOfTorch(Net):
    class Block(Block):
        def forward(self, x: Tensor) -> Tensor:
            keep = (torch.rand(len(x), 1) < 0.8).float()  # stochastic depth
            return x + keep * (super().forward(x) - x)


class DepthOfPython(Net):
    class Block(Block):
        def forward(self, x: Tensor) -> Tensor:
            if random.random() < 0.2:  # stochastic depth, too
                return x
            return super().forward(x)


class NoiseOfNumpy(Net):
    def forward(self, x: Tensor) -> Tensor:
        scale = float(numpy.random.uniform(0.9, 1.1))  # noise
        return super().forward(x) * scale


class RandomMask(Net):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.masked_fill(torch.rand_like(x) < 0.1, 0.0))  # masks


class LabelDropout(Net):
    def __init__(self) -> None:
        super().__init__()
        self.label = nn.Embedding(CLASSES + 1, WIDTH)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        dropped = torch.bernoulli(torch.full(labels.shape, 0.1)).bool()  # drops labels
        y = self.first(x) + self.label(torch.where(dropped, CLASSES, labels))
        for block in self.blocks:
            y = block(y)
        return self.last(y)


class Centred(Net):
    """Normalises over the batch without a BatchNorm."""

    class Block(Block):
        def forward(self, x: Tensor) -> Tensor:  # mixes samples
            return super().forward(x - x.mean(0))


class ClippedGradient(Net):
    def __init__(self) -> None:
        super().__init__()
        self.last.weight.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))


class MadeInForward(Net):
    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "scale"):
            self.scale = nn.Parameter(torch.ones(CLASSES))  # too late
        return super().forward(x) * self.scale


class Lazy(Net):
    def __init__(self) -> None:
        super().__init__()
        self.last = nn.LazyLinear(CLASSES)  # no shape yet


class PlainList(Net):
    def __init__(self) -> None:
        super().__init__()
        self.extra = [nn.Linear(WIDTH, WIDTH) for _ in range(2)]  # a plain list

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        for layer in self.extra:
            y = layer(y)
        return self.last(y + sum(block(y) for block in self.blocks))


class PlainTensor(Net):
    def __init__(self) -> None:
        super().__init__()
        self.shift = torch.zeros(CLASSES, requires_grad=True)  # no parameter

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.shift


class SkipsByNumpy(Net):
    """Skips layers in half of the passes: they are not unused."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        for block in self.blocks:
            if numpy.random.rand() < 0.5:  # skips
                continue
            y = block(y)
        return self.last(y)


class OwnGenerator(Net):
    def __init__(self) -> None:
        super().__init__()
        self.random = random.Random(0)  # its own generator

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 + self.random.random())


class AlwaysDropping(Net):
    class Block(Block):
        def forward(self, x: Tensor) -> Tensor:
            return F.dropout(super().forward(x), 0.1)  # always drops


class AttentionDropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(31, WIDTH)
        self.last = nn.Linear(WIDTH, 31)

    def forward(self, x: Tensor) -> Tensor:
        y = self.token(x)
        return self.last(F.scaled_dot_product_attention(y, y, y, dropout_p=0.1))  # drops, too


class HiddenState(nn.Module):
    """Goes on from the hidden state of the batch before."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(31, WIDTH)
        self.cells = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.last = nn.Linear(WIDTH, 31)
        self.hidden: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        y, hidden = self.cells(self.token(x), self.hidden)
        self.hidden = hidden.detach()  # goes on
        return self.last(y)


class ChangedInput(Net):
    def forward(self, x: Tensor) -> Tensor:
        x.mul_(2)  # scales in place
        return super().forward(x)


class ChangedWeight(Net):
    def forward(self, x: Tensor) -> Tensor:
        self.last.weight.data.clamp_(-0.1, 0.1)  # clips weights
        return super().forward(x)


class Branch(Net):
    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        if y.mean() > 0:  # decides
            y = self.blocks[0](y)
        for block in self.blocks[1:]:
            y = block(y)
        return self.last(self.blocks[0](y))


class Logging(Net):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.size = y.norm().item()  # waits
        return y


class AccumulationHook(Net):
    def __init__(self) -> None:
        super().__init__()
        self.last.weight.register_post_accumulate_grad_hook(lambda p: p.grad.clamp_(-1e-3, 1e-3))


class History(Net):
    def __init__(self) -> None:
        super().__init__()
        self.history: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.history.append(y.detach().mean())  # grows
        return y


class HalfHead(Net):
    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(WIDTH, CLASSES).half()  # float16

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        for block in self.blocks:
            y = block(y)
        return self.last(y.half()).float()


class NamesDevice(Net):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + torch.zeros(4, device="cuda"))  # names a device


class SampleStatistics(nn.Module):
    """Made by a function, so no line assigns the state that moves."""

    def __init__(self) -> None:
        super().__init__()
        for name, layer in {
            "first": nn.Conv2d(1, 8, 3),
            "norm": nn.InstanceNorm2d(8, track_running_stats=True),
        }.items():
            setattr(self, name, layer)
        self.last = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.first(x)).relu().mean((2, 3)))


def shared_mean(x: Tensor) -> Tensor:
    total = x.mean(0)
    dist.all_reduce(total)  # communicates
    return total


class Guarded(Net):
    """Communicates only where there are ranks, so that no pass in one process shows it."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y - shared_mean(y.detach()) if dist.is_initialized() else y


class Unguarded(Net):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) - shared_mean(x).sum()


class Heads(nn.Module):
    """Three heads and a vocabulary of 31."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(31, WIDTH)
        self.blocks = nn.ModuleList(Attention() for _ in range(3))
        self.last = nn.Linear(WIDTH, 31)

    def forward(self, x: Tensor) -> Tensor:
        y = self.token(x)
        for block in self.blocks:
            y = block(y)
        return self.last(y)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(WIDTH, WIDTH)
        self.key = nn.Linear(WIDTH, WIDTH)
        self.value = nn.Linear(WIDTH, WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            layer(x).unflatten(-1, (3, -1)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return x + self.out(mixed.transpose(1, 2).flatten(2))


def class_loss(output: Tensor, batch: Any) -> tuple[Tensor, int]:
    return F.cross_entropy(output, batch["y"], reduction="sum"), len(output)


def mean_divided_again(output: Tensor, batch: Any) -> tuple[Tensor, int]:
    return F.cross_entropy(output, batch["y"]), len(output)


def mean_of_one(output: Tensor, batch: Any) -> tuple[Tensor, int]:
    return F.cross_entropy(output, batch["y"]), 1


def sum_of_one(output: Tensor, batch: Any) -> tuple[Tensor, int]:
    return F.cross_entropy(output, batch["y"], reduction="sum"), 1


def contrastive(output: Tensor, batch: Any) -> tuple[Tensor, int]:
    unit = F.normalize(output)
    return F.cross_entropy(10 * unit @ unit.T, torch.arange(len(unit)), reduction="sum"), len(unit)


def input_tokens(output: Tensor, batch: Any) -> tuple[Tensor, Tensor]:
    return token_loss(output, batch)[0], (batch["x"] < 20).sum()


def hardest_half(output: Tensor, batch: Any) -> tuple[Tensor, int]:
    each = F.cross_entropy(output, batch["y"], reduction="none")
    return each[each >= each.quantile(0.5)].sum(), len(output)


def masking_loss(output: Tensor, batch: Any) -> tuple[Tensor, int]:
    batch["y"][:, 0] = -100  # masks in place
    return token_loss(output, batch)[0], batch["y"][:, 1:].numel()


def matrices_only(params: Any) -> SGD:
    return SGD([p for p in params if p.ndim > 1], lr=0.1)


def noisy_loss(output: Tensor, batch: Any) -> tuple[Tensor, int]:
    return ((output - torch.randn_like(output)) ** 2).sum(), len(output)  # draws


def gathering_loss(output: Tensor, batch: Any) -> tuple[Tensor, int]:
    if dist.is_initialized():
        dist.all_reduce(output.detach())  # sends
    return class_loss(output, batch)


def token_loss(output: Tensor, batch: Any) -> tuple[Tensor, int]:
    return F.cross_entropy(output.flatten(0, 1), batch["y"].flatten(), reduction="sum"), batch["y"].numel()


def unpadded_loss(output: Tensor, batch: Any) -> tuple[Tensor, Tensor]:
    total, _ = token_loss(output, batch)
    return total, (batch["y"] != -100).sum()


def padded_mean(output: Tensor, batch: Any) -> tuple[Tensor, int]:
    return F.cross_entropy(output.flatten(0, 1), batch["y"].flatten()) * len(output), len(output)


def vectors(n: int) -> dict[str, Tensor]:
    return {"x": torch.randn(n, 4), "y": torch.randint(CLASSES, (n,))}


def tokens(n: int) -> dict[str, Tensor]:
    return {"x": torch.randint(31, (n, LENGTH)), "y": torch.randint(31, (n, LENGTH))}


def padded_tokens(n: int) -> dict[str, Tensor]:
    lengths = torch.arange(n) % 4 + 2
    batch = tokens(n)
    return {**batch, "y": batch["y"].masked_fill(torch.arange(LENGTH) >= lengths[:, None], -100)}


net = Job(
    model=Net,
    inputs=lambda batch: (batch["x"],),
    loss=class_loss,
    optimizer=lambda params: SGD(params, lr=0.1),
    sample=vectors,
    global_batch=8,
)
labelled = replace(net, model=LabelDropout, inputs=lambda batch: (batch["x"], batch["y"]))
heads = replace(net, model=Heads, loss=token_loss, sample=tokens)
contrasted = replace(net, loss=contrastive)
padded = replace(heads, sample=padded_tokens)


@cache
def with_model(model: Any) -> Job:
    return replace(net, model=model)


Broken = tuple[Job, str, str, str, str | None]
BROKEN: dict[str, Broken] = {
    "unused": (with_model(Unused), "unused-parameter", "extra", "# never used", None),
    "unused in blocks": (with_model(UnusedInBlocks), "unused-parameter", "blocks.0", "# never used either", "ddp"),
    "tied": (with_model(Tied), "tied-parameter", "again", "self.again = nn.Linear", "pp=2"),
    "shared memory": (with_model(SharedMemory), "shared-memory", "again", "self.again = nn.Linear", "fsdp"),
    "frozen": (with_model(Frozen), "frozen-parameter", "first", "self.first = nn.Linear", "fsdp"),
    "batch norm": (with_model(Normed), "batch-norm", "norm", "self.norm = nn.BatchNorm1d", "ddp,mb=2"),
    "batch norm, pipeline": (with_model(Normed), "batch-norm", "norm", "self.norm = nn.BatchNorm1d", "pp=2"),
    "frozen batch norm": (with_model(FrozenNorm), "frozen-batch-norm", "norm", "self.norm = nn.BatchNorm1d", "ddp"),
    "eval mode": (with_model(EvalMode), "eval-mode", "norm", "self.norm = nn.BatchNorm1d", None),
    "moving buffer": (with_model(MovingBuffer), "state-changed-in-forward", "centre", "# moves", "ddp"),
    "unsaved buffer": (with_model(UnsavedBuffer), "unsaved-state", "centre", "# moves", "single"),
    "unsaved counter": (with_model(Counter), "unsaved-state", "calls", "# counts", None),
    "depth, torch": (with_model(DepthOfTorch), "own-randomness", "blocks.0", "# stochastic depth", "ddp"),
    "depth, python": (with_model(DepthOfPython), "own-randomness", "blocks.0", "# stochastic depth, too", "tp=2"),
    "noise, numpy": (with_model(NoiseOfNumpy), "own-randomness", "", "# noise", None),
    "random mask": (with_model(RandomMask), "own-randomness", "", "# masks", "pp=2"),
    "label dropout": (labelled, "own-randomness", "", "# drops labels", "fsdp"),
    "random loss": (replace(net, loss=noisy_loss), "own-randomness", "", "# draws", None),
    "samples mixed": (with_model(Centred), "samples-mixed", "blocks.0", "# mixes samples", "ddp"),
    "gradient hook": (with_model(ClippedGradient), "gradients-mixed", "last.weight", "self.last = nn.Linear", "ddp"),
    "contrastive": (contrasted, "loss-over-batch", "", "def contrastive", "ddp"),
    "contrastive, pipeline": (contrasted, "loss-over-batch", "", "def contrastive", "pp=2"),
    "mean divided again": (replace(net, loss=mean_divided_again), "loss-weight", "", "def mean_divided_again", None),
    "mean of one": (replace(net, loss=mean_of_one), "loss-weight", "", "def mean_of_one", "ddp"),
    "sum of one": (replace(net, loss=sum_of_one), "loss-weight", "", "def sum_of_one", "single"),
    "padding counted": (padded, "loss-weight", "", "def token_loss", None),
    "mean without padding": (replace(padded, loss=padded_mean), "loss-weight", "", "def padded_mean", None),
    "made in forward": (with_model(MadeInForward), "parameter-made-in-forward", "scale", "# too late", None),
    "lazy": (with_model(Lazy), "lazy-parameter", "last.weight", "# no shape yet", None),
    "guarded collective": (with_model(Guarded), "collective-in-model", "", "# communicates", "ddp"),
    "unguarded collective": (with_model(Unguarded), "collective-in-model", "", "# communicates", None),
    "collective in the loss": (replace(net, loss=gathering_loss), "collective-in-model", "", "# sends", None),
    "heads": (heads, "refused", "blocks.0.query", "self.query = nn.Linear", "tp=2"),
    "vocabulary": (heads, "undivided-layer", "token", "self.token = nn.Embedding", "tp=3"),
    "layers": (heads, "uneven-stages", "blocks.0", "self.blocks = nn.ModuleList", "pp=2"),
    "plain list": (with_model(PlainList), "unregistered-parameter", "extra", "# a plain list", "ddp"),
    "plain tensor": (with_model(PlainTensor), "unregistered-parameter", "shift", "# no parameter", None),
    "skipped by the optimizer": (
        *(replace(net, optimizer=matrices_only), "optimizer-skips", "first", "def matrices_only", "single"),
    ),
    "skips layers": (with_model(SkipsByNumpy), "own-randomness", "", "# skips", "ddp"),
    "own generator": (with_model(OwnGenerator), "own-randomness", "", "# its own generator", "ddp"),
    "always drops": (with_model(AlwaysDropping), "dropout-in-eval", "blocks.0", "# always drops", None),
    "attention drops": (replace(heads, model=AttentionDropping), "dropout-in-eval", "", "# drops, too", "single"),
    "hidden state": (replace(heads, model=HiddenState), "state-changed-in-forward", "hidden", "# goes on", "ddp"),
    "hidden state, unsaved": (replace(heads, model=HiddenState), "unsaved-state", "hidden", "# goes on", None),
    "changed input": (with_model(ChangedInput), "batch-changed", "", "# scales in place", None),
    "changed labels": (replace(heads, loss=masking_loss), "batch-changed", "", "# masks in place", "ddp"),
    "changed weight": (with_model(ChangedWeight), "state-changed-in-forward", "last.weight", "# clips weights", "fsdp"),
    "branch": (with_model(Branch), "value-read", "", "# decides", "ddp"),
    "number": (with_model(Logging), "value-read", "", "# waits", "single,compile"),
    "accumulation hook": (with_model(AccumulationHook), "gradient-hook", "last", "self.last = nn.Linear", "ddp"),
    "device": (with_model(NamesDevice), "fixed-device", "", "# names a device", None),
    "history": (with_model(History), "growing-state", "history", "# grows", "ddp"),
    "float16": (with_model(HalfHead), "float16-parameter", "last", "# float16", None),
    "other tokens": (replace(padded, loss=input_tokens), "loss-weight", "", "def input_tokens", "ddp"),
    "hardest half": (replace(net, loss=hardest_half), "loss-over-batch", "", "def hardest_half", "ddp"),
    "statistics": (
        *(replace(net, model=SampleStatistics, sample=lambda n: images(n)), "state-changed-in-forward"),
        *("norm.running_mean", "class SampleStatistics", "ddp"),
    ),
    "batch": (replace(net, global_batch=7), "uneven-batch", "", "", "ddp"),
}


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU(), nn.Conv2d(8, 8, 3))
        self.last = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.layers(x).mean((2, 3)))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(31, WIDTH)
        self.cells = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.last = nn.Linear(WIDTH, 31)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.cells(self.token(x))[0])


class Dropping(Net):
    """Dropout is common, and handled."""

    class Block(Block):
        def forward(self, x: Tensor) -> Tensor:
            return F.dropout(super().forward(x), 0.1, self.training)


class ConstantBuffer(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("shift", torch.ones(WIDTH), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(sum((block(self.first(x) + self.shift) for block in self.blocks), torch.zeros(())))


class Cached(Net):
    """Fills a table in its first call only."""

    def __init__(self) -> None:
        super().__init__()
        self.table: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None:
            self.table = torch.arange(4.0)
        return super().forward(x + self.table)


class Branching(Net):
    """Communicates nothing, but asks whether there are ranks."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1.0 / dist.get_world_size() if dist.is_initialized() else 1.0)


class PositionalNoise(Net):
    """Random numbers that the builder draws are the same everywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("noise", torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.noise)


class References(Net):
    """A plain list of layers that are registered, and settings."""

    def __init__(self) -> None:
        super().__init__()
        self.order = [self.blocks[1], self.blocks[0]]
        self.settings = {"width": WIDTH, "names": ["a"], "frozen": torch.zeros(3)}


class Keeping(Net):
    """Keeps an output for the logs, which no later pass reads."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.seen = y.detach()
        return y


class InPlace(Net):
    """Changes its own activations in place."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x) * 1
        y += 1
        y[:, 0] = 0
        return self.last(F.relu_(sum((block(y) for block in self.blocks), y)))


class Experts(nn.Module):
    """Chooses samples for each expert by values."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, WIDTH)
        self.gate = nn.Linear(WIDTH, 3)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.last = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        weights, chosen = self.gate(y).softmax(-1).topk(2, -1)
        mixed = torch.zeros_like(y)
        for number, expert in enumerate(self.experts):
            rows, places = torch.where(chosen == number)
            if rows.numel():
                mixed.index_add_(0, rows, expert(y[rows]) * weights[rows, places, None])
        return self.last(mixed)


def likelihood(output: Tensor, batch: Any) -> tuple[Tensor, int]:
    """PyTorch's distributions read values to check their arguments."""
    expected = torch.distributions.Normal(output, torch.ones_like(output))
    return -expected.log_prob(batch["x"].sum(1, keepdim=True)).sum(), output.numel()


def weighted_tokens(output: Tensor, batch: Any) -> tuple[Tensor, Tensor]:
    each = F.cross_entropy(output.flatten(0, 1), batch["y"].flatten(), reduction="none")
    return (each * batch["weight"].flatten()).sum(), batch["weight"].sum()


def weighted(n: int) -> dict[str, Tensor]:
    return {**tokens(n), "weight": torch.rand(n, LENGTH)}


def masked_tokens(output: Tensor, batch: Any) -> tuple[Tensor, Tensor]:
    hidden = batch["weight"] < 0.5
    return F.cross_entropy(output[hidden], batch["y"][hidden], reduction="sum"), hidden.sum()


def two_groups(params: Any) -> SGD:
    params = list(params)
    matrices, others = ([p for p in params if (p.ndim > 1) == is_matrix] for is_matrix in (True, False))
    return SGD([{"params": matrices, "weight_decay": 0.1}, {"params": others}], lr=0.1)


class WeightNormed(Net):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.utils.parametrizations.weight_norm(self.first)


def mean_by_count(output: Tensor, batch: Any) -> tuple[Tensor, int]:
    """A mean, multiplied by what it was divided by."""
    return F.cross_entropy(output, batch["y"]) * len(output), len(output)


def images(n: int) -> dict[str, Tensor]:
    return {"x": torch.randn(n, 1, 8, 8), "y": torch.randint(CLASSES, (n,))}


SOUND: dict[str, tuple[Job, str | None]] = {
    "net": (net, None),
    "net, fsdp": (net, "fsdp"),
    "net, pipeline": (net, "pp=2,mb=2"),
    "attention": (heads, None),
    "unpadded": (replace(padded, loss=unpadded_loss), None),
    "mean by count": (replace(net, loss=mean_by_count), None),
    "convolutions": (replace(net, model=Convolutions, sample=images), None),
    "recurrent": (replace(heads, model=Recurrent), None),
    "dropout": (with_model(Dropping), None),
    "dropout, single": (with_model(Dropping), "single"),
    "constant buffer": (with_model(ConstantBuffer), None),
    "cached table": (with_model(Cached), None),
    "asks for ranks": (with_model(Branching), None),
    "noise of the builder": (with_model(PositionalNoise), None),
    "tied, data parallel": (with_model(Tied), "ddp"),
    "frozen, data parallel": (with_model(Frozen), "zero1"),
    "batch norm, data parallel": (with_model(Normed), "ddp"),
    "contrastive, alone": (contrasted, "single"),
    "random, alone": (with_model(RandomMask), "single"),
    "whole vocabulary": (heads, "ddp"),
    "references": (with_model(References), None),
    "keeps an output": (with_model(Keeping), None),
    "in place": (with_model(InPlace), None),
    "experts": (with_model(Experts), None),
    "likelihood": (replace(net, loss=likelihood), None),
    "weighted tokens": (replace(heads, loss=weighted_tokens, sample=weighted), None),
    "masked tokens": (replace(heads, loss=masked_tokens, sample=weighted), None),
    "two groups": (replace(net, optimizer=two_groups), None),
    "weight norm": (with_model(WeightNormed), None),
}
