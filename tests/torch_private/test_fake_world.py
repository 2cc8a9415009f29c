import torch
import torch.distributed as dist

from meshwright.torch_private.fake_world import FakeStore


def test_a_rank_is_alone_and_its_collectives_return() -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=3, world_size=512)
    try:
        tensor = torch.ones(2)
        dist.all_reduce(tensor)
        assert (dist.get_rank(), dist.get_world_size(), tensor.tolist()) == (3, 512, [1, 1])
    finally:
        dist.destroy_process_group()
