"""Functions and a command line, with a schedule by epoch."""

import argparse

import torch
import torch.nn.functional as F
import torch.optim as optim
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, Dataset


class Points(Dataset):
    def __init__(self, count):
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(count, 1, 4, 4, generator=generator)
        self.y = torch.randint(5, (count,), generator=generator)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index], self.y[index]


class Net(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.conv = nn.Conv2d(1, width, 3)
        self.fc = nn.Linear(width * 4, 5)

    def forward(self, x):
        x = F.relu(self.conv(x))
        return F.log_softmax(self.fc(torch.flatten(x, 1)), dim=1)


def train(args, model, device, train_loader, optimizer, epoch):
    model.train()
    for batch_idx, (data, target) in enumerate(train_loader):
        data, target = data.to(device), target.to(device)
        optimizer.zero_grad()
        output = model(data)
        loss = F.nll_loss(output, target)
        loss.backward()
        optimizer.step()
        if batch_idx % args.log_interval == 0:
            print("loss", loss.item())


def test(model, device, test_loader):
    model.eval()
    with torch.no_grad():
        for data, target in test_loader:
            model(data.to(device))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=20)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--lr", type=float, default=0.5)
    parser.add_argument("--gamma", type=float, default=0.7)
    parser.add_argument("--width", type=int, default=3)
    parser.add_argument("--log-interval", type=int, default=1)
    parser.add_argument("--no-cuda", action="store_true")
    parser.add_argument("--save-model", action="store_true")
    args = parser.parse_args()
    use_cuda = not args.no_cuda and torch.cuda.is_available()
    torch.manual_seed(0)
    device = torch.device("cuda" if use_cuda else "cpu")
    train_kwargs = {"batch_size": args.batch_size}
    if use_cuda:
        train_kwargs.update({"num_workers": 1, "shuffle": True})
    train_loader = DataLoader(Points(20), **train_kwargs)
    test_loader = DataLoader(Points(10), batch_size=5)

    model = Net(args.width).to(device)
    optimizer = optim.Adadelta(model.parameters(), lr=args.lr)
    scheduler = StepLR(optimizer, step_size=1, gamma=args.gamma)
    for epoch in range(1, args.epochs + 1):
        train(args, model, device, train_loader, optimizer, epoch)
        test(model, device, test_loader)
        scheduler.step()
    if args.save_model:
        torch.save(model.state_dict(), "net.pt")


if __name__ == "__main__":
    main()
