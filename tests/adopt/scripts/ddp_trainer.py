"""A class that holds the loop, under DDP with torchrun."""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class Noise(Dataset):
    def __init__(self, size):
        generator = torch.Generator().manual_seed(2)
        self.data = [(torch.rand(8, generator=generator), torch.rand(1, generator=generator)) for _ in range(size)]

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        return self.data[index]


class Trainer:
    def __init__(self, model, train_data, optimizer, save_every, path="snapshot.pt"):
        self.rank = int(os.environ["LOCAL_RANK"])
        self.model = model
        self.train_data = train_data
        self.optimizer = optimizer
        self.save_every = save_every
        self.path = path
        self.start = 0
        if os.path.exists(path):
            self._load(path)
        self.model = DDP(self.model)

    def _load(self, path):
        snapshot = torch.load(path, weights_only=True)
        self.model.load_state_dict(snapshot["model"])
        self.start = snapshot["epoch"]

    def _run_batch(self, source, targets):
        self.optimizer.zero_grad()
        output = self.model(source)
        loss = F.mse_loss(output, targets)
        loss.backward()
        self.optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        if self.rank == 0:
            print("loss", total.item() / dist.get_world_size())

    def _run_epoch(self, epoch):
        self.train_data.sampler.set_epoch(epoch)
        for source, targets in self.train_data:
            self._run_batch(source, targets)

    def _save(self, epoch):
        torch.save({"model": self.model.module.state_dict(), "epoch": epoch}, self.path)

    def train(self, epochs):
        for epoch in range(self.start, epochs):
            self._run_epoch(epoch)
            if self.rank == 0 and (epoch + 1) % self.save_every == 0:
                self._save(epoch)


def load_objects():
    train_set = Noise(24)
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    return train_set, model, optimizer


def prepare_loader(dataset, batch_size):
    return DataLoader(dataset, batch_size=batch_size, shuffle=False, sampler=DistributedSampler(dataset))


def main(epochs, save_every, batch_size):
    dist.init_process_group("gloo")
    dataset, model, optimizer = load_objects()
    loader = prepare_loader(dataset, batch_size)
    trainer = Trainer(model, loader, optimizer, save_every)
    trainer.train(epochs)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(epochs=6, save_every=100, batch_size=24)
