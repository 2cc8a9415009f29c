"""The job's optimizer on one rank: its kernels, whether it may update shards, and `offload=optimizer`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Adam, AdamW, Optimizer

from meshwright.describe.optimizer import OptimizerTrial, differ
from meshwright.errors import Refused, one_line
from meshwright.facts.job import Job, NamedParameters
from meshwright.facts.strategy import Strategy
from meshwright.recording.dtensor import is_dtensor
from meshwright.strategies.gather_whole import whole
from meshwright.strategies.norm import local

# Their fused kernels run on CPUs and GPUs, on shards and on whole parameters. (DTensor does not support SGD's, and
# Adagrad creates its state before `fused` could be set.)
_HAVE_FUSED = (Adam, AdamW)


def take_fused_kernels(optimizer: Optimizer) -> Optimizer:
    """Choose `fused` if the job's factory chose neither `fused` nor `foreach`.

    PyTorch's default is `foreach` on GPUs and a loop over parameters on CPUs. The results are the same up to rounding,
    and a step of Adam takes half the time on a CPU.
    """
    if type(optimizer) in _HAVE_FUSED:
        for group in optimizer.param_groups:
            if _is_left_open(group):
                group["fused"] = True
    return optimizer


def _is_left_open(group: dict[str, Any]) -> bool:
    chosen = group.get("fused") is not None or group.get("foreach") is not None or group.get("differentiable")
    return not chosen and all(parameter.is_floating_point() for parameter in group["params"])


@contextmanager
def one_mesh_per_group(optimizer: Optimizer) -> Iterator[None]:
    """For a step, give the optimizer groups of parameters on one mesh each: one kernel takes no DTensors of several."""
    groups = optimizer.param_groups
    parts = [(group, part) for group in groups for part in _by_mesh(group)]
    optimizer.param_groups = [part for _, part in parts]
    try:
        yield
    finally:
        optimizer.param_groups = groups
        for group, part in parts:  # some optimizers keep numbers in their groups
            group |= {key: value for key, value in part.items() if key != "params"}


def _by_mesh(group: dict[str, Any]) -> list[dict[str, Any]]:
    found: dict[Any, list[nn.Parameter]] = {}
    for parameter in group["params"]:
        found.setdefault(parameter.device_mesh if is_dtensor(parameter) else None, []).append(parameter)
    return [{**group, "params": own} for own in found.values()] if len(found) > 1 else [group]


def refuse_coupled_shards(job: Job, couplings: Sequence[str], own: NamedParameters, strategy: Strategy) -> None:
    """Raise if the job's optimizer updates shards and whole tensors differently. All ranks must call it.

    An optimizer that reads whole tensors gets DTensors, whose norms and products are those of the whole tensor. Most
    optimizers work on them unchanged; some mix in plain tensors, or sum only what one rank holds.
    """
    if not couplings or not any(is_dtensor(parameter) for parameter in own):
        return
    layouts = {name: (p.device_mesh, p.placements) for name, p in own.named() if is_dtensor(p)}

    def shard(name: str, value: torch.Tensor) -> torch.Tensor:
        if name not in layouts:
            return value
        mesh, placements = layouts[name]
        return distribute_tensor(value.to(mesh.device_type), mesh, placements, src_data_rank=None)

    trial = OptimizerTrial(job, [(name, tuple(parameter.shape)) for name, parameter in own.named()])
    try:
        in_shards = {name: whole(moved).cpu() for name, moved in trial.run(shard).items()}
        reason = "its update differs there" if differ(trial.run(), in_shards) else ""
    except Exception as error:
        reason = one_line(error).removesuffix(".")
    if reason:
        raise Refused(
            f"The optimizer's update depends on whole tensors, which fails on the shards of {strategy}: {reason}. "
            "Use ddp, or an optimizer that updates each element from its own gradient, AdamW for example."
        )


class HostCopies:
    """`offload=optimizer`: host copies of the parameters that this rank updates. The optimizer sees only the copies."""

    def __init__(self, parameters: NamedParameters, mesh: DeviceMesh | None = None) -> None:
        """`mesh` is the data axis as a CPU mesh, for optimizers that read whole parameters."""
        self._mesh = mesh
        self._pairs = [(p, nn.Parameter(self._copy(p.detach()))) for p in parameters]
        self._gradients: dict[int, torch.Tensor] = {}  # made once, because pinned memory is expensive to allocate
        names = [name for name, _ in parameters.named()]
        self.parameters = NamedParameters(zip(names, (host for _, host in self._pairs), strict=True))

    @torch.no_grad()
    def take_gradients(self) -> None:
        for index, (device, host) in enumerate(self._pairs):
            if device.grad is None:
                continue
            if index in self._gradients:
                local(self._gradients[index]).copy_(local(device.grad), non_blocking=True)
            else:
                self._gradients[index] = self._copy(device.grad)
            host.grad = self._gradients[index]
        _wait(self._pairs)

    @torch.no_grad()
    def add_gradients(self) -> None:
        """Add the device's gradients to the host's, and free them: for loops in which several passes may do so."""
        new = {
            index: self._copy(device.grad) for index, (device, _) in enumerate(self._pairs) if device.grad is not None
        }
        _wait(self._pairs)
        for index, gradient in new.items():
            device, host = self._pairs[index]
            if host.grad is None:
                host.grad = gradient
            else:
                local(host.grad).add_(local(gradient))
            device.grad = None

    @torch.no_grad()
    def give_all_parameters(self) -> None:
        """Copy all parameters to the device, and leave the gradients alone."""
        for device, host in self._pairs:
            local(device.data).copy_(local(host.data), non_blocking=True)
        _wait(self._pairs)

    @torch.no_grad()
    def give_parameters(self) -> None:
        for device, host in self._pairs:
            if host.grad is not None:
                local(device.data).copy_(local(host.data), non_blocking=True)
                host.grad = None
        _wait(self._pairs)

    @torch.no_grad()
    def take_parameters(self) -> None:
        """Copy the device's parameters to the host after they were loaded."""
        for device, host in self._pairs:
            local(host.data).copy_(local(device.data))

    def tensors(self) -> Iterator[torch.Tensor]:
        for _, host in self._pairs:
            yield host

    def _copy(self, tensor: torch.Tensor) -> torch.Tensor:
        if not isinstance(tensor, DTensor):
            return _to_host(tensor)
        assert self._mesh is not None, "a sharded parameter has a data axis"
        return DTensor.from_local(
            _to_host(tensor.to_local()),
            self._mesh,
            tensor.placements,
            run_check=False,
            shape=tensor.shape,
            stride=tensor.stride(),
        )


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A host copy, in pinned memory if the tensor is on a GPU."""
    host = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
    return host.copy_(tensor, non_blocking=True)


def _wait(pairs: list[tuple[nn.Parameter, nn.Parameter]]) -> None:
    if pairs and pairs[0][0].is_cuda:
        torch.cuda.current_stream().synchronize()
