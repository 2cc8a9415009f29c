"""A stream's own `state_dict` and `load_state_dict`: used if they continue at the exact next sample, which is tried."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from itertools import islice
from typing import Any

from torch.utils.data import DataLoader

from meshwright.checkpoint.json_state import decode, encode
from meshwright.describe.data_source import DataSource
from meshwright.environment import alone
from meshwright.errors import MeshwrightError, one_line
from meshwright.runtime.checksum import checksum
from meshwright.runtime.seeds import OwnRandom, seed_for_sample

BEFORE, AFTER = 3, 4
"""Samples read before and after the state that is tried: with a shuffle buffer, the next sample already differs."""


def has_state(thing: Any) -> bool:
    return all(callable(getattr(thing, name, None)) for name in ("state_dict", "load_state_dict"))


def state_of(dataset: Any, iterator: Any) -> Any:
    """The state after the last sample read: the iterator's, or the dataset's."""
    return copy.deepcopy((iterator if has_state(iterator) else dataset).state_dict())


def opened(dataset: Any, epoch: int) -> tuple[Any, Iterator[Any]]:
    """The dataset and an iterator over one epoch of it."""
    set_epoch(dataset, epoch)
    return dataset, iter(dataset)


def set_epoch(dataset: Any, epoch: int) -> None:
    if callable(setter := getattr(dataset, "set_epoch", None)):
        setter(epoch)


def restored(source: DataSource, state: Any, epoch: int) -> tuple[Any, Iterator[Any]]:
    """A copy of the dataset that continues at `state`, and its iterator. The next epoch needs the dataset unchanged."""
    dataset = copied(source)
    set_epoch(dataset, epoch)
    if not has_state(dataset):
        iterator: Any = iter(dataset)
        iterator.load_state_dict(state)
        return dataset, iterator
    dataset.load_state_dict(state)
    return dataset, iter(dataset)


def copied(source: DataSource) -> Any:
    if source.build is None:
        return copy.deepcopy(source.dataset)
    built = source.build()
    return built.dataset if isinstance(built, DataLoader) else built


def why_inexact(source: DataSource, seed: int) -> str:
    """Why the stream's own state cannot be used, found by trying it; empty if it can."""
    with OwnRandom(seed), alone():
        return _tried(source, seed)


def _tried(source: DataSource, seed: int) -> str:
    name = type(source.dataset).__name__
    try:
        dataset, iterator = opened(copied(source), 0)
        if not has_state(iterator) and not has_state(dataset):
            return f"{name} has no state_dict() and load_state_dict()"
        _read(iterator, BEFORE, seed, 0)
        state = decode(encode(state_of(dataset, iterator), f"state_dict() of {name}"))
        expected = _read(iterator, AFTER, seed, BEFORE)
        _, again = restored(source, state, 0)
        if _read(again, AFTER, seed, BEFORE) != expected:
            return f"load_state_dict() of {name} does not continue at the exact next sample (it was tried)"
    except MeshwrightError as error:
        return str(error).rstrip(".")
    except Exception as error:
        return f"state_dict() of {name} could not be tried ({one_line(error).rstrip('.')})"
    return ""


def _read(iterator: Iterator[Any], count: int, seed: int, passed: int) -> int:
    """The checksum of the next samples, read as a run reads them."""
    digest = 0
    for place in range(passed, passed + count):
        seed_for_sample(seed, place)
        digest = checksum(islice(iterator, 1), digest)
    return digest
