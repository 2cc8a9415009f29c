"""DeepSpeed's engine for one rank: it sums gradients, clips, updates and keeps the masters."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from meshwright.errors import Refused
from meshwright.facts.job import NamedParameters
from meshwright.strategies.cuts import Stretch
from meshwright.strategies.deepspeed import package
from meshwright.strategies.deepspeed.config import config_of
from meshwright.strategies.deepspeed.pieces import OptimizerByName, ParameterGroup, even_stretch, joined, pieces_of
from meshwright.strategies.engine import ApplyContext, HeldTensor, OptimizerState, OptimizingEngine
from meshwright.strategies.norm import global_norm, scale_

MadeGroups = list[tuple[dict[str, Any], list[nn.Parameter]]]
"""The parameter groups that the job made, each with all its members."""


class DeepSpeedEngine(OptimizingEngine):
    """Stage 0: every rank has a whole copy, and gradients are averaged over ranks."""

    def __init__(self, model: nn.Module, context: ApplyContext) -> None:
        super().__init__(model)
        self._context = context
        self._group = context.mesh.get_group() if context.mesh is not None else None
        self._max_norm: float | None = None
        self._deepspeed: Any = None
        self.gradient_scale = float(context.strategy.data_ranks)

    def adopt(self, optimizer: Optimizer, max_norm: float | None) -> None:
        context = self._context
        config = config_of(context.strategy, context.facts, max_norm=max_norm, written=context.engine_config)
        self._own, self._optimizer, self._max_norm = self.parameters(), optimizer, max_norm
        deepspeed = package.joined_to_ranks(context.device)
        groups = list(optimizer.param_groups)
        with redirect_stdout(io.StringIO()):  # it prints the available memory
            self._prepare(deepspeed, config)
            model = self._deepspeed_model(deepspeed)
            self._deepspeed = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
        self.module = self._deepspeed
        self._restore_groups(optimizer, groups)

    def _restore_groups(self, optimizer: Optimizer, groups: list[dict[str, Any]]) -> None:
        """Restore groups that DeepSpeed dropped because this stage has no parameters of them: all ranks need all."""
        optimizer.param_groups[:] = groups

    def _prepare(self, deepspeed: Any, config: dict[str, Any]) -> None:
        """Called before DeepSpeed takes the model."""

    def _deepspeed_model(self, deepspeed: Any) -> Any:
        """The model for `deepspeed.initialize`."""
        return self.model

    @contextmanager
    def accumulating(self, last: bool) -> Iterator[None]:
        self._deepspeed.set_gradient_accumulation_boundary(last)
        yield

    def backward(self, loss: torch.Tensor) -> None:
        self._deepspeed.backward(loss, scale_wrt_gas=False)

    def optimized(self) -> NamedParameters:
        return self._own

    def remembered(self) -> OptimizerState:
        return self._optimizer

    def update(self, scale: float | torch.Tensor) -> tuple[torch.Tensor, bool]:
        for name, parameter in self._own.named():
            if name in self._context.unused:  # DeepSpeed made it zeros, so that the optimizer would decay the parameter
                parameter.grad = None
        gradients = [p.grad for p in self._own if p.grad is not None]
        norm = self._norm(gradients) * scale
        if not bool(torch.isfinite(norm)):
            return norm, False
        factor = torch.as_tensor(scale, dtype=torch.float32, device=norm.device)
        if self._max_norm is not None:
            factor = factor * torch.clamp(self._max_norm / (norm + 1e-6), max=1.0)
        scale_(gradients, factor)
        self._take_step()
        return norm, True

    def _norm(self, gradients: list[torch.Tensor]) -> torch.Tensor:
        return global_norm(gradients)

    def _take_step(self) -> None:
        self._deepspeed.step()


class ZeroEngine(DeepSpeedEngine):
    """Stages 1 to 3: the optimizer updates flat tensors of fp32 masters, and each rank has its part of them."""

    def adopt(self, optimizer: Optimizer, max_norm: float | None) -> None:
        refuse_state(optimizer)
        self._names = {id(p): n for n, p in self.model.named_parameters()}
        self._shapes = {n: p.shape for n, p in self.model.named_parameters()}
        made = [(group, group["params"]) for group in optimizer.param_groups]
        unused = self._context.unused
        for group, members in made:  # ZeRO would give unused parameters gradients of zeros, and decay them
            group["params"] = [p for p in members if p.requires_grad and self._names[id(p)] not in unused]
        masters = self._lower()
        super().adopt(optimizer, max_norm)
        self._zero = self._deepspeed.optimizer
        self._find_pieces(optimizer, made, masters)

    def _find_pieces(self, optimizer: Optimizer, made: MadeGroups, masters: dict[str, torch.Tensor]) -> None:
        """Find where DeepSpeed put the parameters; `masters` are their values before they were cast."""
        names = self._names
        pieces = list(pieces_of(self._zero, names, self._shapes))
        self._pieces = {piece.name: piece for piece in pieces}
        self._kept = dict(self._keep(masters))
        places = {id(group): at for at, group in enumerate(optimizer.param_groups)}
        groups = [ParameterGroup([self._master(names[id(p)], p) for p in own], g, places.get(id(g))) for g, own in made]
        self._by_name = OptimizerByName(optimizer, groups, pieces)
        for piece in pieces:
            if piece.name in masters:
                piece.master.data.copy_(piece.take(masters[piece.name]))

    def _prepare(self, deepspeed: Any, config: dict[str, Any]) -> None:
        """Under stage 3, move parameters to the device one by one; DeepSpeed would move the whole model first."""
        if config["zero_optimization"]["stage"] == 3:
            deepspeed.zero.Init(module=self.model, config_dict_or_path=config, mem_efficient_linear=False)

    def _restore_groups(self, optimizer: Optimizer, groups: list[dict[str, Any]]) -> None:
        """Refuse dropped groups under a pipeline: ZeRO identifies groups by their index among the remaining ones."""
        if self._context.pipelined and len(optimizer.param_groups) < len(groups):
            raise Refused(
                "A group of the job's optimizer has no parameters on one stage of the pipeline, which zero1 on "
                "DeepSpeed cannot keep; use ddp with the pipeline, or drop engine=deepspeed."
            )

    def _lower(self) -> dict[str, torch.Tensor]:
        """Cast parameters if the precision is lowered, and return the originals in host memory.

        DeepSpeed would make masters from the cast parameters.
        """
        masters = {}
        for name, parameter in self.model.named_parameters() if self._context.lowered else ():
            if parameter.is_floating_point():
                masters[name] = parameter.detach().cpu()
                parameter.data = parameter.data.to(self._context.compute_dtype)
        return masters

    def _keep(self, masters: dict[str, torch.Tensor]) -> Iterator[tuple[str, tuple[nn.Parameter, Stretch]]]:
        """This rank's parts of parameters that are divided or cast but not updated, with their original values."""
        for name, parameter in self.model.named_parameters():
            if name in self._pieces or not (name in masters or hasattr(parameter, "ds_tensor")):
                continue
            shape = self._shapes[name]
            room = -(-shape.numel() // dist.get_world_size(self._group))
            stretch, length = even_stretch(tuple(shape), room, dist.get_rank(self._group))
            if name in masters:
                own = masters[name].reshape(-1).narrow(0, stretch.start, length).clone()
            else:
                own = parameter.ds_tensor.narrow(0, 0, length)  # type: ignore[attr-defined]  # DeepSpeed's own
            yield name, (nn.Parameter(own, requires_grad=False), stretch)

    def _master(self, name: str, parameter: nn.Parameter) -> nn.Parameter:
        """This rank's fp32 part of a parameter."""
        if name in self._pieces:
            return self._pieces[name].master
        return self._kept[name][0] if name in self._kept else parameter

    def optimized(self) -> NamedParameters:
        return NamedParameters((name, self._master(name, parameter)) for name, parameter in self._own.named())

    def remembered(self) -> OptimizerState:
        return self._by_name

    def backward(self, loss: torch.Tensor) -> None:
        self._scale_by(1.0)
        super().backward(loss)

    def update(self, scale: float | torch.Tensor) -> tuple[torch.Tensor, bool]:
        self._scale_by(float(scale))
        self._take_step()
        norm = torch.as_tensor(self._deepspeed.get_global_grad_norm(), dtype=torch.float32)
        return norm, bool(self._deepspeed.was_step_applied())

    def _scale_by(self, scale: float) -> None:
        """Scale gradients and their norm through DeepSpeed's loss scale, by which it divides both."""
        if hasattr(self._zero, "override_loss_scale"):
            self._zero.override_loss_scale(1.0 / scale)
        elif scale != 1.0:
            scale_(self._zero.fp32_groups_gradients_flat, scale)

    def held(self) -> Iterator[HeldTensor]:
        names = {id(p): n for n, p in self.model.named_parameters()}
        for name, tensor in self.model.state_dict(keep_vars=True).items():
            first = names.get(id(tensor), name)
            if first in self._pieces:
                yield HeldTensor(name, self._pieces[first].master, self._pieces[first].stretch)
            elif first in self._kept:
                yield HeldTensor(name, *self._kept[first])
            elif isinstance(tensor, torch.Tensor):
                yield HeldTensor(name, tensor)

    def state(self) -> Iterator[tuple[str, torch.Tensor]]:
        for held in self.held():
            if isinstance(held.cut, Stretch):
                yield held.name, joined(held.tensor, held.cut, self._group, self._context.device)
            else:
                yield held.name, held.tensor.detach()

    def cut_of(self, name: str) -> Stretch | None:
        if name in self._pieces:
            return self._pieces[name].stretch
        return self._kept[name][1] if name in self._kept else None

    @torch.no_grad()
    def loaded(self) -> None:
        parameters = dict(self.model.named_parameters())
        for name, (own, stretch) in self._kept.items():
            whole = joined(own, stretch, self._group, self._context.device)
            parameter: Any = parameters[name]
            if hasattr(parameter, "ds_tensor"):
                parameter.ds_tensor.narrow(0, 0, own.numel()).copy_(own)
            else:
                parameter.data.copy_(whole)
        if hasattr(self._zero, "update_lp_params"):
            self._zero.update_lp_params()
        else:
            self._bring_masters()

    def _bring_masters(self) -> None:
        """Copy masters to parameters, as DeepSpeed does at the end of a step of stage 3."""
        self._zero._partition_all_parameters()
        for number in range(len(self._zero.fp16_groups)):
            self._zero._reassign_or_swap_out_partitioned_parameters(number)
        if persistent := self._zero.persistent_parameters:
            persistent[0].all_gather(persistent)

    def resident(self) -> dict[str, list[torch.Tensor]]:
        return {
            "parameters": [getattr(p, "ds_tensor", p) for p in self.model.parameters()],
            "masters": [piece.flat for piece in self._pieces.values()],
            "gradients": [p.grad for p in self.model.parameters() if p.grad is not None],
        }


def refuse_state(optimizer: Optimizer) -> None:
    """Refuse an optimizer that already has state: it belongs to parameters that DeepSpeed replaces."""
    if optimizer.state:
        raise Refused(
            f"{type(optimizer).__name__} makes state for each parameter before its first step, but ZeRO on DeepSpeed "
            "replaces parameters by flat tensors; use ddp,engine=deepspeed, or drop engine=deepspeed."
        )
