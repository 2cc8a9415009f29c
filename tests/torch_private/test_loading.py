"""Data-loading processes can be hidden from the data that they load."""

from collections.abc import Iterator

from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from meshwright.torch_private.loading import hide_worker


class Place(IterableDataset[tuple[bool, int, int, bool]]):
    def __iter__(self) -> Iterator[tuple[bool, int, int, bool]]:
        before = get_worker_info() is None
        yield (before, *hide_worker(), get_worker_info() is None)


def test_a_loading_process_is_hidden() -> None:
    assert [tuple(place) for place in DataLoader(Place(), batch_size=None, num_workers=2)] == [
        (False, 0, 2, True),
        (False, 1, 2, True),
    ]


def test_outside_of_one_there_is_nothing_to_hide() -> None:
    assert list(Place()) == [(True, 0, 1, True)]
