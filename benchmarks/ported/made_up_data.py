"""Small data sets in the files that the scripts read."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
from PIL import Image


def nanogpt(folder: Path) -> None:
    data = folder / "data" / "tiny"
    data.mkdir(parents=True)
    random = np.random.default_rng(0)
    for name in ("train.bin", "val.bin"):
        random.integers(0, 48, 2000).astype(np.uint16).tofile(data / name)
    (data / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": 48}))


def llama2c(folder: Path) -> None:
    data = folder / "data" / "tok48"
    data.mkdir(parents=True)
    random = np.random.default_rng(0)
    for number in range(3):
        random.integers(0, 48, 1000).astype(np.uint16).tofile(data / f"data{number}.bin")


def pets(folder: Path) -> None:
    data = folder / "pets"
    data.mkdir()
    random = np.random.default_rng(0)
    for number in range(40):
        pixels = random.integers(0, 256, (8, 8, 3)).astype(np.uint8)
        Image.fromarray(pixels).save(data / f"{'cat' if number % 2 else 'dog'}_{number}.jpg")
