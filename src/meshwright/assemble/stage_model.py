"""One stage of a model that keeps its own `forward`.

Note: skipped calls. Every stage runs the author's whole `forward`, so masks, positions and other code between the
blocks need no rewriting. Calls that belong to another stage are skipped: they return the received tensors if their
output crosses the cut, and otherwise tensors of the right shape that take no memory. When the stage's own calls are
done, `StageDone` leaves the forward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from meshwright.describe.calls import Call, ConstantLeaf, Flow, InputLeaf, TensorLeaf, Value
from meshwright.errors import JobError
from meshwright.recording.wrap_forward import Around, wrap_call
from meshwright.strategies.pipeline.stages import Crossings, Stages
from meshwright.torch_private.trees import tree_leaves, tree_unflatten


class StageDone(BaseException):
    """Leaves the forward pass after a stage's last call. Not an `Exception`, so that the model cannot catch it."""


@dataclass
class StagePass:
    flow: Flow
    crossings: Crossings
    values: dict[Value, torch.Tensor]
    """Received tensors, and outputs of the stage's own calls."""
    calls: int = 0
    """Calls made so far."""


class StageModel:
    """A model that runs only one stage's calls."""

    def __init__(self, model: nn.Module, stages: Stages, stage: int, device: torch.device) -> None:
        self.model, self.stages, self.stage = model, stages, stage
        self._own, self._device = stages.calls_of(stage), device
        self._pass: StagePass | None = None

    def give_up(self, held: frozenset[str], dtype: torch.dtype | None) -> None:
        """Replace parameters that the stage does not hold by tensors without memory.

        Floating ones get `dtype`; None keeps the parameter's dtype.
        """
        first = {id(p): name for name, p in self.model.named_parameters()}
        for module in self.model.modules():
            for name, parameter in list(module._parameters.items()):
                if parameter is not None and first[id(parameter)] not in held:
                    del module._parameters[name]
                    kind = dtype if dtype is not None and parameter.is_floating_point() else parameter.dtype
                    # setattr would register it as a parameter or buffer again.
                    module.__dict__[name] = self._placeholder(tuple(parameter.shape), kind)

    def watch_calls(self, flow: Flow) -> None:
        """Count the calls of the flow's modules from now on, and run only this stage's."""
        for name in dict.fromkeys(call.name for call in flow.calls):
            wrap_call(self.model.get_submodule(name), self._around(name))

    def run(
        self, flow: Flow, crossings: Crossings, received: tuple[torch.Tensor, ...], forward: Callable[[], Any]
    ) -> Any:
        """Run `forward`. The last stage returns its result, others the tensors that cross the cut after the stage."""
        values = dict(zip(crossings.values[self.stage], received, strict=True))
        stage_pass = self._pass = StagePass(flow, crossings, values)
        try:
            return forward()
        except StageDone:
            return tuple(stage_pass.values[value] for value in crossings.values[self.stage + 1])
        finally:
            self._pass = None

    def _around(self, name: str) -> Around:
        def call(module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
            stage_pass = self._pass
            if stage_pass is None:
                return forward(*args, **kwargs)
            index, stage_pass.calls = stage_pass.calls, stage_pass.calls + 1
            expected = stage_pass.flow.calls[index].name if index < len(stage_pass.flow.calls) else "nothing"
            if expected != name:
                raise JobError(
                    f"The model calls {name}, but it called {expected} here before; a pipeline needs a model that "
                    "calls its modules in the same order for every batch."
                )
            if index in self._own:
                output = forward(*args, **kwargs)
                self._keep(stage_pass, index, output, (args, kwargs))
                return output
            if index >= self._own.stop:
                raise StageDone
            return self._stand_in(stage_pass, index, args, kwargs)

        return call

    def _keep(self, stage_pass: StagePass, index: int, output: Any, given: Any) -> None:
        if self.stages.is_last(self.stage):
            return
        call, inputs = stage_pass.flow.calls[index], tree_leaves(given)
        leaves = [*tree_leaves(output), *(inputs[place] for place in call.wrote)]
        for value in stage_pass.crossings.values[self.stage + 1]:
            if value.call == index:
                _refuse_shape(call, value, leaves[value.leaf])
                # Send the call's result: the stages that read it repeat later changes in place.
                stage_pass.values[value] = leaves[value.leaf].clone() if call.changed else leaves[value.leaf]

    def _stand_in(self, stage_pass: StagePass, index: int, args: Any, kwargs: Any) -> Any:
        call = stage_pass.flow.calls[index]
        inputs, returned = tree_leaves((args, kwargs)), call.tree.num_leaves
        for number, place in enumerate(call.wrote, start=returned):
            if Value(index, number) in stage_pass.values:
                inputs[place].copy_(stage_pass.values[Value(index, number)])
        leaves = [self._leaf(stage_pass, call, Value(index, number), inputs) for number in range(returned)]
        return tree_unflatten(leaves, call.tree)

    def _leaf(self, stage_pass: StagePass, call: Call, value: Value, inputs: list[Any]) -> Any:
        leaf = call.leaves[value.leaf]
        if value in stage_pass.values:
            # A received tensor is an autograd leaf, which cannot be changed in place.
            return stage_pass.values[value].clone() if call.changed else stage_pass.values[value]
        if isinstance(leaf, TensorLeaf):
            empty = self._placeholder(leaf.shape, leaf.dtype, unread=not stage_pass.flow.looked)
            return empty.clone(memory_format=torch.contiguous_format) if call.changed else empty
        if isinstance(leaf, InputLeaf):
            return inputs[leaf.place]
        assert isinstance(leaf, ConstantLeaf), "find_crossings refuses other leaves"
        return leaf.value

    def _placeholder(self, shape: tuple[int, ...], dtype: torch.dtype, *, unread: bool = True) -> torch.Tensor:
        """Zeros of any shape that take the memory of one element.

        If the model branches on values, a later batch may take an unseen branch and read a tensor that was not sent.
        Then the placeholder is NaN, so that the loss becomes NaN instead of silently wrong.
        """
        value = 0.0 if unread or not dtype.is_floating_point else float("nan")
        return torch.full((), value, dtype=dtype, device=self._device).expand(shape)


def _refuse_shape(call: Call, value: Value, found: torch.Tensor) -> None:
    """Raise if a tensor does not fit the next stage's receive buffer: excess bytes would crash its process."""
    seen = call.leaves[value.leaf] if value.leaf < len(call.leaves) else None
    if isinstance(seen, TensorLeaf) and seen.shape != tuple(found.shape):
        raise JobError(
            f"{call.name} returns a tensor of shape {list(found.shape)}, but returned {list(seen.shape)} before; the "
            "stages of a pipeline exchange tensors of one shape. Use tp, op or a data strategy."
        )
