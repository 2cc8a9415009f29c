"""Cache what several passes over one model share: stand-in tensors, repeated blocks, and flows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property

import torch
from torch import nn

from meshwright.describe.calls import Flow
from meshwright.describe.ladder import Convert, Rung, fake_mode, on_fake, on_meta
from meshwright.describe.repeats import Repeats
from meshwright.describe.stand_ins import fill_attributes, stand_ins
from meshwright.recording.blueprint import Blueprint
from meshwright.torch_private.fake_tensors import FakeTensorMode


class PassCache:
    """The stand-ins, repeated blocks and flows of one model."""

    def __init__(self, repeats: Repeats) -> None:
        self.repeats = repeats
        self.flows: dict[frozenset[str], Flow] = {}
        """By the set of watched modules."""
        self._tries_meta = True
        self._tensors: dict[str, torch.Tensor] = {}

    @property
    def rungs(self) -> list[Rung]:
        """Meta tensors until a pass fails on them, then fake ones."""
        return [self._on_meta, self._on_fake] if self._tries_meta else [self._on_fake]

    def stand_ins(self, blueprint: Blueprint) -> dict[str, torch.Tensor]:
        """Stand-ins for one pass, in a new dict that the pass may change."""
        if self._tensors:
            fill_attributes(blueprint)
        else:
            self._tensors = stand_ins(blueprint)
        return dict(self._tensors)

    @contextmanager
    def _on_meta(self, model: nn.Module) -> Iterator[Convert]:
        try:
            with on_meta(model) as convert:
                yield convert
        except Exception:
            self._tries_meta, self._tensors = False, {}
            raise

    def _on_fake(self, model: nn.Module) -> AbstractContextManager[Convert]:
        return on_fake(model, mode=self._mode)

    @cached_property
    def _mode(self) -> FakeTensorMode:
        """Made only when needed: the first one takes PyTorch a second."""
        return fake_mode()
