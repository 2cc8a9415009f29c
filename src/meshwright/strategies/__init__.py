"""The registry of data strategies and model axes. To add one, write a file and register it here."""

from __future__ import annotations

from meshwright.facts.data_axis import DATA_AXES
from meshwright.facts.model_axis import MODEL_AXES, AxisTerm
from meshwright.facts.strategy import Strategy
from meshwright.strategies.base import DataStrategy, Place, StateLayout
from meshwright.strategies.context.axis import ContextParallel
from meshwright.strategies.data.ddp import Ddp
from meshwright.strategies.data.dp import Dp
from meshwright.strategies.data.fsdp import Fsdp
from meshwright.strategies.data.hsdp import Hsdp
from meshwright.strategies.data.single import Single
from meshwright.strategies.data.zero1 import Zero1
from meshwright.strategies.data.zero2 import Zero2
from meshwright.strategies.expert.axis import ExpertParallel
from meshwright.strategies.model_axis import InnerAxis, ModelAxis, StageAxis
from meshwright.strategies.operator.axis import OperatorParallel
from meshwright.strategies.pipeline.axis import PipelineParallel
from meshwright.strategies.pipeline.layers import LayerPlacement
from meshwright.strategies.tensor.axis import TensorParallel

DATA_STRATEGIES: dict[str, DataStrategy] = {}
"""By the word in the strategy's text."""
_MODEL_AXES: dict[str, ModelAxis] = {}
NONE = Single()
"""The data strategy if model axes take all ranks."""


def register(technique: DataStrategy | ModelAxis) -> None:
    """Make a data strategy or a model axis known to the grammar, the planner, the engines and every verb."""
    if isinstance(technique, ModelAxis):
        _MODEL_AXES[technique.traits.word] = technique
        MODEL_AXES[technique.traits.word] = technique.traits
    else:
        DATA_STRATEGIES[technique.traits.word] = technique
        DATA_AXES[technique.traits.word] = technique.traits


def unregister(word: str) -> None:
    for table in (DATA_STRATEGIES, DATA_AXES, _MODEL_AXES, MODEL_AXES):
        table.pop(word, None)


def model_axis(term: AxisTerm) -> ModelAxis:
    """The implementation of an axis term."""
    return _MODEL_AXES[term.word]


def inner_axis(term: AxisTerm) -> InnerAxis:
    axis = _MODEL_AXES[term.word]
    assert isinstance(axis, InnerAxis)
    return axis


def data_strategy(strategy: Strategy) -> DataStrategy:
    """The implementation of a strategy's data axis."""
    if strategy.engine == "deepspeed":
        from meshwright.strategies.deepspeed.strategy import STAGES  # lazily, because it imports torch

        return STAGES[strategy.traits.zero_stage or 0]
    return NONE if strategy.data is None else DATA_STRATEGIES[strategy.data]


# In the order in which errors, plans and comparisons list them.
register(Single())
register(Dp())
register(Ddp())
register(Zero1())
register(Zero2())
register(Fsdp())
register(Hsdp())
register(TensorParallel())
register(OperatorParallel())
register(ExpertParallel())
register(ContextParallel())
register(PipelineParallel())
register(LayerPlacement())

__all__ = [
    "DATA_STRATEGIES",
    "DataStrategy",
    "InnerAxis",
    "ModelAxis",
    "Place",
    "StageAxis",
    "StateLayout",
    "data_strategy",
    "inner_axis",
    "model_axis",
    "register",
    "unregister",
]
