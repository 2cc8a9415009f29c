"""A script in the shape of tutorials: a trainer class, a shuffled loader, epochs, a snapshot at the end of each."""

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset


class Trainer:
    def __init__(self, model, train_data, optimizer):
        self.model, self.train_data, self.optimizer = model, train_data, optimizer

    def run_batch(self, source, targets):
        self.optimizer.zero_grad()
        loss = F.mse_loss(self.model(source), targets)
        loss.backward()
        self.optimizer.step()

    def train(self, epochs):
        for _ in range(epochs):
            for source, targets in self.train_data:
                self.run_batch(source, targets)


torch.manual_seed(0)
samples = torch.randn(32, 8)
loader = DataLoader(TensorDataset(samples, samples.roll(1, 1)), batch_size=8, shuffle=True)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 8))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
trainer = Trainer(model, loader, optimizer)
trainer.train(2)
