"""A stream's own `state_dict` and `load_state_dict`: used if they continue at the exact next sample, which is tried."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from types import ModuleType
from typing import Any

from meshwright.checkpoint.json_state import decode, encode
from meshwright.describe.data_source import DataSource, named
from meshwright.environment import alone
from meshwright.errors import MeshwrightError, one_line
from meshwright.runtime.checksum import checksum
from meshwright.runtime.seeds import OwnRandom, seed_for_sample

PLACES, AFTER = (3, 40), 4
"""The state is tried after so many samples; so many that follow are compared."""
DEPTH = 12


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
    dataset = source.copied()
    set_epoch(dataset, epoch)
    if not has_state(dataset):
        iterator: Any = iter(dataset)
        iterator.load_state_dict(state)
        return dataset, iterator
    dataset.load_state_dict(state)
    return dataset, iter(dataset)


@dataclass(frozen=True)
class StreamTrial:
    """What a few samples of a stream show."""

    repeats: bool
    """Whether it gives the same samples again if the host's generators start from the same seed."""
    no_state: str
    """Why its own state cannot be used to continue; empty if it can."""


def try_stream(source: DataSource, seed: int) -> StreamTrial:
    """Read the first samples of copies of a stream. Raises JobError if it cannot be read."""
    with OwnRandom(seed), alone():
        try:
            first, again = (_read(opened(source.copied(), 0)[1], PLACES[0] + AFTER, seed, 0) for _ in range(2))
        except Exception as error:
            raise named(error) from error
        return StreamTrial(first == again, _why_no_state(source, seed))


def _why_no_state(source: DataSource, seed: int) -> str:
    name = type(source.dataset).__name__
    try:
        dataset, iterator = opened(source.copied(), 0)
        if not has_state(iterator) and not has_state(dataset):
            return f"{name} has no state_dict() and load_state_dict()"
        if _shuffles_in_buffer(dataset, DEPTH):
            return f"{name} shuffles in a buffer, whose samples load_state_dict() would lose"
        passed = 0
        for place in PLACES:
            _read(iterator, place - passed, seed, passed)
            state = decode(encode(state_of(dataset, iterator), f"state_dict() of {name}"))
            _, continued = restored(source, state, 0)
            if _read(continued, AFTER, seed, place) != _read(iterator, AFTER, seed, place):
                return f"load_state_dict() of {name} does not continue at the exact next sample (it was tried)"
            passed = place + AFTER
    except MeshwrightError as error:
        return str(error).rstrip(".")
    except Exception as error:
        return f"state_dict() of {name} could not be tried ({one_line(error).rstrip('.')})"
    return ""


def _shuffles_in_buffer(thing: Any, depth: int) -> bool:
    """Whether a dataset, or one that it reads, has a shuffle buffer: a trial may end before that shows."""
    held = getattr(thing, "__dict__", {})
    size = held.get("buffer_size")
    if isinstance(size, int) and size > 1:
        return True
    return depth > 0 and any(
        _shuffles_in_buffer(value, depth - 1) for value in held.values() if not isinstance(value, type | ModuleType)
    )


def _read(iterator: Iterator[Any], count: int, seed: int, passed: int) -> int:
    """The checksum of the next samples, read as a run reads them."""
    digest = 0
    for place in range(passed, passed + count):
        seed_for_sample(seed, place)
        digest = checksum(islice(iterator, 1), digest)
    return digest
