"""A frozen backbone under a new head; only the head is optimized, and the schedule knows the steps of an epoch."""

import torch
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, TensorDataset


class Backbone(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Linear(7, 10), nn.ReLU(), nn.Linear(10, 10), nn.ReLU())
        self.fc = nn.Linear(10, 100)

    def forward(self, x):
        return self.fc(self.features(x))


def main():
    generator = torch.Generator().manual_seed(12)
    classes = ["a", "b", "c"]
    dataset = TensorDataset(
        torch.randn(15, 7, generator=generator), torch.randint(len(classes), (15,), generator=generator)
    )
    loader = DataLoader(dataset, batch_size=15)
    torch.manual_seed(0)
    model = Backbone()
    for param in model.parameters():
        param.requires_grad = False
    model.fc = nn.Linear(model.fc.in_features, len(classes))
    optimizer = torch.optim.SGD(model.fc.parameters(), lr=0.1 / 25)
    scheduler = OneCycleLR(optimizer=optimizer, max_lr=0.1, epochs=6, steps_per_epoch=len(loader))
    for epoch in range(6):
        model.train()
        for batch in loader:
            inputs, labels = batch[0], batch[1]
            loss = torch.nn.functional.cross_entropy(model(inputs), labels)
            loss.backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            print("loss", loss.item())


if __name__ == "__main__":
    main()
