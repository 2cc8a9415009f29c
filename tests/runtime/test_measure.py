"""Bytes are counted from storages, so that nothing counts twice."""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.optim import AdamW

from meshwright.assemble.world import fake_world
from meshwright.runtime.measure import held_states, peak_bytes, storage_bytes, storages
from minimal import CPU, make_job, make_trainer, sample


def test_views_count_once() -> None:
    base = torch.zeros(10)
    assert storage_bytes([base, base[2:4], base.view(2, 5), base.t()]) == 40
    assert storage_bytes([base[:1]]) == 40, "a view keeps the whole storage alive"
    assert storage_bytes([base, torch.zeros(3, dtype=torch.float64)]) == 64


def test_what_is_counted_elsewhere_is_left_out() -> None:
    base, other = torch.zeros(10), torch.zeros(2)
    assert storage_bytes([base[1:], other], without=storages([base])) == 8


def test_nothing() -> None:
    assert storage_bytes([]) == 0
    assert storage_bytes([torch.empty(0), torch.empty(0, 5)]) == 0


def test_a_shard_counts_what_this_rank_holds() -> None:
    world = fake_world(4, CPU)
    try:
        mesh = init_device_mesh("cpu", (4,))
        shard = DTensor.from_local(torch.zeros(2, 3), mesh, [Shard(0)], run_check=False)
        assert shard.shape == (8, 3)
        assert storage_bytes([shard]) == 24
    finally:
        world.leave()


def test_states_of_one_process() -> None:
    job = make_job(model=lambda: nn.Linear(4, 4), optimizer=lambda params: AdamW(params, lr=0.1))
    trainer = make_trainer(job)
    assert dict(held_states(trainer).memory) == {"parameters": 80, "gradients": 0, "optimizer": 0}
    trainer.step(sample(4))
    trainer.forward_backward(sample(4))
    memory = held_states(trainer).memory
    assert (memory["parameters"], memory["gradients"]) == (80, 80)
    assert memory["optimizer"] == 2 * 80 + 2 * 4, "two moments, and a counter for each of two parameters"


def test_masters_in_host_memory_count_with_the_optimizer() -> None:
    trainer = make_trainer(make_job(model=lambda: nn.Linear(4, 4)), "single,offload=optimizer")
    assert dict(held_states(trainer).memory) == {"parameters": 80, "gradients": 0, "optimizer": 80}


def test_peak_is_at_least_what_is_held() -> None:
    held = torch.ones(1_000_000)
    assert peak_bytes(CPU) > storage_bytes([held])
