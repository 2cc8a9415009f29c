"""Data strategies on DeepSpeed, and refusals of what DeepSpeed cannot run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from torch import nn

from meshwright.facts.model import ModelFacts
from meshwright.facts.strategy import AxisTerm, Strategy
from meshwright.strategies.base import DataStrategy, Place
from meshwright.strategies.deepspeed import package
from meshwright.strategies.deepspeed.engine import DeepSpeedEngine, ZeroEngine
from meshwright.strategies.deepspeed.nvme_engine import NvmeEngine
from meshwright.strategies.engine import ApplyContext, Engine


class DeepSpeed(DataStrategy):
    """A ZeRO stage. Stage 0 is `ddp`, and also refuses strategies that DeepSpeed does not have."""

    def __init__(self, stage: int) -> None:
        self._stage = stage
        self.summary = f"DeepSpeed, ZeRO stage {stage}"  # type: ignore[misc]  # per stage, not per class
        # Stage 0 sums gradients in the parameters' dtype, so these stay fp32 and are cast where read.
        self.lowers = self.lowered_copy = stage > 0  # type: ignore[misc]

    def refuse(self, strategy: Strategy, facts: ModelFacts, place: Place) -> str | None:
        return next(_reasons(strategy, facts, place, self._stage), None)

    def axes(self, strategy: Strategy) -> dict[str, int]:
        return {"data": strategy.data_ranks} if strategy.traits.sized and not strategy.traits.one_process else {}

    def weights_on_host(self, strategy: Strategy) -> bool:
        return self._stage == 3  # DeepSpeed moves them to the device one by one and keeps a part of each

    def apply(self, model: nn.Module, context: ApplyContext) -> Engine:
        context.fill()
        if context.strategy.offload == "nvme":
            return NvmeEngine(model, context)
        return (ZeroEngine if self._stage else DeepSpeedEngine)(model, context)


SCHEDULE = "1f1b"
"""The schedule that DeepSpeed's pipeline runs."""
STAGES = tuple(DeepSpeed(stage) for stage in range(4))
"""ZeRO's stages 0 to 3."""


def _reasons(strategy: Strategy, facts: ModelFacts, place: Place, stage: int) -> Iterator[str]:
    """Why a strategy cannot run on DeepSpeed, each reason with the term to use instead."""
    if not package.is_installed():
        yield f"engine=deepspeed needs the DeepSpeed package, which is not installed: {package.INSTALL}."
    yield from _wrong_axes(strategy)
    yield from _wrong_policies(strategy, stage)
    if strategy.offload == "nvme" and (reason := package.refuse_nvme(strategy.nvme, place.device)):
        yield reason
    if facts.by_value:
        yield (
            "The model looks at values, so samples may decide which parameters a rank uses, and DeepSpeed's ranks "
            "do not agree on that; drop engine=deepspeed."
        )
    scalars = [parameter.name for parameter in facts.parameters if not parameter.shape]
    if scalars:
        yield (
            f"DeepSpeed cannot send a parameter without dims: {', '.join(scalars)}; give it the shape (1,), "
            f"or drop engine=deepspeed."
        )


def _wrong_axes(strategy: Strategy) -> Iterator[str]:
    for term in strategy.axes:
        if strategy.engine not in term.traits.engines:
            yield f"{term} runs on our own engine only, DeepSpeed has no equivalent; drop it, or engine=deepspeed."
    if strategy.stage_axis is not None:
        yield from _wrong_pipeline(strategy, strategy.stage_axis)
    elif strategy.traits.zero_stage is None:
        found = f"{strategy.data}:{strategy.variant}" if strategy.variant else str(strategy.data)
        word = _nearest(strategy)
        yield f"DeepSpeed has no {found}; its stages are ddp, zero1, zero2 and zero3: use {word},engine=deepspeed."


def _nearest(strategy: Strategy) -> str:
    """The stage that is closest to a data strategy without one, and holds no more."""
    traits = strategy.traits
    if traits.reshards:
        return "zero3"
    return "zero2" if "gradients" in traits.shards else "zero1" if traits.shards else "ddp"


def _wrong_pipeline(strategy: Strategy, axis: AxisTerm) -> Iterator[str]:
    if axis.schedule != SCHEDULE:
        yield f"DeepSpeed's pipeline runs {SCHEDULE}, not {axis.schedule}; use {replace(axis, suffix=SCHEDULE)}."
    if strategy.traits.zero_stage not in (0, 1):
        yield f"DeepSpeed's pipeline takes ddp or zero1, not {strategy.data}; use zero1, or drop engine=deepspeed."
    if strategy.offload:
        yield f"offload={strategy.offload} is not built for DeepSpeed's pipeline; drop one of the two terms."


def _wrong_policies(strategy: Strategy, stage: int) -> Iterator[str]:
    if strategy.compile:
        yield "compile is not built for engine=deepspeed; drop one of the two terms."
    if strategy.pure:
        yield f"DeepSpeed keeps fp32 masters; use {strategy.precision}, or drop engine=deepspeed."
    if strategy.autocast:
        yield f"autocast is not built for engine=deepspeed; use {strategy.precision}, or drop engine=deepspeed."
    if strategy.reduce != "fp32" and (not stage or strategy.stage_axis):
        yield (
            "DeepSpeed's ddp and its pipeline sum gradients in the dtype of their parameters, which is fp32; "
            f"use zero1 without a pipeline, or drop reduce={strategy.reduce}."
        )
    if strategy.offload == "optimizer" and not stage:
        yield "DeepSpeed offloads what ZeRO divides, and ddp divides nothing; use zero1,offload=optimizer."
    if strategy.offload in ("params", "nvme") and stage < 3:
        better = replace(strategy, data="fsdp", variant="", hsdp_replicas=None)
        yield f"offload={strategy.offload} streams parameters that ZeRO divides, which only zero3 does; use {better}."
