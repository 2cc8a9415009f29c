"""Apply FSDP2 to a model's units, and run steps with it; parameters that it cannot shard stay whole on every rank."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard

from meshwright.facts.job import NamedParameters
from meshwright.facts.model import unit_of
from meshwright.facts.strategy import Strategy
from meshwright.strategies.data.summing import by_mesh, sum_gradients
from meshwright.strategies.data.used_parameters import UsedParameters
from meshwright.strategies.engine import ApplyContext, Engine, HeldTensor
from meshwright.strategies.norm import local, scale_
from meshwright.torch_private.fsdp import reduce_gradients


class WholeParameters:
    """Parameters that are not sharded. Their gradients are averaged after backward, as FSDP does for its shards.

    The optimizer gets replicated DTensors over the same memory, because `foreach` kernels refuse to mix DTensors with
    plain tensors.
    """

    def __init__(self, parameters: NamedParameters, context: ApplyContext) -> None:
        assert context.mesh is not None
        self._mesh, self._apart, self._reduce_dtype = context.mesh, context.apart, context.reduce_dtype
        self._ranks = context.strategy.data_ranks
        self._pairs: list[tuple[nn.Parameter, nn.Parameter]] = []
        for parameter in parameters:
            parameter.data = parameter.data.to(context.device)  # offload=params fills in weights on the host
            if parameter.requires_grad:
                self._pairs.append((parameter, nn.Parameter(self._replicated(parameter.data))))
        self._trained = NamedParameters((name, p) for name, p in parameters.named() if p.requires_grad)
        self._twins = {id(parameter): twin for parameter, twin in self._pairs}

    def optimized(self, parameter: Any) -> Any:
        """The tensor that the optimizer updates for a parameter; the parameter itself if FSDP shards it."""
        return self._twins.get(id(parameter), parameter)

    def sum_gradients(self) -> None:
        for mesh, parameters in by_mesh(self._trained, self._mesh, self._apart):
            if mesh is not self._mesh:
                self._sum_apart(mesh, parameters)
                continue
            for axis in range(mesh.ndim):
                group, share = mesh.get_group(axis), 1.0 / mesh.size(axis)
                sum_gradients(parameters, group, share=share, dtype=self._reduce_dtype)
        for parameter, twin in self._pairs:
            twin.grad = None if parameter.grad is None else self._replicated(parameter.grad)

    def _sum_apart(self, mesh: DeviceMesh, parameters: list[nn.Parameter]) -> None:
        """An average over all data ranks, of which only some have a share of the gradient."""
        if mesh.size() == 1:
            scale_([p.grad for p in parameters if p.grad is not None], 1.0 / self._ranks)
        else:
            sum_gradients(parameters, mesh.get_group(), share=1.0 / self._ranks, dtype=self._reduce_dtype)

    def average(self) -> None:
        """Like `sum_gradients`, but add what is new to the gradients that the optimizer sees."""
        before = [twin.grad for _, twin in self._pairs]
        self.sum_gradients()
        for (_, twin), gradient in zip(self._pairs, before, strict=True):
            if gradient is not None:
                twin.grad = joined_gradients(gradient, twin.grad)
        self.forget_gradients()

    def leaves(self) -> list[nn.Parameter]:
        return [parameter for parameter, _ in self._pairs]

    def follow_requires_grad(self) -> None:
        for parameter, twin in self._pairs:
            parameter.requires_grad_(twin.requires_grad)

    def forget_gradients(self) -> None:
        for parameter, _ in self._pairs:
            parameter.grad = None

    def _replicated(self, tensor: torch.Tensor) -> DTensor:
        return DTensor.from_local(tensor, self._mesh, [Replicate()] * self._mesh.ndim, run_check=False)


class FsdpEngine(Engine):
    def __init__(
        self,
        model: nn.Module,
        root: FSDPModule,
        strategy: Strategy,
        whole: WholeParameters,
        used: UsedParameters | None,
    ) -> None:
        super().__init__(model)
        self._root, self._whole, self._used = root, whole, used
        self.reduces_each = strategy.reduces_each
        self._reduces = True
        """Whether the current micro-batch's gradients are reduced, with those of earlier ones that were not."""
        self.keeps_gathered = False
        self.gradient_scale = float(strategy.reduced_ranks)
        self._units = [module for module in model.modules() if isinstance(module, FSDPModule)]
        uncut = {id(parameter) for parameter in whole.leaves()}
        self._sharded = {n: p for n, p in model.named_parameters() if p.requires_grad and id(p) not in uncut}
        self._before: dict[str, Any] = {}
        """The sharded parameters' gradients before the current backward pass of a user's loop."""

    @contextmanager
    def accumulating(self, last: bool) -> Iterator[None]:
        # FSDP2 could sum hsdp's shards over replicas once a step (`set_requires_all_reduce`), but it adds up flat
        # buffers: if micro-batches use different parameters, one's gradient would silently become another's.
        self._reduces = last or self.reduces_each
        self._root.set_requires_gradient_sync(self._reduces)
        self._root.set_is_last_backward(self._reduces)
        if self.keeps_gathered:
            # Weights do not change between micro-batches, so parameters can stay gathered until the last one.
            self._root.set_reshard_after_backward(last)
        yield

    def backward(self, loss: torch.Tensor) -> None:
        if self._used is not None:
            loss = self._used.attach_used_elsewhere(loss, reduces=self._reduces)
        loss.backward()

    def micro_batch_done(self) -> None:
        if self.reduces_each:
            reduce_gradients(self._root)

    def finish(self) -> None:
        if self._used is not None:
            self._used.forget_unused()
        self._whole.sum_gradients()

    def leaves(self) -> list[nn.Parameter]:
        return self._whole.leaves()

    def reduces(self, asked: bool) -> bool:
        self._reduces = asked or self.reduces_each
        self._root.set_requires_gradient_sync(self._reduces)
        self._root.set_is_last_backward(self._reduces)
        return self._reduces

    def begin_backward(self) -> None:
        for name, parameter in self._sharded.items():
            self._before[name], parameter.grad = parameter.grad, None

    @torch.no_grad()
    def end_backward(self, *, reduced: bool, factor: float) -> None:
        if reduced:
            if self._used is not None:
                self._used.forget_unused()
            self._whole.average()
        for name, parameter in self._sharded.items():
            gradient = parameter.grad if parameter.requires_grad else None  # FSDP2 does not see that it was frozen
            if gradient is not None and factor != 1.0:
                local(gradient).mul_(factor)
            parameter.grad = joined_gradients(self._before.pop(name, None), gradient)

    def follow_requires_grad(self) -> None:
        self._whole.follow_requires_grad()

    def attach_used_elsewhere(self, output: torch.Tensor) -> torch.Tensor:
        if self._used is None:
            return output
        return self._used.attach_used_elsewhere(output, reduces=self._reduces)

    def updated(self) -> None:
        self._reshard()

    def loaded(self) -> None:
        self._reshard()

    def _reshard(self) -> None:
        """Drop gathered parameters, which an evaluation leaves behind and which are out of date now."""
        for unit in self._units:
            unit.reshard()

    def parameters(self) -> NamedParameters:
        return NamedParameters((n, self._whole.optimized(p)) for n, p in super().parameters().named())

    def held(self) -> Iterator[HeldTensor]:
        for held in super().held():
            yield HeldTensor(held.name, self._whole.optimized(held.tensor))

    def forget_gradients(self) -> None:
        self._whole.forget_gradients()


def joined_gradients(before: Any, new: Any) -> Any:
    """The sum, in the memory of the first; None if there is neither."""
    if before is None or new is None:
        return new if before is None else before
    local(before).add_(local(new))
    return before


def shard(model: nn.Module, context: ApplyContext, *, reshard: bool, whole: frozenset[str]) -> FsdpEngine:
    """Apply FSDP2 to every unit and to the rest; `reshard` frees a unit's parameters between forward and backward.

    Under a pipeline they stay gathered for all micro-batches of a step. If samples decide which blocks run, the model
    is gathered as one unit, because a rank cannot gather a block that another rank does not call.
    """
    reshard = reshard and not context.pipelined
    ignored = {p for name, p in model.named_parameters(remove_duplicate=False) if name in whole}
    units = {} if context.facts.blocks_by_value else context.shard_units(model)
    last = next((call.name for call in reversed(context.facts.calls) if call.reads), "")
    kept = {last, _unit_of_pieced_head(context, units)}
    apart = _units_apart(model, context)
    for unit in apart.values():
        _shard_apart(unit, context, ignored, reshard=reshard)
    for name, unit in units.items():
        if any(parameter not in ignored for parameter in unit.parameters()):
            # Backward begins with the last unit (the head), so it stays gathered.
            _fully_shard(unit, context, ignored, reshard=reshard and name not in kept)
    # The root's parameters are around the units: PyTorch's default keeps them gathered.
    root = _fully_shard(model, context, ignored, reshard=None if reshard else False)
    context.fill()
    assert context.mesh is not None
    whole_ones = WholeParameters(NamedParameters((n, p) for n, p in model.named_parameters() if n in whole), context)
    used = UsedParameters(model, context.mesh, {**units, **apart}) if context.facts.by_value else None
    engine = FsdpEngine(model, root, context.strategy, whole_ones, used)
    engine.keeps_gathered = not reshard
    return engine


def _units_apart(model: nn.Module, context: ApplyContext) -> dict[str, nn.Module]:
    """Modules that hold stacked experts, of which a rank has some: fewer ranks share them than the rest."""
    found = {}
    for experts in context.facts.experts:
        meshes = [context.apart[name] for name in experts.parameters if name in context.apart]
        if experts.stacked and meshes and meshes[0].size() > 1:
            found[experts.module] = model.get_submodule(experts.module)
    return found


def _shard_apart(unit: nn.Module, context: ApplyContext, ignored: set[nn.Parameter], *, reshard: bool) -> None:
    """Shard a module over the mesh of its own, with gradients that are averaged over all data ranks nevertheless."""
    mesh = next(iter(context.apart.values()))

    def placement(parameter: nn.Parameter) -> Shard:
        """The first dim that the ranks divide evenly: a rank may have fewer experts than ranks share them."""
        even = [dim for dim, size in enumerate(parameter.shape) if size % mesh.size() == 0]
        return Shard(even[0] if even else 0)

    root = _fully_shard(unit, replace(context, mesh=mesh), ignored, reshard=reshard, placement=placement)
    root.set_gradient_divide_factor(float(context.strategy.data_ranks))
    root.set_force_sum_reduction_for_comms(True)  # only NCCL can scale while it sums


def _unit_of_pieced_head(context: ApplyContext, units: Collection[str]) -> str:
    """The unit of an output layer whose products wait for the loss; "" if there is none."""
    head = context.facts.head if context.strategy.loss == "pieced" else None
    return unit_of(head.weight, units) if head is not None else ""


def _fully_shard(
    module: nn.Module,
    context: ApplyContext,
    ignored: set[nn.Parameter],
    *,
    reshard: bool | None,
    placement: Callable[[nn.Parameter], Shard] | None = None,
) -> FSDPModule:
    # `assemble/precision.py` casts inputs and outputs, the same way under every strategy.
    lowered = context.compute_dtype if context.lowered else None
    reduced = context.reduce_dtype or (torch.float32 if lowered else None)
    precision = MixedPrecisionPolicy(param_dtype=lowered, reduce_dtype=reduced, cast_forward_inputs=False)
    return fully_shard(
        module,
        mesh=context.mesh,
        reshard_after_forward=reshard,
        shard_placement_fn=placement,
        mp_policy=precision,
        offload_policy=_offload(context),
        ignored_params=ignored,
    )


def _offload(context: ApplyContext) -> OffloadPolicy:
    if context.strategy.offload == "params":
        return CPUOffloadPolicy(pin_memory=context.device.type == "cuda")
    return OffloadPolicy()
