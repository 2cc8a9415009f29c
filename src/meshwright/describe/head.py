"""Find the output layer: the linear layer whose result a cross entropy reads."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from meshwright.facts.model import HeadFacts
from meshwright.pieced_loss.head import PRODUCTS
from meshwright.pieced_loss.logits import ON_SHAPE
from meshwright.pieced_loss.recorded import Form, functions, next_form
from meshwright.torch_private.trees import tree_leaves

_TRANSPOSED = frozenset(functions("t transpose swapaxes swapdims permute")) | {Tensor.T.__get__, Tensor.mT.__get__}  # type: ignore[attr-defined]


_REDUCED = frozenset(functions("logsumexp argmax"))
"""Functions besides the losses that run in pieces."""


@dataclass
class _Layer:
    """A call of a linear layer."""

    weight: str
    module: str
    shape: tuple[int, int]
    rows: int
    is_head: bool = False
    needed_by: set[str] = field(default_factory=set)


class HeadWatch(TorchFunctionMode):
    """Follows results of linear layers through functions that a pieced loss can put off, up to the loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._model = model
        self._calls: list[_Layer] = []

    def __enter__(self) -> HeadWatch:
        # Anew for each pass, with the tensors that the model has now.
        self._calls, self._running = [], [""]
        self._weights = {id(p): (name, p) for name, p in self._model.named_parameters() if p.dim() == 2}
        self._transposed: dict[int, tuple[Tensor, Tensor]] = {}
        self._seen: dict[int, tuple[Tensor, Form, _Layer]] = {}
        self._hooks = [hook for name, module in self._model.named_modules() for hook in self._watch(name, module)]
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for hook in self._hooks:
            hook.remove()
        self._weights, self._transposed, self._seen = {}, {}, {}

    def _watch(self, name: str, module: nn.Module) -> list[Any]:
        return [
            module.register_forward_pre_hook(lambda *_: self._running.append(name)),
            module.register_forward_hook(lambda *_: self._leave(name), always_call=True, prepend=True),
        ]

    def _leave(self, name: str) -> None:
        if name in self._running[1:]:
            del self._running[len(self._running) - 1 - self._running[::-1].index(name) :]

    @property
    def head(self) -> HeadFacts | None:
        """The largest layer that a loss reads."""
        heads = [call for call in self._calls if call.is_head]
        if not heads:
            return None
        found = max(heads, key=lambda call: call.rows * call.shape[0])
        needed = sorted({name for call in heads if call.weight == found.weight for name in call.needed_by})
        classes, width = found.shape
        return HeadFacts(
            weight=found.weight, module=found.module, classes=classes, width=width, needed_by=tuple(needed)
        )

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func in ON_SHAPE:
            return result
        if func is F.linear or func in PRODUCTS:
            self._note_layer(func, args, result)
        elif func in _TRANSPOSED and id(args[0]) in self._weights:
            self._transposed[id(result)] = result, args[0]
        self._follow(func, args, kwargs, result)
        return result

    def _note_layer(self, func: Any, args: Any, result: Tensor) -> None:
        hidden, weight = args[0], args[1] if len(args) > 1 else None
        if func in PRODUCTS:
            weight = self._transposed.get(id(weight), (None, None))[1]
        if id(weight) not in self._weights or hidden.dim() < 2:
            return
        name, shape = self._weights[id(weight)][0], tuple(weight.shape)  # type: ignore[union-attr]
        call = _Layer(name, self._running[-1], shape, prod(hidden.shape[:-1]))
        self._calls.append(call)
        self._seen[id(result)] = result, Form(shape=tuple(result.shape), dtype=result.dtype), call

    def _follow(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        for place, leaf in enumerate(tree_leaves((args, kwargs))):
            if id(leaf) not in self._seen:
                continue
            tensor, form, call = self._seen[id(leaf)]
            following = form if func is Tensor.detach else None
            if place == 0 and following is None:
                following = next_form(form, tensor.device, func, args[1:], kwargs)
            if place == 0 and func in _REDUCED:
                continue
            if place == 0 and func in (F.cross_entropy, F.nll_loss) and _reads_classes(form, args, kwargs):
                call.is_head = True
            elif following is not None and isinstance(result, Tensor):
                self._seen[id(result)] = result, following, call
            elif id(result) not in self._seen:
                call.needed_by.add(getattr(func, "__name__", str(func)))


def _reads_classes(form: Form, args: Any, kwargs: Any) -> bool:
    target = args[1] if len(args) > 1 else kwargs.get("target")
    indices = isinstance(target, Tensor) and not target.is_floating_point()
    return indices and (form.classes_second or len(form.shape) == 2)
