"""FSDP2's private reduction, on which pipelines rely."""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from meshwright.assemble.world import fake_world
from meshwright.torch_private.fsdp import reduce_gradients


def test_gradients_are_reduced_and_parameters_stay_gathered() -> None:
    world = fake_world(2, torch.device("cpu"))
    try:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
        mesh = init_device_mesh("cpu", (2,))
        for module in (*model, model):
            fully_shard(module, mesh=mesh, reshard_after_forward=False)
        for _ in range(2):
            model.set_requires_gradient_sync(False)
            model.set_is_last_backward(False)
            model.set_reshard_after_backward(False)
            model(torch.ones(3, 4)).sum().backward()
            assert model[1].bias.grad is not None
            reduce_gradients(model)
            assert not isinstance(model[1].bias, DTensor) and model[1].bias.grad is None
        for module in (*model, model):
            module.reshard()
        assert all(isinstance(parameter.grad, DTensor) for parameter in model.parameters())
    finally:
        world.leave()
