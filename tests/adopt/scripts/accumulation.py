"""Four batches a step, and a schedule by step."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset

ACCUMULATE = 4


class Classifier(nn.Module):
    def __init__(self, features: int, classes: int):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(features, features) for _ in range(2)])
        self.out = nn.Linear(features, classes)

    def forward(self, x):
        for layer in self.layers:
            x = x + torch.relu(layer(x))
        return self.out(x)


def warm_up(step):
    return min(1.0, (step + 1) / 3)


def main():
    generator = torch.Generator().manual_seed(9)
    dataset = TensorDataset(torch.randn(16, 6, generator=generator), torch.randint(4, (16,), generator=generator))
    loader = DataLoader(dataset, batch_size=4)
    torch.manual_seed(0)
    model = Classifier(6, 4)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    schedule = LambdaLR(optimizer, warm_up)
    for epoch in range(6):
        total = 0.0
        for step, (x, y) in enumerate(loader):
            logits = model(x)
            loss = F.cross_entropy(logits, y) / ACCUMULATE
            loss.backward()
            total += loss.item()
            if (step + 1) % ACCUMULATE == 0:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
        print("loss", total)


main()
