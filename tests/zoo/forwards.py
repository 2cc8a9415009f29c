"""Habits of forward passes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from meshwright import Job
from zoo.jobs import (
    CLASSES,
    LENGTH,
    STRATEGIES,
    VOCABULARY,
    WIDTH,
    Block,
    Trunk,
    entry,
    make_job,
    sequences,
    tokens,
    vectors,
)


class Hooked(nn.Module):
    """Hooks of every kind, each of which changes a number."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = Trunk()
        self.trunk.blocks[0].register_forward_hook(lambda module, args, output: output * 1.5)
        self.trunk.blocks[1].register_forward_pre_hook(lambda module, args: (args[0] + 0.25,))
        self.trunk.enter.register_full_backward_hook(
            lambda module, inside, outside: tuple(None if g is None else g * 0.5 for g in inside)
        )
        self.trunk.leave.register_full_backward_pre_hook(lambda module, outside: (outside[0] * 2,))
        self.trunk.leave.weight.register_hook(lambda gradient: gradient * 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.trunk(x)


@entry()
def hooks() -> Job:
    """Forward, pre-forward, backward, pre-backward and tensor hooks that change numbers."""
    return make_job(Hooked)


class Collected(nn.Module):
    """A hook collects features of a deep layer, which the head uses."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = Trunk(leave=nn.Identity())
        self.head = nn.Linear(2 * WIDTH, CLASSES)
        self.seen: list[Tensor] = []
        self.trunk.blocks[1].register_forward_hook(lambda module, args, output: self.seen.append(output))

    def forward(self, x: Tensor) -> Tensor:
        self.seen.clear()
        y = self.trunk(x)
        return self.head(torch.cat([y, self.seen[0]], -1))


@entry()
def features_by_hook() -> Job:
    """Features that a hook of a middle layer puts into a list."""
    return make_job(Collected)


class Renamed(nn.Module):
    """A state-dict hook and a loading hook that add an entry and drop it again."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = Trunk()
        self._register_state_dict_hook(self._add)
        self.register_load_state_dict_pre_hook(self._drop)

    @staticmethod
    def _add(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> dict[str, Any]:
        state[prefix + "version"] = torch.tensor(2)
        return state

    @staticmethod
    def _drop(module: nn.Module, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        state.pop(prefix + "version", None)

    def forward(self, x: Tensor) -> Tensor:
        return self.trunk(x)


@entry()
def state_dict_hooks() -> Job:
    """A state-dict hook that adds an entry."""
    return make_job(Renamed)


class Branching(nn.Module):
    """Each sample takes a branch by its values; the model as a whole takes one by a parameter's."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = Trunk(leave=nn.Identity())
        self.small = nn.Linear(WIDTH, CLASSES)
        self.large = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.trunk(x))
        if self.small.weight.sum() > 0:
            y = y * 2
        return torch.stack([self.small(row) if row.sum() > 0 else self.large(row) for row in y])


@entry()
def control_by_value() -> Job:
    """Branches by values, of a parameter and of each sample."""
    return make_job(Branching)


class ReadsChild(nn.Module):
    """Uses children's weights and shapes without calling them."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 12)
        self.down = nn.Linear(12, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        scale = self.up.weight.shape[0] ** -0.5
        y = self.down(torch.tanh(self.up(x)) * scale * self.up.out_features)
        return self.head(y) + self.down.weight.pow(2).mean() + self.up.bias.norm()


@entry()
def reads_child() -> Job:
    """A scale from a child's shape, and a child's weight in the output."""
    return make_job(ReadsChild)


class Penalised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = Trunk()

    def forward(self, x: Tensor) -> dict[str, Any]:
        penalty = sum(p.square().sum() for name, p in self.named_parameters() if "weight" in name)
        return {"output": self.trunk(x), "penalty": penalty}


def penalised_loss(output: Any, batch: Any) -> tuple[Tensor, int]:
    n = len(batch["y"])
    return F.mse_loss(output["output"], batch["y"], reduction="sum") + n * 1e-2 * output["penalty"], n


@entry()
def penalty_over_parameters() -> Job:
    """The model returns a penalty over all of its parameters, and the loss adds it."""
    return make_job(Penalised, loss=penalised_loss)


class Exponent(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return torch.exp(-x.square()) * weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        bell = torch.exp(-x.square())
        return -2 * x * bell * weight * gradient, (gradient * bell).sum(0)


class OwnFunction(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = Trunk(leave=nn.Identity())
        self.gain = nn.Parameter(torch.rand(WIDTH))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(Exponent.apply(self.trunk(x), self.gain))


@entry()
def own_autograd_function() -> Job:
    """A custom autograd.Function with a parameter of the model."""
    return make_job(OwnFunction)


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.enter = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.leave = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.leave(x)


@entry()
def checkpointed() -> Job:
    """The author's own activation checkpointing."""
    return make_job(lambda: Checkpointed(reentrant=False))


@entry()
def checkpointed_reentrant() -> Job:
    """The author's own activation checkpointing, the reentrant one."""
    return make_job(lambda: Checkpointed(reentrant=True))


@dataclass
class Output:
    logits: Tensor
    hidden: tuple[Tensor, ...]
    note: str = "done"
    nothing: Tensor | None = None


class Structured(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = Trunk(leave=nn.Identity())
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, *, values: dict[str, Tensor], scale: float = 1.0, flag: str = "on") -> Output:
        y = self.trunk(values["x"] * scale)
        return Output(self.head(y), (y, y.detach()))


@entry()
def dataclass_output() -> Job:
    """Keyword arguments only, a nested dict and a string in; a dataclass with None and a string out."""
    return make_job(
        Structured,
        inputs=lambda batch: {"values": {"x": batch["x"]}, "scale": 0.5, "flag": "off"},
        loss=lambda output, batch: (
            F.mse_loss(output.logits, batch["y"], reduction="sum") + output.hidden[0].square().sum(),
            len(batch["y"]),
        ),
    )


class WithLoss(nn.Module):
    """As nanoGPT: the loss is computed in the model when targets are given."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, WIDTH)
        self.trunk = Trunk(leave=nn.Linear(WIDTH, VOCABULARY))

    def forward(self, x: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        logits = self.trunk(self.token(x))
        if targets is None:
            return logits, None
        return logits, F.cross_entropy(logits.view(-1, VOCABULARY), targets.view(-1))


@entry()
def loss_inside() -> Job:
    """The loss is computed inside the model."""
    return make_job(
        WithLoss,
        tokens,
        inputs=lambda batch: (batch["x"], batch["y"]),
        loss=lambda output, batch: (output[1] * batch["y"].numel(), batch["y"].numel()),
    )


class Recursive(nn.Module):
    """A tree of modules that call their own kind."""

    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        self.here = nn.Linear(WIDTH, WIDTH)
        self.left = Recursive(depth - 1) if depth else None
        self.right = Recursive(depth - 1) if depth else None

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.here(x))
        if self.left is None or self.right is None:
            return x
        return self.left(x) + self.right(x.flip(-1))


@entry()
def recursion() -> Job:
    """A module that holds and calls its own kind."""
    return make_job(lambda: nn.Sequential(Recursive(), nn.Linear(WIDTH, CLASSES)))


class Twice(nn.Module):
    """Blocks called twice in turn, as in a universal transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.leave = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for _ in range(2):
            for block in self.blocks:
                x = block(x)
        return self.leave(x)


@entry()
def called_twice() -> Job:
    """Every block is called twice."""
    return make_job(Twice)


class Rotary(nn.Module):
    """Attention by einsum over rotated queries and keys, with tables that the first pass makes and keeps."""

    def __init__(self, width: int = 8, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.RMSNorm(width)
        self.q, self.k, self.v = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.out = nn.Linear(width, width)
        self.table: Tensor | None = None

    def _rotate(self, x: Tensor) -> Tensor:
        if self.table is None or self.table.dtype != x.dtype:
            angles = torch.outer(torch.arange(LENGTH), 1.0 / 10 ** torch.arange(x.shape[-1] // 2))
            self.table = torch.stack([angles.cos(), angles.sin()]).to(x)
        cos, sin = self.table[0][:, None], self.table[1][:, None]
        a, b = x.chunk(2, -1)
        return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        q, k, v = (layer(y).unflatten(-1, (self.heads, -1)) for layer in (self.q, self.k, self.v))
        scores = torch.einsum("bqhd,bkhd->bhqk", self._rotate(q), self._rotate(k)) / math.sqrt(q.shape[-1])
        mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
        mixed = torch.einsum("bhqk,bkhd->bqhd", scores.masked_fill(mask, -torch.inf).softmax(-1), v)
        return x + self.out(mixed.flatten(2))


class RotaryModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, 8)
        self.blocks = nn.ModuleList(Rotary() for _ in range(4))
        self.head = nn.Linear(8, VOCABULARY)

    def forward(self, x: Tensor) -> Tensor:
        y = self.token(x) * self.token.embedding_dim**0.5
        for block in self.blocks:
            y = block(y)
        return self.head(y)


@entry()
def rotary_einsum() -> Job:
    """Attention by einsum with rotary tables that the first forward makes and keeps as an attribute."""
    return make_job(RotaryModel, tokens)


class Functional(nn.Module):
    """torch.func in a forward: an ensemble by vmap over stacked parameters, and a functional_call."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.randn(3, WIDTH, WIDTH) * 0.3)
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        several = torch.func.vmap(lambda w: torch.tanh(x @ w))(self.weights).mean(0)
        doubled = {"weight": self.layer.weight * 2, "bias": self.layer.bias}
        return self.head(several + torch.func.functional_call(self.layer, doubled, (x,)))


@entry()
def functional() -> Job:
    """torch.func: vmap over stacked parameters and functional_call of a child."""
    return make_job(Functional)


class Energy(nn.Module):
    """A force field: the output is the gradient of an energy, so training differentiates twice."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            place = x.detach().requires_grad_(True)
            (force,) = torch.autograd.grad(self.energy(place).sum(), place, create_graph=True)
        return force[:, :CLASSES]


@entry()
def double_backward() -> Job:
    """autograd.grad with create_graph in the forward: a force field."""
    return make_job(Energy)


class Fourier(nn.Module):
    """Complex parameters, as in a Fourier neural operator."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(WIDTH, 8)
        self.weight = nn.Parameter(torch.randn(8, 8, dtype=torch.cfloat) * 0.2)
        self.leave = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        modes = torch.fft.rfft(self.enter(x), dim=1)
        modes = torch.einsum("bmi,io->bmo", modes.to(self.weight.dtype), self.weight)
        return self.leave(torch.fft.irfft(modes, n=LENGTH, dim=1)[:, 1])


@entry(double=False)
def complex_weights() -> Job:
    """A complex parameter and Fourier transforms, with clipping."""
    return make_job(Fourier, sequences, optimizer=lambda params: torch.optim.SGD(params, lr=1.0), max_norm=0.5)


class Doubles(nn.Module):
    """An fp32 model with a part in float64."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(WIDTH, WIDTH)
        self.exact = nn.Linear(WIDTH, WIDTH).double()
        self.leave = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(torch.tanh(self.exact(self.enter(x).double())).float())


@entry(double=False)
def double_part() -> Job:
    """A layer in float64 in a model of float32."""
    return make_job(Doubles)


class Hyper(nn.Module):
    """A network that makes the weights of another."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Parameter(torch.randn(4))
        self.make = nn.Linear(4, WIDTH * CLASSES + CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.make(self.embedding).split([WIDTH * CLASSES, CLASSES])
        return F.linear(x, weight.view(CLASSES, WIDTH), bias)


@entry()
def hypernetwork() -> Job:
    """Weights made by another network."""
    return make_job(Hyper)


class InPlace(nn.Module):
    """In-place operators on activations, on slices and on a fresh tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.leave = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for layer in self.layers:
            y = layer(x)
            y[:, 0] = 0.5
            y.mul_(2).clamp_(-3, 3)
            F.leaky_relu_(y, 0.2)
            out += y
            x = y.sigmoid()
        return self.leave(out)


@entry()
def in_place() -> Job:
    """In-place operators on activations and on slices of them."""
    return make_job(InPlace)


class Late(nn.Module):
    """Makes a layer in its first forward, which an optimizer made before does not know."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(WIDTH, WIDTH)
        self.late: nn.Module | None = None
        self.leave = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        if self.late is None:
            self.late = nn.LayerNorm(x.shape[-1]).to(x)
        return self.leave(self.late(x))


@entry(refused=dict.fromkeys(("single", *STRATEGIES), r"makes a parameter in its forward pass \(late\.bias\)"))
def module_made_in_forward() -> Job:
    """A module that the first forward makes."""
    return make_job(Late)


@entry(refused=dict.fromkeys(("single", *STRATEGIES), "shape"))
def lazy_until_trained() -> Job:
    """A LazyLinear that has no shape until the first step."""
    return make_job(lambda: nn.Sequential(nn.LazyLinear(WIDTH), nn.Tanh(), nn.Linear(WIDTH, CLASSES)))


@entry(refused=dict.fromkeys(("single", *STRATEGIES), r"torch\.jit"))
def scripted_part() -> Job:
    """A part compiled by torch.jit.script."""

    def build() -> nn.Module:
        import warnings

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            middle = torch.jit.script(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()))
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), middle, nn.Linear(WIDTH, CLASSES))

    return make_job(build)


class Kwargs(nn.Module):
    """Blocks that hand on a tuple with None and a dict of cached values."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Passing() for _ in range(4))
        self.leave = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x, cache = self.enter(x), {"sum": torch.zeros_like(x), "none": None}
        for number, block in enumerate(self.blocks):
            x, cache = block(x, cache=cache, number=number)
        return self.leave(x + cache["sum"])


class Passing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, cache: dict[str, Any], number: int) -> tuple[Tensor, dict[str, Any]]:
        x = torch.tanh(self.layer(x)) * (1 + number)
        return x, {"sum": cache["sum"] + x, "none": None}


@entry()
def dict_between_blocks() -> Job:
    """Blocks hand on a dict with a None, and take a number."""
    return make_job(Kwargs)


@entry()
def tuple_inputs() -> Job:
    """Two inputs that are broadcast against a constant which is no sample's."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.trunk = Trunk()

        def forward(self, x: Tensor, pair: tuple[Tensor, Tensor]) -> Tensor:
            return self.trunk(x * pair[0] + pair[1])

    return make_job(
        Two,
        lambda n: {**vectors(n), "scale": torch.linspace(0.5, 1.5, WIDTH)},
        inputs=lambda batch: (batch["x"], (batch["scale"], batch["x"].flip(-1))),
    )
