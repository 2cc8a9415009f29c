"""The targets are the inputs; the loop reshapes them; the labels are not used."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class AutoEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(16, 4), nn.ReLU())
        self.decoder = nn.Linear(4, 16)

    def forward(self, x):
        return self.decoder(self.encoder(x))


def build_model():
    model = AutoEncoder()
    nn.init.zeros_(model.decoder.bias)
    return model


def run(epochs=6, lr=1e-2):
    images = torch.rand(10, 1, 4, 4, generator=torch.Generator().manual_seed(7))
    loader = DataLoader(TensorDataset(images, torch.zeros(10)), batch_size=10)
    torch.manual_seed(0)
    model = build_model()
    loss_fn = nn.MSELoss()
    opt = torch.optim.Adam(model.parameters(), lr=lr)
    for epoch in range(epochs):
        for img, _ in loader:
            img = img.view(img.size(0), -1)
            recon = model(img)
            loss = loss_fn(recon, img)
            opt.zero_grad()
            loss.backward()
            opt.step()
            print("loss", loss.item())


if __name__ == "__main__":
    run()
