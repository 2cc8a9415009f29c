"""A script that trains on a stream: an iterable data set without a length, shuffled by its own generator."""

import random

import torch
from torch.utils.data import DataLoader, IterableDataset


class Stream(IterableDataset):
    def __iter__(self):
        order = random.Random(42)
        while True:
            x = torch.tensor([order.random() for _ in range(8)])
            yield x, x.flip(0)


torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
loader = DataLoader(Stream(), batch_size=8)
for step, (x, y) in enumerate(loader):
    torch.nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()
    if step == 4:
        break
