"""Parameters that are read while the block that holds them is not running.

FSDP gathers a block's parameters around the block's `forward`. A model may read one of them elsewhere: it calls a part
of a block by itself, or uses a block's weight in a function. There it would find a shard.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import nn

from meshwright.torch_private.modes import TorchDispatchMode, without_torch_function
from meshwright.torch_private.operators import DEVICE_OF
from meshwright.torch_private.trees import tree_leaves


def pass_on(func: Any, args: Any, kwargs: Any) -> Any:
    """Call an operator that a dispatch mode has seen.

    Fake tensors are asked for their device by an operator, too, which a function mode would take for a call of the
    author's.
    """
    if func is DEVICE_OF:
        with without_torch_function():
            return func(*args, **(kwargs or {}))
    return func(*args, **(kwargs or {}))


class OutsideReads(TorchDispatchMode):
    """Notes, while active, which parameters of blocks are read outside of them."""

    def __init__(self, model: nn.Module, blocks: Collection[str]) -> None:
        super().__init__()
        self._model, self._blocks = model, blocks
        self.found: dict[str, str] = {}
        """By parameter, the block that holds it."""

    def __enter__(self) -> OutsideReads:
        self.found.clear()  # a pass that failed may come before
        self._running: list[str] = []
        self._owners: dict[int, tuple[str, str]] = {}
        for name, parameter in self._model.named_parameters():
            if (block := next((b for b in self._blocks if name.startswith(f"{b}.")), None)) is not None:
                self._owners[id(parameter)] = name, block
        self._hooks = [hook for name in self._blocks for hook in self._follow(name)]
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

    def _follow(self, name: str) -> list[Any]:
        block = self._model.get_submodule(name)
        return [
            block.register_forward_pre_hook(self._enter_block(name)),
            block.register_forward_hook(self._leave_block(name), always_call=True),
        ]

    def _enter_block(self, name: str) -> Callable[..., None]:
        return lambda *_: self._running.append(name)

    def _leave_block(self, name: str) -> Callable[..., None]:
        return lambda *_: self._running.remove(name)
