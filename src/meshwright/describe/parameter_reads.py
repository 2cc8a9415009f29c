"""Which parameters a model reads, or asks for their shape, outside of the modules that hold them.

An axis that divides a layer gives its own forward what it needs. Anybody else who reads the layer's weight, or takes
its shape, would find one rank's part, so such a parameter has to stay whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from meshwright.describe.repeats import PassObserver
from meshwright.torch_private.trees import tree_leaves

_PROPERTIES = (
    "dtype device layout requires_grad ndim grad_fn is_leaf is_cpu is_cuda is_meta is_sparse is_quantized is_nested "
    "itemsize output_nr retains_grad _version"
)
_METHODS = (
    "dim ndimension is_floating_point is_complex is_signed is_inference get_device element_size requires_grad_ "
    "untyped_storage __hash__"
)
HARMLESS = {getattr(Tensor, name).__get__ for name in _PROPERTIES.split()} | {
    getattr(place, name) for name in _METHODS.split() for place in (torch, Tensor) if hasattr(place, name)
}
"""Functions that give the same of a part as of the whole."""


class Reads(TorchFunctionMode, PassObserver):
    """Notes every function that is called with a parameter while a module that does not hold it runs, or none does."""

    def __init__(self, model: nn.Module) -> None:
        """`model` has the parameters that it is going to run with."""
        super().__init__()
        self._model = model
        self._names: dict[int, list[str]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            self._names.setdefault(id(parameter), []).append(name)
        self._holders: dict[int, set[int]] = {}
        for module in model.modules():
            # Attention reads the weight of its out_proj and never calls it: the two are one operator.
            held = [module, module.out_proj] if isinstance(module, nn.MultiheadAttention) else [module]
            for parameter in (p for one in held for p in one._parameters.values() if p is not None):
                self._holders.setdefault(id(parameter), set()).add(id(module))
        self._running: list[int] = []
        self.elsewhere: set[str] = set()
        """Parameters that were read elsewhere, by all of their names."""

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Look on while the model runs."""
        hooks = []
        for module in self._model.modules():
            # The author's own hooks run outside of these two.
            hooks.append(module.register_forward_pre_hook(self._enter))
            hooks.append(module.register_forward_hook(self._leave, prepend=True, always_call=True))
        try:
            with self:
                yield
        finally:
            for hook in hooks:
                hook.remove()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in HARMLESS:
            self._note(args)
            self._note((kwargs or {}).values())
        return func(*args, **(kwargs or {}))

    def repeated(self, block: str, first: str) -> None:
        self.elsewhere |= {block + n.removeprefix(first) for n in self.elsewhere if n.startswith(f"{first}.")}

    def _note(self, values: Iterable[Any]) -> None:
        for value in values:
            if isinstance(value, list | tuple | dict):
                self._note(leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor))
            elif id(value) in self._holders and not self._is_with_holder(value):
                self.elsewhere.update(self._names[id(value)])

    def _is_with_holder(self, parameter: Tensor) -> bool:
        return bool(self._running) and self._running[-1] in self._holders[id(parameter)]

    def _enter(self, module: nn.Module, args: Any) -> None:
        self._running.append(id(module))

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        # Where a hook of the author's raised, its module was never entered.
        if id(module) in self._running:
            del self._running[len(self._running) - 1 - self._running[::-1].index(id(module)) :]
