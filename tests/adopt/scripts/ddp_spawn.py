"""DDP ranks by mp.spawn, a weighted criterion's plain cousin, and gradient clipping."""

import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

BATCH_SIZE, EPOCHS = 12, 6


def setup(rank, world_size):
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    os.environ.setdefault("MASTER_PORT", "29511")
    dist.init_process_group("gloo", rank=rank, world_size=world_size)


def make_data():
    generator = torch.Generator().manual_seed(5)
    return TensorDataset(
        torch.randn(12, 10, generator=generator), (torch.rand(12, 4, generator=generator) > 0.5).float()
    )


def worker(rank, world_size):
    setup(rank, world_size)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(10, 16), nn.GELU(), nn.Linear(16, 4)).to(
        rank if torch.cuda.is_available() else "cpu"
    )
    ddp_model = DistributedDataParallel(model)
    dataset = make_data()
    sampler = DistributedSampler(dataset, num_replicas=world_size, rank=rank)
    loader = DataLoader(dataset, batch_size=BATCH_SIZE, sampler=sampler)
    criterion = nn.BCEWithLogitsLoss()
    optimizer = torch.optim.AdamW(ddp_model.parameters(), lr=1e-2, weight_decay=0.1)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            outputs = ddp_model(inputs)
            loss = criterion(outputs, targets)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            clip_grad_norm_(ddp_model.parameters(), max_norm=0.1)
            optimizer.step()
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            if rank == 0:
                print("loss", mean.item() / world_size)
    if rank == 0:
        torch.save(ddp_model.module.state_dict(), os.devnull)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    world_size = max(1, torch.cuda.device_count())
    if world_size > 1:
        mp.spawn(worker, args=(world_size,), nprocs=world_size)
    else:
        worker(0, world_size)
