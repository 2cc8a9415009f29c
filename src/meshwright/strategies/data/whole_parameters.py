"""Parameters that stay whole on every rank while FSDP shards the others."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from meshwright.strategies.data.summing import sum_gradients


class WholeParameters:
    """Averages their gradients over ranks after backward, as FSDP does for its shards.

    The optimizer gets replicated DTensors over the same memory, because `foreach` kernels refuse to mix DTensors with
    plain tensors.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], mesh: DeviceMesh, device: torch.device) -> None:
        self._mesh = mesh
        self._pairs: list[tuple[nn.Parameter, nn.Parameter]] = []
        for parameter in parameters:
            parameter.data = parameter.data.to(device)  # offload=params fills in weights on the host
            if parameter.requires_grad:
                self._pairs.append((parameter, nn.Parameter(self._replicated(parameter.data))))
        self._twins = {id(parameter): twin for parameter, twin in self._pairs}

    def optimized(self, parameter: Any) -> Any:
        """The tensor that the optimizer updates for a parameter; the parameter itself if FSDP shards it."""
        return self._twins.get(id(parameter), parameter)

    def sum_gradients(self) -> None:
        parameters = [parameter for parameter, _ in self._pairs]
        for axis in range(self._mesh.ndim):
            sum_gradients(parameters, self._mesh.get_group(axis), share=1.0 / self._mesh.size(axis))
        for parameter, twin in self._pairs:
            twin.grad = None if parameter.grad is None else self._replicated(parameter.grad)

    def forget_gradients(self) -> None:
        for parameter, _ in self._pairs:
            parameter.grad = None

    def _replicated(self, tensor: torch.Tensor) -> DTensor:
        return DTensor.from_local(tensor, self._mesh, [Replicate()] * self._mesh.ndim, run_check=False)
