"""The two-convolution network of the DDP tutorials.

meshwright train examples/cnn.py --strategy ddp --ranks 2 --steps 60
FASHION_MNIST=folder meshwright train examples/cnn.py --strategy ddp --ranks 2 --steps 200
"""

import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD

from images import CLASSES, Images, class_loss, sample
from meshwright import Job


class CNN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 3)
        self.conv2 = nn.Conv2d(32, 64, 3)
        self.dropout1 = nn.Dropout(0.25)
        self.fc1 = nn.Linear(64 * 12 * 12, 128)
        self.dropout2 = nn.Dropout(0.5)
        self.fc2 = nn.Linear(128, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.conv1(x))
        x = F.relu(self.conv2(x))
        x = self.dropout1(F.max_pool2d(x, 2)).flatten(1)
        x = self.dropout2(F.relu(self.fc1(x)))
        return self.fc2(x)


job = Job(
    model=CNN,
    inputs=lambda batch: (batch["x"],),
    loss=class_loss,
    optimizer=lambda params: SGD(params, lr=0.02, momentum=0.9, nesterov=True),
    data=Images,
    sample=sample,
    global_batch=64,
)
