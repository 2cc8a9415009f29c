"""Find parameters that are read while the block that owns them is not running.

FSDP gathers a block's parameters around the block's `forward`. A model may read one of them elsewhere: it calls a part
of a block directly, or uses a block's weight in a function. There it would find a shard.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import nn

from meshwright.torch_private.modes import TorchDispatchMode, without_torch_function
from meshwright.torch_private.operators import DEVICE_OF
from meshwright.torch_private.trees import tree_leaves


def pass_on(func: Any, args: Any, kwargs: Any) -> Any:
    """Call an operator inside a dispatch mode.

    Fake tensors read their device by an operator, which a function mode would mistake for a call of the author's code.
    """
    if func is DEVICE_OF:
        with without_torch_function():
            return func(*args, **(kwargs or {}))
    return func(*args, **(kwargs or {}))


class OutsideReads(TorchDispatchMode):
    """Notes which parameters of blocks are read outside their blocks."""

    def __init__(self, model: nn.Module, blocks: Collection[str]) -> None:
        super().__init__()
        self._model, self._blocks = model, blocks
        self.found: dict[str, str] = {}
        """By parameter, the block that owns it."""

    def __enter__(self) -> OutsideReads:
        self.found.clear()  # a failed pass may have come before
        self._running: list[str] = []
        self._owners: dict[int, tuple[str, str]] = {}
        for name, parameter in self._model.named_parameters():
            if (owner := next((b for b in self._blocks if name.startswith(f"{b}.")), None)) is not None:
                self._owners[id(parameter)] = name, owner
        self._hooks = []
        for name in self._blocks:
            block = self._model.get_submodule(name)
            self._hooks += [
                block.register_forward_pre_hook(lambda *_, name=name: self._running.append(name)),
                block.register_forward_hook(lambda *_, name=name: self._running.remove(name), always_call=True),
            ]
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for hook in self._hooks:
            hook.remove()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, torch.Tensor) and id(leaf) in self._owners:
                name, block = self._owners[id(leaf)]
                if block not in self._running:
                    self.found[name] = block
        return pass_on(func, args, kwargs)
