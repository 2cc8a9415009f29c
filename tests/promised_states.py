"""Bytes of states that a strategy's layout promises on the fullest rank at the end of a backward pass."""

from collections.abc import Iterable
from math import ceil, prod

from meshwright.facts.model import ModelFacts, ParameterFacts
from meshwright.facts.strategy import Strategy
from meshwright.strategies import data_strategy


def promised_states(facts: ModelFacts, strategy: Strategy) -> dict[str, int]:
    technique = data_strategy(strategy)
    layout, whole = technique.layout(strategy), technique.kept_whole(facts)
    used = [parameter for parameter in facts.trainable if parameter.used]
    optimizer = shard_bytes(used, layout.optimizer, layout.update_bytes, whole) * facts.optimizer_slots
    if layout.masters:
        optimizer += shard_bytes(facts.parameters, layout.optimizer, None, whole)
    return {
        "parameters": shard_bytes(facts.parameters, layout.parameters, layout.parameter_bytes, whole),
        "gradients": shard_bytes(used, layout.gradients, layout.update_bytes, whole),
        "optimizer": round(optimizer),
    }


def shard_bytes(parameters: Iterable[ParameterFacts], ranks: int, itemsize: int | None, whole: frozenset[str]) -> int:
    """Bytes on rank 0 when each parameter is cut along its first dim, as FSDP2 and our ZeRO do, but for the `whole`.

    `itemsize` is that of a dtype they are cast to; None keeps each in its own.
    """
    return sum(shard_elements(p.shape, 1 if p.name in whole else ranks) * (itemsize or p.itemsize) for p in parameters)


def shard_elements(shape: tuple[int, ...], ranks: int) -> int:
    return ceil(shape[0] / ranks) * prod(shape[1:]) if shape else 1
