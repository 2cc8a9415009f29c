"""What blocks keep, and their kernels, when a model is compiled as a whole."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from meshwright import Job
from meshwright.api.job_planner import Planner
from meshwright.describe.model import describe
from meshwright.facts.cluster import Cluster
from meshwright.facts.compiled_blocks import FUSED
from meshwright.facts.strategy import Strategy
from meshwright.tracing import compiled_blocks, trace_step


class Wasteful(nn.Module):
    """Eager code keeps several results that a compiler recomputes from the block's input."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(64, 64), nn.LayerNorm(64)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        for _ in range(4):
            y = torch.sigmoid(y) * torch.tanh(y)
        return x + self.linear(y)


class Model(nn.Module):
    def __init__(self, block: type[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Uneven(nn.Module):
    """No two layers are alike."""

    def __init__(self) -> None:
        super().__init__()
        sizes = (64, 640, 512, 768, 320, 64)
        self.layers = nn.ModuleList(nn.Linear(before, after) for before, after in pairwise(sizes))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            y = layer(x)
            for _ in range(4):
                y = torch.sigmoid(y) * torch.tanh(y)
            x = y
        return x


class Paired(nn.Module):
    """Two lists that have to be equally long: it does not run with fewer of one kind."""

    def __init__(self) -> None:
        super().__init__()
        self.mixers = nn.ModuleList(Wasteful() for _ in range(8))
        self.scales = nn.ParameterList(torch.ones(64) for _ in range(8))

    def forward(self, x: Tensor) -> Tensor:
        for mixer, scale in zip(self.mixers, self.scales, strict=True):
            x = mixer(x) * scale
        return x


class Detour(nn.Module):
    """Takes a longer path if it is compiled, as libraries do that make masks then."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(64, 64), nn.LayerNorm(64)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        for _ in range(9 if torch.compiler.is_compiling() else 1):
            y = torch.tanh(self.linear(y))
        return x + y


@cache
def planner_of(block: type[nn.Module], samples: int = 4) -> Planner:
    return planner_for(partial(Model, block), samples)


@cache
def planner_for(model: Callable[[], nn.Module], samples: int = 4) -> Planner:
    job = Job(
        model=model,
        inputs=lambda batch: (batch,),
        loss=lambda output, batch: (output.float().square().sum(), len(output)),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        sample=lambda count: torch.randn(count, 128, 64),
        global_batch=samples,
    )
    planner = Planner(job, describe(job), samples)
    planner.measure_for(Strategy.parse("single,bf16,compile"))
    assert not planner.notes
    return planner


def test_a_compiled_model_is_accounted_by_what_its_graph_keeps() -> None:
    found = planner_of(Wasteful)._compiled["bf16"]
    assert found.kept == pytest.approx(0.2, abs=0.15)  # eager blocks keep a dozen tensors, compiled two


def test_a_library_s_workspace_is_not_what_samples_of_a_model_without_blocks_keep() -> None:
    """Of a few samples, cuBLAS's 64 MiB would be many times what they keep."""
    assert planner_for(Wasteful)._compiled["bf16"].kept < 1.0


def test_a_compiled_block_has_the_products_of_an_eager_one_and_fewer_other_kernels() -> None:
    planner = planner_of(Wasteful)
    found = planner._compiled["bf16"]
    *_, block = (unit for unit in planner._costs["bf16", "none"].units if unit.is_block)
    for compiled, eager in ((found.forward, block.forward), (found.backward, block.backward)):
        for samples in (2, 64):
            products = [sum(kernel.flops.at(samples) for kernel in part) for part in (compiled, eager)]
            assert products[0] == pytest.approx(products[1])
        assert sum(kernel.kind == "other" for kernel in compiled) < sum(kernel.kind == "other" for kernel in eager) / 4
    assert {kernel.name for kernel in found.forward if kernel.kind == "other"} == {FUSED}


def test_a_path_that_only_compiled_code_takes_is_priced() -> None:
    planner = planner_of(Detour, samples=4096)
    cluster = Cluster(nodes=1, devices_per_node=1, device="H200-141GB")
    found = planner.search_named(cluster, [Strategy.parse(text) for text in ("single,bf16", "single,bf16,compile")])
    compute = {plan.strategy.compile: plan.forecast.time["compute"] for plan in (*found.plans, *found.unfit)}
    assert compute[True] > 2 * compute[False]


def test_a_model_without_blocks_is_accounted_as_its_whole_compiled_step() -> None:
    planner, strategy = planner_for(Uneven, samples=4096), Strategy.parse("single,bf16,compile")
    model = planner._compiled["bf16"].model
    assert model is not None and {kernel.name for kernel in model.forward if kernel.kind == "other"} == {FUSED}
    flops = sum(kernel.flops.at(64) for kernel in (*model.forward, *model.backward))
    assert flops == pytest.approx(planner._costs["bf16", "none"].flops(64))
    (plan,) = planner.search_named(Cluster(nodes=1, devices_per_node=1, device="H200-141GB"), [strategy]).plans
    memory = dict(plan.forecast.memory)
    traced = trace_step(planner.job, planner.facts, strategy, ranks=1)
    assert sum(memory.values()) - memory["allocator"] == pytest.approx(traced.peak, rel=0.03)
    assert {cost.kind for cost in model.backward} >= {"matmul", "other"}


@pytest.mark.parametrize("strategy", ["ddp,bf16,compile", "zero1,bf16,compile", "fsdp,bf16,compile"])
def test_layers_that_are_compiled_one_by_one_keep_what_they_keep_then(strategy: str) -> None:
    planner = planner_for(Uneven, samples=4096)
    cluster = Cluster(nodes=1, devices_per_node=8, device="H200-141GB")
    (plan,) = planner.search_named(cluster, [Strategy.parse(strategy)]).plans
    memory = dict(plan.forecast.memory)
    traced = trace_step(planner.job, planner.facts, Strategy.parse(strategy), ranks=8)
    assert sum(memory.values()) - memory["allocator"] == pytest.approx(traced.peak, rel=0.03)


def test_a_model_that_does_not_run_with_fewer_blocks_is_measured_and_traced_whole() -> None:
    planner, strategy = planner_for(Paired, samples=64), Strategy.parse("single,bf16,compile")
    assert planner._compiled["bf16"].model is not None
    assert trace_step(planner.job, planner.facts, strategy, ranks=1).peak > 0


def test_a_model_whose_compiled_step_fails_is_planned_as_an_eager_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*given: object) -> None:
        raise ZeroDivisionError("no compiler was foreseen")

    known = planner_for(Wasteful)
    planner = Planner(known.job, known.facts, 4)
    monkeypatch.setattr(compiled_blocks, "measure_compiled_blocks", fails)
    planner.measure_for(Strategy.parse("ddp,bf16,compile"))
    (note,) = planner.notes
    assert "counted as an eager one" in note and "no compiler was foreseen" in note
    assert (planner._compiled["bf16"].kept, planner._compiled["bf16"].kept_apart) == (1.0, 1.0)
