import torch
import torch.distributed as dist

from meshwright.torch_private.flight_recorder import recorded_collectives


def test_collectives_are_recorded() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        dist.all_reduce(torch.ones(3))
        dist.barrier()
        last = recorded_collectives()[-2:]
    finally:
        dist.destroy_process_group()
    assert [(entry["name"], entry["sizes"]) for entry in last] == [("all_reduce", [[3]]), ("barrier", [])]
    assert last[1]["number"] == last[0]["number"] + 1
