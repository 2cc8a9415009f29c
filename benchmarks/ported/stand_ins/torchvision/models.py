from torch import nn

__all__ = ["resnet18"]


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.first, self.second = (nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2))
        self.norm1, self.norm2 = nn.BatchNorm2d(width), nn.BatchNorm2d(width)
        self.act = nn.ReLU()

    def forward(self, x):
        return self.act(x + self.norm2(self.second(self.act(self.norm1(self.first(x))))))


class ResNet(nn.Module):
    """A residual network of two blocks."""

    def __init__(self, classes=8, width=8):
        super().__init__()
        self.enter = nn.Conv2d(3, width, 3, padding=1, bias=False)
        self.blocks = nn.Sequential(Block(width), Block(width))
        self.pool, self.fc = nn.AdaptiveAvgPool2d(1), nn.Linear(width, classes)
        self.default_cfg = {"mean": (0.5, 0.5, 0.5), "std": (0.25, 0.25, 0.25)}

    def get_classifier(self):
        return self.fc

    def forward(self, x):
        return self.fc(self.pool(self.blocks(self.enter(x))).flatten(1))


def resnet18(**kwargs):
    return ResNet()
