"""Find parameters that a model reads, or whose shape it reads, outside the modules or blocks that own them.

An axis that divides a layer replaces the layer's forward. Other code that reads the layer's weight or its shape would
find one rank's part, so such a parameter has to stay whole. FSDP gathers a block's parameters around the block's
`forward`. A model that calls a part of a block directly, or uses a block's weight in a function, would find a shard.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from meshwright.describe.repeats import PassObserver
from meshwright.facts.model import unit_of
from meshwright.recording.memory import names_of_parameters
from meshwright.recording.wrap_forward import removing
from meshwright.torch_private.modes import TorchDispatchMode, without_torch_function
from meshwright.torch_private.operators import DEVICE_OF
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
"""Functions that return the same for a part as for the whole."""


class Reads(TorchFunctionMode, PassObserver):
    """Notes parameters that are used in a function while no module that owns them is the innermost running one."""

    def __init__(self, model: nn.Module) -> None:
        """`model` must already have the parameters that it will run with."""
        super().__init__()
        self._model = model
        self._names = names_of_parameters(model)
        self._holders: dict[int, set[int]] = {}
        for module in model.modules():
            # Attention reads the weight of its out_proj without calling it: the two count as one module.
            held = [module, module.out_proj] if isinstance(module, nn.MultiheadAttention) else [module]
            for parameter in (p for one in held for p in one._parameters.values() if p is not None):
                self._holders.setdefault(id(parameter), set()).add(id(module))
        self._running: list[int] = []
        self.elsewhere: set[str] = set()
        """All names of the parameters that were read elsewhere."""

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Watch the model while the context is active."""
        hooks = []
        for module in self._model.modules():
            # The author's hooks run outside these two.
            hooks.append(module.register_forward_pre_hook(self._enter))
            hooks.append(module.register_forward_hook(self._leave, prepend=True, always_call=True))
        with removing(hooks), self:
            yield

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
            elif id(value) in self._holders and not self._holders[id(value)].intersection(self._running[-1:]):
                self.elsewhere.update(self._names[id(value)])

    def _enter(self, module: nn.Module, args: Any) -> None:
        self._running.append(id(module))

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        # If one of the author's hooks raised, the module was never entered.
        if id(module) in self._running:
            del self._running[len(self._running) - 1 - self._running[::-1].index(id(module)) :]


def pass_on(func: Any, args: Any, kwargs: Any) -> Any:
    """Call an operator inside a dispatch mode.

    Fake tensors read their device by an operator, which a function mode would mistake for a call of the author's code.
    """
    if func is DEVICE_OF:
        with without_torch_function():
            return func(*args, **(kwargs or {}))
    return func(*args, **(kwargs or {}))


class OutsideReads(TorchDispatchMode):
    """Notes which parameters of shard units are read outside their units."""

    def __init__(self, model: nn.Module, units: Collection[str]) -> None:
        super().__init__()
        self._model, self._units = model, units
        self.found: dict[str, str] = {}
        """By parameter, the unit that owns it."""

    def __enter__(self) -> OutsideReads:
        self.found.clear()  # a failed pass may have come before
        self._running: list[str] = []
        self._owners: dict[int, tuple[str, str]] = {}
        for name, parameter in self._model.named_parameters():
            if owner := unit_of(name, self._units):
                self._owners[id(parameter)] = name, owner
        self._hooks = []
        for name in self._units:
            unit = self._model.get_submodule(name)
            self._hooks += [
                unit.register_forward_pre_hook(lambda *_, name=name: self._running.append(name)),
                unit.register_forward_hook(lambda *_, name=name: self._running.remove(name), always_call=True),
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
                name, unit = self._owners[id(leaf)]
                if unit not in self._running:
                    self.found[name] = unit
        return pass_on(func, args, kwargs)
