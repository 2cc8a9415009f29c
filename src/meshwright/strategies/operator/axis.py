"""`op=N`: each large operator is divided separately, and its result is combined right after."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from meshwright.facts.costs import Kernel, UnitCosts
from meshwright.facts.job import Job
from meshwright.facts.model import ModelFacts, ParameterFacts
from meshwright.facts.model_axis import AxisTerm, AxisTraits
from meshwright.facts.strategy import Strategy
from meshwright.strategies.model_axis import Division, InnerAxis, Sent, UnitShare

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

    from meshwright.strategies.cuts import Cuts
    from meshwright.strategies.operator.split import OperatorPlan

SMALL = 0.01
"""The smallest operators stay whole if together they hold less than this share of the parameters."""

Operators = dict[str, list[ParameterFacts]]
"""The parameters of each module that has any, by its name."""


class OperatorParallel(InnerAxis):
    summary = "operator-wise: each large linear, convolution, embedding or attention operator divided by itself"
    traits = AxisTraits(
        word="op",
        mesh_name="tensor",
        place=20,
        splits_tensors=True,
        autocast=False,
        compiles=True,
        missing={
            "torchtitan": "torchtitan does not divide single operators",
            "accelerate": "Accelerate does not divide single operators",
            "deepspeed": "DeepSpeed does not divide single operators",
            "megatron": "Megatron-LM does not divide single operators",
        },
    )

    def refuse(self, term: AxisTerm, strategy: Strategy, facts: ModelFacts, global_batch: int) -> str | None:
        if facts.unseen:
            return f"op={term.size} needs a model that runs on fake tensors, but this one does not: {facts.unseen}"
        return None

    def refuse_job(self, term: AxisTerm, strategy: Strategy, facts: ModelFacts, job: Job) -> str | None:
        self._plan_job(job, facts, term.size)  # raises where nothing can be divided
        return None

    def show(self, term: AxisTerm, strategy: Strategy, facts: ModelFacts, job: Job) -> dict[str, Any]:
        rows = [
            {"module": one.name, "kind": one.kind, "divides": "" if one.why else one.along, "why": one.why}
            for one in self._plan_job(job, facts, term.size).operators
        ]
        return {"operators": rows}

    def _plan_job(self, job: Job, facts: ModelFacts, ranks: int) -> OperatorPlan:
        from meshwright.recording.blueprint import model_to_read

        return self.plan(model_to_read(job.model), facts, ranks)

    def plan(self, model: nn.Module, facts: ModelFacts, ranks: int) -> OperatorPlan:
        from meshwright.strategies.operator.split import plan_operators

        return plan_operators(model, ranks, frozenset(facts.read_elsewhere))

    def apply(self, model: nn.Module, facts: ModelFacts, mesh: DeviceMesh, plan: Any) -> Cuts:
        from meshwright.strategies.operator.split import split_operators

        return split_operators(model, plan, mesh, facts.blocks)

    def compile_blocks(self, blocks: Sequence[nn.Module]) -> None:
        from meshwright.strategies.tensor.draft import compile_programs

        compile_programs(blocks)

    def division(self, facts: ModelFacts, ranks: int) -> Division:
        return OperatorDivision(facts, ranks)


class OperatorDivision(Division):
    """What a rank holds, computes and sends, from a model's facts alone: `split.py` for the planner.

    A parameter named `weight` with two or more dims represents its operator. Every rank has whole activations between
    operators, so only parameters and products are divided. Each operator of an attention module counts separately.
    """

    def __init__(self, facts: ModelFacts, ranks: int) -> None:
        self._ranks = ranks
        operators = _find_operators(facts)
        whole = _keep_whole(operators, facts, ranks)
        found = [p for module, own in operators.items() if module not in whole for p in own if _is_cut(p, ranks)]
        self._shapes = {parameter.name: parameter.shape for parameter in found}

    def parts_of(self, names: tuple[str, ...]) -> int:
        return self._ranks if names[0] in self._shapes else 1

    def share(self, unit: UnitCosts, samples: int, stream: float) -> UnitShare:
        shapes = [shape for name in unit.parameters if len(shape := self._shapes.get(name, ())) > 1]
        products = [kernel for kernel in unit.forward if _reads_one(kernel, shapes)]
        forward = [Sent(kind="all_gather", bytes=kernel.made.at(samples)) for kernel in products]
        if shapes and not products:  # an embedding table: each rank finds its own entries
            forward = [Sent(kind="all_reduce", bytes=unit.output.at(samples))]
        inputs = _distinct_inputs(unit.forward, products)
        return UnitShare(
            kernel_parts=lambda kernel: self._ranks if _reads_one(kernel, shapes) else 1,
            forward=tuple(forward),
            backward=tuple(Sent(kind="all_reduce", bytes=size * samples) for size in inputs),
        )


def _distinct_inputs(kernels: Sequence[Kernel], products: list[Kernel]) -> list[float]:
    """Bytes per sample of the tensors that products read, each once: its gradient is summed once.

    Query, key and value read the same one. So do products of equal inputs between which nothing of that size is made.
    """
    found: list[float] = []
    last: float | None = None
    for kernel in kernels:
        # A kernel's input and output grow with the samples, its weight does not.
        if any(kernel is product for product in products):
            size = kernel.bytes.each - kernel.made.each
            found += [size] if size != last else []
            last = size
        elif kernel.made.each == last or kernel.kind == "attention":
            last = None
    return found


def _find_operators(facts: ModelFacts) -> Operators:
    found: Operators = defaultdict(list)
    packed = {
        p.name.rpartition(".")[0] for p in facts.parameters if p.name.endswith(("in_proj_weight", "q_proj_weight"))
    }
    for parameter in facts.parameters:
        for module in {name.rpartition(".")[0] for name in parameter.names}:
            attention = module.removesuffix(".out_proj")  # attention reads this weight and never calls the module
            found[attention if attention in packed else module].append(parameter)
    return found


def _keep_whole(operators: Operators, facts: ModelFacts, ranks: int) -> set[str]:
    """Modules that are not operators, too small or not divisible, and modules that share a parameter with them."""
    whole = {module for module, own in operators.items() if not _divides(own, ranks)} | _find_small(operators)
    read = set(facts.read_elsewhere)
    whole |= {module for module, own in operators.items() if any(read.intersection(p.names) for p in own)}
    shared = {p.name for module in whole for p in operators[module]}
    return whole | {module for module, own in operators.items() if any(p.name in shared for p in own)}


def _divides(own: list[ParameterFacts], ranks: int) -> bool:
    weights = [p for p in own if p.name.endswith("weight") and len(p.shape) > 1]
    return bool(weights) and all(_is_cut(weight, ranks) for weight in weights)


def _is_cut(parameter: ParameterFacts, ranks: int) -> bool:
    """Whether it divides: a matrix by outputs or inputs, a convolution by channels, a bias with its outputs."""
    if parameter.name.endswith("out_proj.bias"):
        return False
    sides = parameter.shape[:2] if len(parameter.shape) == 2 else parameter.shape[:1]
    return any(side % ranks == 0 for side in sides)


def _find_small(operators: Operators) -> set[str]:
    """Operators too small to be worth a message. Convolutions are always worth it."""
    total = sum({p.name: p.count for own in operators.values() for p in own}.values())
    small = smallest({module: sum(p.count for p in own) for module, own in operators.items()}, total)
    return {module for module in small if not any(len(p.shape) > 2 for p in operators[module])}


def smallest(sizes: Mapping[str, int], total: int) -> set[str]:
    """Names of the smallest operators that together hold less than `SMALL` of `total` elements."""
    held = Counter(sizes.values())
    up_to = dict(zip(sorted(held), accumulate(size * held[size] for size in sorted(held)), strict=True))
    return {name for name, size in sizes.items() if up_to[size] < SMALL * total}


def _reads_one(kernel: Kernel, shapes: list[tuple[int, ...]]) -> bool:
    """Whether a kernel is a product with one of these weights, or computes the gradient of one."""
    if kernel.kind == "convolution":
        return any(len(shape) > 2 for shape in shapes)
    if kernel.kind != "matmul" or not kernel.shape:
        return False
    batch, *sizes = kernel.shape
    sides = {size.fixed for size in sizes if not size.each}
    return not batch.each and any(sides.issuperset(shape) for shape in shapes)
