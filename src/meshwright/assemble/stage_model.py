"""One stage of a model that keeps its own `forward`: calls that belong to other stages are stood in for.

The author's code runs on every stage: masks, positions and whatever else lies between the blocks come out right. A call
that another stage owns returns tensors of the right shape that take no memory, or, where its output crosses the cut,
what was received. As soon as the stage's own calls are done it leaves the forward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from meshwright.describe.calls import Call, ConstantLeaf, Flow, InputLeaf, TensorLeaf, Value
from meshwright.errors import JobError
from meshwright.strategies.forward import Around, wrap_forward
from meshwright.strategies.pipeline.stages import Crossings, Stages
from meshwright.torch_private.trees import tree_leaves, tree_unflatten


class StageDone(BaseException):
    """The stage is done. No `Exception`, so that no author's handler takes it for one."""


@dataclass
class StagePass:
    """One forward pass of a stage."""

    flow: Flow
    crossings: Crossings
    values: dict[Value, torch.Tensor]
    """What was received, and what the stage's own calls gave."""
    calls: int = 0
    """So far."""


class StageModel:
    """A model of which only one stage's calls run."""

    def __init__(self, model: nn.Module, stages: Stages, stage: int, device: torch.device) -> None:
        self.model, self.stages, self.stage = model, stages, stage
        self._own, self._device = stages.calls_of(stage), device
        self._passage: StagePass | None = None

    def give_up(self, held: frozenset[str], dtype: torch.dtype | None) -> None:
        """Take all parameters but the held ones out of the model; what reads one finds a tensor without memory.

        It has `dtype`, or the parameter's own.
        """
        first = {id(p): name for name, p in self.model.named_parameters()}
        for module in self.model.modules():
            for name, parameter in list(module._parameters.items()):
                if parameter is not None and first[id(parameter)] not in held:
                    del module._parameters[name]
                    kind = dtype if dtype is not None and parameter.is_floating_point() else parameter.dtype
                    # Not by setattr, which would have it be a parameter or buffer again.
                    module.__dict__[name] = self._nothing(tuple(parameter.shape), kind)

    def watch_calls(self, flow: Flow) -> None:
        """From now on the calls of the flow's modules are counted, and run only if they are this stage's."""
        for name in dict.fromkeys(call.name for call in flow.calls):
            wrap_forward(self.model.get_submodule(name), self._around(name))

    def run(
        self, flow: Flow, crossings: Crossings, received: tuple[torch.Tensor, ...], forward: Callable[[], Any]
    ) -> Any:
        """What `forward` returns on the last stage; on others, what crosses the cut behind this stage."""
        values = dict(zip(crossings.values[self.stage], received, strict=True))
        passage = self._passage = StagePass(flow, crossings, values)
        try:
            return forward()
        except StageDone:
            return tuple(passage.values[value] for value in crossings.values[self.stage + 1])
        finally:
            self._passage = None

    def _around(self, name: str) -> Around:
        def call(module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
            passage = self._passage
            if passage is None:
                return forward(*args, **kwargs)
            index, passage.calls = passage.calls, passage.calls + 1
            expected = passage.flow.calls[index].name if index < len(passage.flow.calls) else "nothing"
            if expected != name:
                raise JobError(
                    f"The model calls {name} where it called {expected} before; a pipeline needs a model that calls "
                    "its modules in the same order for every batch."
                )
            if index in self._own:
                output = forward(*args, **kwargs)
                self._keep(passage, index, output, (args, kwargs))
                return output
            if index >= self._own.stop:
                raise StageDone
            return self._stand_in(passage, index, args, kwargs)

        return call

    def _keep(self, passage: StagePass, index: int, output: Any, given: Any) -> None:
        if self.stages.is_last(self.stage):
            return
        call, inputs = passage.flow.calls[index], tree_leaves(given)
        leaves = [*tree_leaves(output), *(inputs[place] for place in call.wrote)]
        for value in passage.crossings.values[self.stage + 1]:
            if value.call == index:
                _refuse_shape(call, value, leaves[value.leaf])
                # What is sent is what the call gave: changes that follow are made again on the stages that read it.
                passage.values[value] = leaves[value.leaf].clone() if call.changed else leaves[value.leaf]

    def _stand_in(self, passage: StagePass, index: int, args: Any, kwargs: Any) -> Any:
        call = passage.flow.calls[index]
        inputs, returned = tree_leaves((args, kwargs)), call.tree.num_leaves
        for number, place in enumerate(call.wrote, start=returned):
            if Value(index, number) in passage.values:
                inputs[place].copy_(passage.values[Value(index, number)])
        leaves = [self._leaf(passage, call, Value(index, number), inputs) for number in range(returned)]
        return tree_unflatten(leaves, call.tree)

    def _leaf(self, passage: StagePass, call: Call, value: Value, inputs: list[Any]) -> Any:
        leaf = call.leaves[value.leaf]
        if value in passage.values:
            # A received tensor is a leaf to autograd, which nobody may change in place.
            return passage.values[value].clone() if call.changed else passage.values[value]
        if isinstance(leaf, TensorLeaf):
            nothing = self._nothing(leaf.shape, leaf.dtype, unread=not passage.flow.looked)
            return nothing.clone(memory_format=torch.contiguous_format) if call.changed else nothing
        if isinstance(leaf, InputLeaf):
            return inputs[leaf.place]
        assert isinstance(leaf, ConstantLeaf), "refused before: a strange leaf of a call that is stood in for"
        return leaf.value

    def _nothing(self, shape: tuple[int, ...], dtype: torch.dtype, *, unread: bool = True) -> torch.Tensor:
        """Zeros of any shape that take the memory of one.

        Where the model looks at values, the next batch may take a branch that nobody has seen and read what was not
        sent. Then these are no numbers, and neither is the loss: an error instead of another training.
        """
        value = 0.0 if unread or not dtype.is_floating_point else float("nan")
        return torch.full((), value, dtype=dtype, device=self._device).expand(shape)


def _refuse_shape(call: Call, value: Value, found: torch.Tensor) -> None:
    """The next stage's buffer has the shape that was seen; more bytes than it holds would end its process."""
    seen = call.leaves[value.leaf] if value.leaf < len(call.leaves) else None
    if isinstance(seen, TensorLeaf) and seen.shape != tuple(found.shape):
        raise JobError(
            f"{call.name} gives a tensor of {list(found.shape)} where one of {list(seen.shape)} was seen before; the "
            "stages of a pipeline exchange tensors of one shape. Use tp, op or a data strategy."
        )
