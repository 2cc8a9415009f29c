"""`offload=optimizer`: keep masters and optimizer state in host memory, and compute the update there."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from meshwright.facts.job import NamedParameters
from meshwright.strategies.norm import local


class HostCopies:
    """Host copies of every parameter that this rank updates. The optimizer sees only the copies."""

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
