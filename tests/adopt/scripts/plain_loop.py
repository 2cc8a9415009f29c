"""Everything at module level."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

generator = torch.Generator().manual_seed(3)
features = torch.randn(16, 6, generator=generator)
labels = torch.randint(3, (16,), generator=generator)
loader = DataLoader(TensorDataset(features, labels), batch_size=16, shuffle=True)

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 3))
criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

for epoch in range(6):
    for x, y in loader:
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
        print("loss", loss.item())
