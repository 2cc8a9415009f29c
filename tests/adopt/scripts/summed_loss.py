"""A loss of two terms, summed over the batch."""

import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.utils.data import DataLoader, Dataset


class Grids(Dataset):
    def __len__(self):
        return 6

    def __getitem__(self, index):
        return torch.rand(9, generator=torch.Generator().manual_seed(index))


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(9, 5)
        self.mean = nn.Linear(5, 2)
        self.out = nn.Linear(2, 9)

    def forward(self, x):
        code = self.mean(torch.tanh(self.fc(x)))
        return torch.sigmoid(self.out(code)), code


def loss_function(recon_x, x, code):
    bce = F.binary_cross_entropy(recon_x, x, reduction="sum")
    return bce + 0.5 * torch.sum(code.pow(2))


torch.manual_seed(0)
device = torch.device("cpu")
model = TwoHeads().to(device)
optimizer = optim.Adam(model.parameters(), lr=1e-2)
train_loader = DataLoader(Grids(), batch_size=6, shuffle=True)


def train(epoch):
    model.train()
    for batch_idx, data in enumerate(train_loader):
        data = data.to(device)
        optimizer.zero_grad()
        recon_batch, code = model(data)
        loss = loss_function(recon_batch, data, code)
        loss.backward()
        optimizer.step()
        print("loss", loss.item())


if __name__ == "__main__":
    for epoch in range(1, 7):
        train(epoch)
