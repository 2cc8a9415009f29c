import torch
from torch.utils.data import Dataset


class FakeData(Dataset):
    """Images of noise with labels."""

    def __init__(self, size=32, image_size=(3, 8, 8), num_classes=8, transform=None):
        self.size, self.image_size, self.num_classes = min(size, 32), image_size, num_classes

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        return torch.randn(self.image_size, generator=generator), index % self.num_classes


class ImageFolder(FakeData):
    def __init__(self, root, transform=None):
        super().__init__(32 if "train" in str(root) else 16)
