"""Greyscale images of ten classes, 28 x 28.

Fashion-MNIST if the variable FASHION_MNIST names a folder with its idx files; otherwise scikit-learn's digits.
"""

import gzip
import os
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import Dataset

SIDE = 28
CLASSES = 10


def read_idx(folder: Path, name: str) -> Tensor:
    """Read an idx file, gzipped or not: two zeros, the type, the number of dims, the size of each dim, the data."""
    plain, packed = folder / name, folder / f"{name}.gz"
    if plain.exists():
        content = plain.read_bytes()
    elif packed.exists():
        content = gzip.decompress(packed.read_bytes())
    else:
        raise FileNotFoundError(
            f"FASHION_MNIST={folder} holds neither {name} nor {name}.gz; unset it to train on digits"
        )
    dims = content[3]
    shape = np.frombuffer(content, ">u4", dims, offset=4).tolist()
    return torch.from_numpy(np.frombuffer(content, np.uint8, offset=4 + 4 * dims).reshape(shape).copy())


def fashion_mnist(folder: Path) -> tuple[Tensor, Tensor]:
    images = read_idx(folder, "train-images-idx3-ubyte")
    return images.unsqueeze(1).float(), read_idx(folder, "train-labels-idx1-ubyte").long()


def digits() -> tuple[Tensor, Tensor]:
    from sklearn.datasets import load_digits

    bunch = load_digits()
    images = torch.from_numpy(bunch.images).float().unsqueeze(1)
    return F.interpolate(images, size=(SIDE, SIDE), mode="bilinear"), torch.from_numpy(bunch.target).long()


class Images(Dataset[dict[str, Tensor]]):
    """Images (x), normalized to mean 0 and standard deviation 1, with their classes (y)."""

    def __init__(self) -> None:
        folder = os.environ.get("FASHION_MNIST")
        images, self.classes = fashion_mnist(Path(folder)) if folder else digits()
        self.images = (images - images.mean()) / images.std()

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": self.images[index], "y": self.classes[index]}


def class_loss(logits: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    y = batch["y"]
    return F.cross_entropy(logits, y, reduction="sum"), y.numel()


def sample(n: int) -> dict[str, Tensor]:
    return {"x": torch.randn(n, 1, SIDE, SIDE), "y": torch.randint(CLASSES, (n,))}
