"""DDP with a sharded optimizer, saved by rank 0 through a helper."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def is_main_process():
    return dist.get_rank() == 0


def save(model, path):
    if not is_main_process():
        return
    torch.save(model.module.state_dict(), path)


def build(width):
    return nn.Sequential(nn.Linear(5, width), nn.SiLU(), nn.Linear(width, 2))


if __name__ == "__main__":
    dist.init_process_group(backend="gloo")
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    generator = torch.Generator().manual_seed(21)
    train_set = TensorDataset(torch.randn(8, 5, generator=generator), torch.randn(8, 2, generator=generator))
    train_sampler = DistributedSampler(train_set)
    train_loader = DataLoader(train_set, batch_size=8, sampler=train_sampler)
    torch.manual_seed(0)
    model = DDP(build(width=9))
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.Adam, lr=0.02)
    for epoch in range(6):
        train_sampler.set_epoch(epoch)
        for source, target in train_loader:
            optimizer.zero_grad()
            loss = nn.functional.l1_loss(model(source), target)
            loss.backward()
            optimizer.step()
            shown = loss.detach().clone()
            dist.all_reduce(shown)
            if is_main_process():
                print("loss", shown.item() / dist.get_world_size())
    save(model, os.devnull)
    dist.destroy_process_group()
