"""BatchNorm over ranks: by answering the call of `batch_norm` inside of the module's own forward."""

import inspect
from collections import Counter
from dataclasses import fields
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules._functions import SyncBatchNorm

import meshwright as mw
from meshwright.assemble.batchnorm import (
    NormCall,
    normalise_plainly,
    synchronise_batch_norms,
    take_over_synchronised,
)
from meshwright.assemble.world import World
from meshwright.describe.model import describe
from meshwright.errors import JobError
from meshwright.facts.strategy import Strategy
from meshwright.facts.trace import Trace
from meshwright.tracing import trace_step
from rank_pool import RankPool

CHANNELS = 3


class Activated(nn.BatchNorm2d):
    """Normalises and activates in its own forward, as timm's do."""

    def forward(self, x: Tensor) -> Tensor:
        counted = self.training and self.track_running_stats
        if counted:
            self.num_batches_tracked.add_(1)
        mean, variance = (self.running_mean, self.running_var) if not self.training or counted else (None, None)
        share = self.momentum if self.momentum is not None else 1.0 / float(self.num_batches_tracked)
        uses_batch = self.training or self.running_mean is None
        y = F.batch_norm(x, mean, variance, self.weight, self.bias, uses_batch, share, self.eps)
        return F.silu(y)


class Functional(nn.BatchNorm1d):
    """Calls the function below `F.batch_norm`, and standardises its weight by the other."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.batch_norm(
            x, self.weight, self.bias, self.running_mean, self.running_var, self.training, 0.1, self.eps, False
        )


class ByHand(nn.BatchNorm1d):
    def forward(self, x: Tensor) -> Tensor:
        return (x - x.mean(0)) / (x.var(0) + self.eps).sqrt()


NORMS: dict[str, Any] = {
    "plain": lambda: nn.BatchNorm2d(CHANNELS),
    "activated": lambda: Activated(CHANNELS),
    "cumulative": lambda: Activated(CHANNELS, momentum=None),
    "untracked": lambda: nn.BatchNorm2d(CHANNELS, track_running_stats=False),
    "not affine": lambda: nn.BatchNorm2d(CHANNELS, affine=False),
    "double": lambda: Activated(CHANNELS).double(),
    "synchronised": lambda: nn.SyncBatchNorm(CHANNELS),
    "one value a channel": lambda: Functional(CHANNELS),
}


def batch_for(kind: str, ranks: int) -> Tensor:
    torch.manual_seed(1)
    x = torch.randn(ranks, CHANNELS) if kind == "one value a channel" else torch.randn(2 * ranks, CHANNELS, 2, 2)
    return x.double() * 5 + 3 if kind == "double" else x * 5 + 3


def normalised(world: World | None, kind: str, compiled: bool = False) -> list[Tensor]:
    """Outputs in training and in evaluation, gradients of input and parameters, and buffers; of all ranks together."""
    torch.manual_seed(0)
    ranks, rank = (world.ranks, world.rank) if world else (2, 0)
    model = nn.Sequential(NORMS[kind]())
    norm = model[0]
    if norm.affine:
        nn.init.normal_(norm.weight), nn.init.normal_(norm.bias)
    if world is not None:
        take_over_synchronised(model)
        synchronise_batch_norms(model, dist.group.WORLD, normalise_plainly)
    whole = batch_for(kind, ranks)
    x = whole.chunk(ranks)[rank] if world else whole
    x = x.clone().requires_grad_()
    call = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
    for _ in range(2):
        y = call(x)
    (y * y.detach().cos()).sum().backward()
    gradients = [x.grad, *(p.grad for p in model.parameters())]
    if world is not None:
        for gradient in gradients[1:]:
            dist.all_reduce(gradient)
        parts = [[torch.empty_like(t) for _ in range(ranks)] for t in (y, x)]
        dist.all_gather(parts[0], y.detach()), dist.all_gather(parts[1], gradients[0])
        y, gradients[0] = torch.cat(parts[0]), torch.cat(parts[1])
    model.eval()
    after = [] if kind == "untracked" else [model(whole).detach()]
    return [y.detach(), *gradients, *after, *(b.clone() for b in model.buffers())]


@pytest.mark.slow
@pytest.mark.parametrize("kind", NORMS)
def test_ranks_normalise_as_one_process(two_ranks: RankPool, kind: str) -> None:
    expected = normalised(None, kind)
    for found in two_ranks(normalised, kind):
        for ours, theirs in zip(found, expected, strict=True):
            tolerance = 1e-12 if kind == "double" else 1e-5
            torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["plain", "untracked", "not affine"])
def test_the_compiler_follows_them(two_ranks: RankPool, kind: str) -> None:
    """As one graph; where it stops, the block that it is in runs eagerly."""
    expected = normalised(None, kind)
    for found in two_ranks(normalised, kind, True):
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def refusal(world: World) -> str:
    model = nn.Sequential(nn.Linear(CHANNELS, CHANNELS), ByHand(CHANNELS))
    synchronise_batch_norms(model, dist.group.WORLD, normalise_plainly)
    with pytest.raises(JobError) as raised:
        model(torch.randn(4, CHANNELS))
    model.eval()(torch.randn(4, CHANNELS))
    return str(raised.value)


@pytest.mark.slow
def test_statistics_by_hand_are_refused_by_name(two_ranks: RankPool) -> None:
    assert all("1 is a BatchNorm whose forward does not call F.batch_norm" in text for text in two_ranks(refusal))


def test_outside_of_a_batch_norm_the_function_is_itself() -> None:
    """Weight standardisation normalises weights by it."""
    model = nn.Sequential(nn.BatchNorm1d(CHANNELS))
    synchronise_batch_norms(model, dist.group.WORLD, normalise_plainly)
    weight = torch.randn(1, CHANNELS, 8)
    standardised = F.batch_norm(weight, None, None, training=True)
    torch.testing.assert_close(standardised.mean(2), torch.zeros(1, CHANNELS), rtol=0, atol=1e-6)


def test_the_kernels_of_torch_are_called_as_they_want() -> None:
    """They are private, behind `nn.SyncBatchNorm`."""
    wanted = list(inspect.signature(SyncBatchNorm.forward).parameters)[1:]
    assert wanted == [
        "input",
        "weight",
        "bias",
        "running_mean",
        "running_var",
        "eps",
        "momentum",
        "process_group",
        "world_size",
    ]
    given = [name for name in inspect.signature(F.batch_norm).parameters if name != "training"]
    assert [item.name for item in fields(NormCall)] == given


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolve, self.normalise = nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.normalise(self.convolve(x)).relu()


def traced(strategy: str, ranks: int) -> Trace:
    def build() -> nn.Module:
        return nn.Sequential(*(Block() for _ in range(4)), nn.Flatten(), nn.Linear(8 * 64 * 64, 2))

    job = mw.Job(
        model=build,
        inputs=lambda batch: (batch,),
        loss=lambda output, batch: (output.square().sum(), len(batch)),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        sample=lambda count: torch.randn(count, 8, 64, 64),
        global_batch=16 * ranks,
    )
    return trace_step(job, describe(job), Strategy.parse(strategy), ranks=ranks)


def test_a_trace_holds_what_the_kernels_of_torch_hold() -> None:
    """Plain operators keep several tensors where PyTorch's kernels on GPUs keep their input."""
    alone, among = traced("single", 1), traced("ddp", 2)
    assert among.memory["activations"] == pytest.approx(alone.memory["activations"], rel=0.02)


def test_statistics_are_sent() -> None:
    """Four times a mean, a deviation and the count of each of 8 channels, and two sums of gradients in backward."""
    messages = traced("ddp", 2).messages
    gathered = [one for one in messages if "gather" in one.kind]
    assert sum(one.bytes * one.count for one in gathered) == 4 * 2 * (2 * 8 + 1) * 4


def test_a_compiled_trace_sums_statistics_in_its_graph() -> None:
    """A sum and a count of each of 8 channels, then squares, and the gradients of both; no image is kept in fp32.

    Besides what eager blocks keep, the compiler keeps a bool of each element of a block's output.
    """
    eager, compiled = traced("ddp,bf16", 2), traced("ddp,bf16,compile", 2)
    assert compiled.unseen == ""
    assert compiled.memory["activations"] <= eager.memory["activations"] + 4 * 16 * 8 * 64 * 64
    summed = Counter({one.bytes: one.count for one in compiled.messages if one.bytes in (9 * 4, 8 * 4)})
    assert summed == {9 * 4: 2 * 4, 8 * 4: 2 * 4}
