"""A user's DataLoader divided over data ranks, each asked in turn in one process."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, WeightedRandomSampler

from meshwright.assemble.world import World
from meshwright.errors import JobError
from meshwright.runtime.divided_loader import divide_loader
from minimal import CPU


class Numbers(Dataset[int]):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> int:
        return index


class Stream(IterableDataset[int]):
    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[int]:
        yield from range(self.length)


def parts(loader: DataLoader[Any], ranks: int) -> list[list[list[int]]]:
    """What each rank gets, drawn from the same random state."""
    found = []
    for rank in range(ranks):
        torch.manual_seed(3)
        divided = divide_loader(loader, rank=rank, ranks=ranks, world=World(device=CPU))
        found.append([batch.tolist() for batch in divided])
    return found


def whole(loader: DataLoader[Any]) -> list[list[int]]:
    torch.manual_seed(3)
    return [batch.tolist() for batch in loader]


@pytest.mark.parametrize(
    "loader",
    [
        DataLoader(Numbers(), batch_size=6, shuffle=True),
        DataLoader(Numbers(), batch_size=5, shuffle=True, drop_last=True),
        DataLoader(Numbers(), batch_size=6, sampler=WeightedRandomSampler([1.0] * 12, 12)),
        DataLoader(Numbers(), batch_size=4),
        DataLoader(Stream(12), batch_size=6),
        DataLoader(Stream(10), batch_size=6),
        DataLoader(Stream(11), batch_size=6, drop_last=True),
    ],
)
def test_together_the_parts_are_the_batches(loader: DataLoader[Any]) -> None:
    joined = [[one for part in step for one in part] for step in zip(*parts(loader, 2), strict=True)]
    assert joined == whole(loader)


def test_settings_are_kept() -> None:
    loader = DataLoader(Numbers(), batch_size=4, collate_fn=tuple, shuffle=True)
    divided = divide_loader(loader, rank=1, ranks=2, world=World(device=CPU))
    assert len(divided) == 3 and divided.sampler is loader.sampler
    assert all(isinstance(batch, tuple) and len(batch) == 2 for batch in divided)


@pytest.mark.parametrize(
    ("loader", "told"),
    [
        (DataLoader(Numbers(), batch_size=11), "The last batch has 1 samples for 2 data ranks"),
        (DataLoader(Numbers(), batch_size=None), "its samples are whole batches"),
        (DataLoader(Stream(12), batch_size=5), "a batch_size that is a multiple"),
        (DataLoader(Stream(11), batch_size=6), "give the DataLoader drop_last=True"),
        ([1, 2, 3], "takes a torch DataLoader"),
    ],
)
def test_what_is_refused(loader: Any, told: str) -> None:
    with pytest.raises(JobError, match=told):
        list(divide_loader(loader, rank=0, ranks=2, world=World(device=CPU)))
