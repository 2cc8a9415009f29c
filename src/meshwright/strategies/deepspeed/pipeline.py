"""One stage of DeepSpeed's pipeline: consecutive layers of an `nn.Sequential`, with `ddp` or `zero1` inside."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from meshwright.errors import Refused
from meshwright.facts.model import ModelFacts
from meshwright.strategies.deepspeed.engine import DeepSpeedEngine, ZeroEngine
from meshwright.strategies.engine import ApplyContext
from meshwright.strategies.norm import global_square
from meshwright.strategies.pipeline.stages import Stages


@dataclass(frozen=True, kw_only=True)
class Layers:
    """The children of the whole model, and how stages divide them."""

    names: tuple[str, ...]
    starts: tuple[int, ...]
    """The first child of each stage."""
    like: dict[str, torch.Tensor]
    """The whole model's state on the meta device, by name."""

    def of(self, stage: int) -> tuple[str, ...]:
        return self.names[slice(*(*self.starts, len(self.names))[stage : stage + 2])]

    def owner(self, name: str) -> int:
        """The stage that holds a parameter or buffer."""
        place = self.names.index(name.split(".")[0])
        return max(stage for stage, start in enumerate(self.starts) if start <= place)


def cut_layers(model: nn.Module, facts: ModelFacts, stages: Stages) -> Layers:
    """Divide the model's layers over stages; refused if it is not a sequence of layers, or a cut is inside one."""
    if not isinstance(model, nn.Sequential) or type(model).forward is not nn.Sequential.forward:
        raise Refused(
            f"DeepSpeed's pipeline runs a sequence of layers, and the job's model is {type(model).__name__}; "
            "give an nn.Sequential, or drop engine=deepspeed: our own pipeline cuts any model."
        )
    names = tuple(model._modules)
    children = [call.name.split(".")[0] for call in facts.calls]
    for start in stages.starts[1:]:
        if children[start] == children[start - 1]:
            raise Refused(
                f"A stage would begin within the layer {children[start]!r} of the model, and DeepSpeed keeps layers "
                "whole; name the first layer of each stage in Job(stages=[...]), or drop engine=deepspeed."
            )
    for parameter in facts.parameters:
        if len({name.split(".")[0] for name in parameter.names}) > 1:
            raise Refused(
                f"{' and '.join(parameter.names)} are one parameter in two layers, which DeepSpeed's pipeline would "
                "keep apart; drop engine=deepspeed: our own pipeline sums their gradients."
            )
    like = {name: tensor.detach() for name, tensor in model.state_dict(keep_vars=True).items()}
    starts = (0, *(names.index(children[start]) for start in stages.starts[1:]))
    return Layers(names=names, starts=starts, like=like)


class StageEngine(DeepSpeedEngine):
    """A stage of DeepSpeed's pipeline; `model` has the stage's layers under their own names."""

    def __init__(
        self, model: nn.Module, context: ApplyContext, layers: Layers, mesh: DeviceMesh, loss: Callable[[Any, Any], Any]
    ) -> None:
        super().__init__(model, context)
        self._layers, self._pipeline, self._loss = layers, mesh, loss
        self.before_each: Callable[[], None] = lambda: None
        """Called before each micro-batch on this stage."""
        if not self.parameters():
            raise Refused(
                f"Stage {mesh.get_local_rank()} of the pipeline has nothing to train, but DeepSpeed's optimizers need "
                "a parameter; name the first layer of each stage in Job(stages=[...])."
            )

    @property
    def stage(self) -> int:
        return self._pipeline.get_local_rank()

    def _deepspeed_model(self, deepspeed: Any) -> Any:
        """DeepSpeed's module of this stage, which takes only the stage's layers from the list."""
        layers, own = self._layers, dict(self.model.named_children())
        pipe = deepspeed.runtime.pipe

        class Divided(pipe.PipelineModule):  # type: ignore[misc, name-defined]  # of a package without types
            def _partition_layers(self, method: str = "") -> None:
                stage = self._topo.get_coord(self.global_rank).pipe
                self.parts = [*layers.starts, len(layers.names)]
                self._set_bounds(start=self.parts[stage], stop=self.parts[stage + 1])

        ranks = dist.get_world_size() // len(layers.starts)
        topology = pipe.topology.PipeDataParallelTopology(num_pp=len(layers.starts), num_dp=ranks)
        module = Divided([own.get(name) for name in layers.names], topology=topology, loss_fn=self._loss)
        module.register_forward_pre_hook(lambda module, args: self.before_each())
        return module

    def run(self, micro_batches: Iterable[tuple[Any, torch.Tensor]], count: int, *, last: bool) -> None:
        """Forward and backward of `count` micro-batches through all stages; `last` sums gradients over ranks."""
        engine = self._deepspeed
        self._scale_by(1.0)
        engine.module.train()
        engine.micro_batches, engine.pipeline_enable_backward_allreduce = count, last
        engine._compute_loss, engine.total_loss = True, None
        engine.set_dataiterator(iter(micro_batches))
        engine._exec_schedule(engine._train_schedule())

    @torch.no_grad()
    def run_forward(self, micro_batches: Iterable[tuple[Any, torch.Tensor]], count: int) -> None:
        engine = self._deepspeed
        engine.module.eval()
        engine._compute_loss = True
        engine.set_dataiterator(iter(micro_batches))
        engine._exec_schedule(engine._inference_schedule(count))
        engine.module.train()

    def forget_shapes(self) -> None:
        """Call before micro-batches of another size, on all ranks."""
        self._deepspeed.reset_activation_shape()

    def _scale_by(self, scale: float) -> None:
        pass

    def _take_step(self) -> None:
        self._deepspeed._exec_optimizer_step()

    def _norm(self, gradients: list[torch.Tensor]) -> torch.Tensor:
        square = global_square(gradients).to(self._context.device)
        dist.all_reduce(square, group=self._pipeline.get_group())
        return square.sqrt()

    def adopt(self, optimizer: Optimizer, max_norm: float | None) -> None:
        super().adopt(optimizer, max_norm)
        schedule = type(self._deepspeed)._INSTRUCTION_MAP
        step = next(kind for kind in schedule if kind.__name__ == "OptimizerStep")
        self._deepspeed._INSTRUCTION_MAP = {**schedule, step: lambda engine: None}  # the trainer calls `update`

    def state(self) -> Iterator[tuple[str, torch.Tensor]]:
        own = dict(super().state())
        for name, like in self._layers.like.items():
            owner = self._layers.owner(name)
            tensor = (
                own[name].contiguous() if owner == self.stage else torch.empty_like(like, device=self._context.device)
            )
            dist.broadcast(tensor, group_src=owner, group=self._pipeline.get_group())
            yield name, tensor


class ZeroStageEngine(StageEngine, ZeroEngine):
    """A stage with ZeRO stage 1 over the data axis."""

    _scale_by = ZeroEngine._scale_by


def stage_of(model: nn.Sequential, names: Iterable[str]) -> nn.Sequential:
    """The named children of a model; the other children drop their tensors."""
    kept = set(names)
    for name, child in model.named_children():
        for module in child.modules() if name not in kept else ():
            module._parameters = dict.fromkeys(module._parameters)
            module._buffers = dict.fromkeys(module._buffers)
    stage = nn.Sequential()
    for name in names:
        stage.add_module(name, model._modules[name])
    return stage
