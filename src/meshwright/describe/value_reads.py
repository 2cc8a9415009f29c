"""Find where a model reads values, and whether the samples can decide what runs.

A model that reads a number out of a tensor does not run on fake tensors. Often the read has no consequence, as when a
random number is compared with a probability of zero. So the model is run on several batches and seeds. A read counts if
the number comes from the batch, or is not always the same.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from meshwright.describe.calls import NUMBERS
from meshwright.describe.observe import SAMPLES, forward_with_values, make_batch
from meshwright.describe.watch_values import MEMORY_READS
from meshwright.facts.job import Job
from meshwright.recording.blueprint import Blueprint
from meshwright.recording.seeding import seed_torch
from meshwright.recording.wrap_forward import removing
from meshwright.torch_private.modes import TorchDispatchMode
from meshwright.torch_private.operators import schema_of
from meshwright.torch_private.trees import tree_leaves

PASSES = 6
_SHAPED_BY_DATA = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)


def find_value_reads(job: Job, blueprint: Blueprint, blocks: Collection[str]) -> tuple[bool, bool]:
    """Whether samples or random numbers may decide what runs in blocks, and what runs around them."""
    passes = []
    for number in range(PASSES):
        with torch.random.fork_rng(devices=[]):
            seed_torch(number)
            batch = make_batch(job, SAMPLES)
        reads = _ValueReads(blueprint.model, blocks)
        try:
            forward_with_values(job, blueprint, batch, reads.watching, seed=number)
        except Exception:
            return True, True
        passes.append(reads)
        if not any(reads.is_open(place) for place in (True, False)):
            break
    inside, around = (_decides(passes, in_block=place) for place in (True, False))
    return inside, around


def _decides(passes: list[_ValueReads], *, in_block: bool) -> bool:
    """Whether reads in blocks, or around them, may have different outcomes in different steps."""
    outcomes = {tuple(reads.at_others[in_block]) for reads in passes}
    return len(outcomes) > 1 or any(in_block in reads.at_samples for reads in passes)


class _ValueReads(TorchDispatchMode):
    """Follows what is computed from a batch, and notes where numbers are read out of tensors."""

    def __init__(self, model: nn.Module, blocks: Collection[str]) -> None:
        super().__init__()
        self._model, self._blocks = model, blocks
        self._running = 0
        self._of_batch: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self.at_samples: set[bool] = set()
        """Where numbers that come from the batch are read: in a block (True) or outside (False)."""
        self.at_others: dict[bool, list[Any]] = {True: [], False: []}
        """The other numbers that are read, in order."""

    def is_open(self, place: bool) -> bool:
        """Whether more passes are needed to tell if reads at a place decide anything."""
        return place not in self.at_samples and bool(self.at_others[place])

    @contextmanager
    def watching(self, batch: Any) -> Iterator[None]:
        self._follow(tree_leaves(batch))
        hooks = []
        for block in map(self._model.get_submodule, self._blocks):
            hooks.append(block.register_forward_pre_hook(partial(self._count, 1)))
            hooks.append(block.register_forward_hook(partial(self._count, -1), always_call=True))
        with removing(hooks), _WholeReads(self), self:
            yield

    def look(self, given: Any, value: Any) -> None:
        place = self._running > 0
        if any(torch.is_tensor(leaf) and leaf in self._of_batch for leaf in tree_leaves(given)):
            self.at_samples.add(place)
        else:
            self.at_others[place].append(value)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, NUMBERS):
            self.look((args, kwargs), result)
        elif any(tag in func.tags for tag in _SHAPED_BY_DATA):
            self.look((args, kwargs), tuple(leaf.shape for leaf in tree_leaves(result) if torch.is_tensor(leaf)))
        if any(torch.is_tensor(leaf) and leaf in self._of_batch for leaf in tree_leaves((args, kwargs))):
            self._follow(tree_leaves(result))
            if schema_of(func).is_mutable:
                self._follow(tree_leaves(args[:1]))
        return result

    def _follow(self, leaves: list[Any]) -> None:
        for leaf in leaves:
            if torch.is_tensor(leaf):
                self._of_batch[leaf] = True

    def _count(self, step: int, *_: Any) -> None:
        self._running += step


class _WholeReads(TorchFunctionMode):
    """Notes functions that read a tensor's memory, which no operator shows."""

    def __init__(self, reads: _ValueReads) -> None:
        super().__init__()
        self._reads = reads

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in MEMORY_READS:
            self._reads.look(args, str(result))
        return result
