"""Functions of logits that keep the classes of a row together, so that they can wait until a piece is computed.

Each is recorded as a change of the rows (a view or a selection of leading dims), or as a change of the values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.torch_private.operators import FUNCTIONS

OnTensor = Callable[[Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class Form:
    """How some logits follow from the layer's output: a shape, a dtype, and what was recorded."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    classes_second: bool = False
    """Whether the classes are in dim 1 of 3, as cross entropy takes them, and not in the last dim."""
    rows: tuple[OnTensor, ...] = ()
    """Changes of the hidden states."""
    values: tuple[OnTensor, ...] = ()
    """Changes of the logits of any rows."""
    widens: bool = True
    """Whether the changes of the values are only casts to wider dtypes."""
    whole_rows: bool = False
    """Whether a change of the values needs all classes of a row."""

    @property
    def classes(self) -> int:
        return self.shape[1 if self.classes_second else -1]

    def to_rows(self, hidden: Tensor) -> Tensor:
        for change in self.rows:
            hidden = change(hidden)
        return hidden

    def to_values(self, logits: Tensor) -> Tensor:
        for change in self.values:
            logits = change(logits)
        return logits


Rule = Callable[[Form, torch.device, Any, tuple[Any, ...], dict[str, Any]], Form | None]


def next_form(
    form: Form, device: torch.device, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Form | None:
    """The form of `func(logits, *args, **kwargs)`; None if the function cannot wait."""
    rule = RULES.get(func)
    try:
        return rule(form, device, func, args, kwargs) if rule is not None else None
    except (TypeError, ValueError, IndexError):
        return None  # the function itself will say what is wrong with its arguments


def _with_rows(form: Form, shape: tuple[int, ...], change: OnTensor) -> Form | None:
    if len(shape) < 2 or shape[-1] != form.classes:
        return None
    return replace(form, shape=shape, rows=(*form.rows, change))


def _reshape(form: Form, device: torch.device, func: Any, args: Any, kwargs: Any) -> Form | None:
    sizes = args[0] if len(args) == 1 and isinstance(args[0], (tuple, list)) else args
    sizes = tuple(kwargs.get("shape", kwargs.get("size", sizes)))
    if form.classes_second or not all(isinstance(size, int) for size in sizes):
        return None
    known = prod(size for size in sizes if size != -1)
    shape = tuple(prod(form.shape) // known if size == -1 else size for size in sizes)
    return _leading(form, shape) if prod(shape) == prod(form.shape) else None


def _leading(form: Form, shape: tuple[int, ...]) -> Form | None:
    return _with_rows(form, shape, lambda hidden: hidden.reshape(*shape[:-1], hidden.shape[-1]))


def _flatten(form: Form, device: torch.device, func: Any, args: Any, kwargs: Any) -> Form | None:
    dims = len(form.shape)
    first = (args[0] if args else kwargs.get("start_dim", 0)) % dims
    last = (args[1] if len(args) > 1 else kwargs.get("end_dim", -1)) % dims
    if form.classes_second or last == dims - 1 != first:
        return None
    return _leading(form, (*form.shape[:first], prod(form.shape[first : last + 1]), *form.shape[last + 1 :]))


def _index(form: Form, device: torch.device, func: Any, args: Any, kwargs: Any) -> Form | None:
    index = args[0] if isinstance(args[0], tuple) else (args[0],)
    if form.classes_second or not _leaves_classes(index, len(form.shape)):
        return None
    tensors = any(isinstance(one, Tensor) for one in index)
    if any(isinstance(one, Tensor) and one.device != device for one in index) or any(map(_is_list, index)):
        return None
    model = torch.empty(0, device="cpu" if not tensors else device).expand(*form.shape[:-1], 0)
    shape = (*model[index].shape[:-1], form.classes)
    return _with_rows(form, shape, lambda hidden: hidden[index])


def _is_list(one: Any) -> bool:
    return not (one is None or one is Ellipsis or isinstance(one, (int, slice, Tensor)))


def _leaves_classes(index: tuple[Any, ...], dims: int) -> bool:
    """Whether an index selects all classes, in the last dim."""
    places = [i for i, one in enumerate(index) if one is Ellipsis]
    taken = sum(one.dim() if isinstance(one, Tensor) and one.dtype == torch.bool else one is not None for one in index)
    taken -= len(places)
    if places and places[0] == len(index) - 1:
        return taken < dims
    if not places and taken < dims:
        return True
    last = index[-1]
    return isinstance(last, slice) and last == slice(None)


def _transpose(form: Form, device: torch.device, func: Any, args: Any, kwargs: Any) -> Form | None:
    """Classes from the last dim of three to the second, or back."""
    dims = args if args else (kwargs["dim0"], kwargs["dim1"])
    if len(form.shape) != 3 or {dim % 3 for dim in dims} != {1, 2}:
        return None
    first, second, third = form.shape
    return replace(form, shape=(first, third, second), classes_second=not form.classes_second)


def _permute(form: Form, device: torch.device, func: Any, args: Any, kwargs: Any) -> Form | None:
    dims = args[0] if len(args) == 1 else args
    dims = tuple(dim % len(form.shape) for dim in kwargs.get("dims", dims))
    return _transpose(form, device, func, (1, 2), {}) if dims == (0, 2, 1) else None


def _same(form: Form, device: torch.device, func: Any, args: Any, kwargs: Any) -> Form | None:
    return None if args or kwargs else form


def _convert(form: Form, device: torch.device, func: Any, args: Any, kwargs: Any) -> Form | None:
    """A cast; or a move to the device where the logits are."""
    names = [*args, *(kwargs[key] for key in ("dtype", "device") if key in kwargs)]
    if set(kwargs) - {"dtype", "device", "non_blocking"} or any(isinstance(one, bool) for one in args):
        return None
    dtype = _CASTS.get(func, form.dtype)
    for one in names:
        if isinstance(one, torch.dtype):
            dtype = one
        elif isinstance(one, Tensor) and one.device == device:
            dtype = one.dtype
        elif not isinstance(one, (str, torch.device)) or _placed(torch.device(one)) != _placed(device):
            return None
    if dtype == form.dtype:
        return form
    widens = form.widens and torch.promote_types(dtype, form.dtype) == dtype
    return replace(form, dtype=dtype, values=(*form.values, lambda logits: logits.to(dtype)), widens=widens)


def _placed(device: torch.device) -> tuple[str, int]:
    return device.type, device.index or 0


def _elementwise(form: Form, device: torch.device, func: Any, args: Any, kwargs: Any) -> Form | None:
    """With numbers as its other arguments."""
    if not all(isinstance(one, (int, float)) for one in (*args, *kwargs.values())):
        return None
    return replace(form, values=(*form.values, lambda logits: func(logits, *args, **kwargs)), widens=False)


def _along_classes(form: Form, device: torch.device, func: Any, args: Any, kwargs: Any) -> Form | None:
    dim = kwargs.get("dim", args[0] if args else None)
    dtype = kwargs.get("dtype", next((one for one in args[1:] if isinstance(one, torch.dtype)), None))
    if form.classes_second or dim is None or dim % len(form.shape) != len(form.shape) - 1:
        return None
    change = partial(func, dim=-1, dtype=dtype)
    return replace(form, dtype=dtype or form.dtype, values=(*form.values, change), widens=False, whole_rows=True)


_PLACES = (torch, Tensor, F, FUNCTIONS)


def functions(names: str) -> Iterator[Any]:
    """PyTorch's functions of these names, in all of its namespaces."""
    yield from (func for name in names.split() for place in _PLACES if callable(func := getattr(place, name, None)))


_CASTS = {Tensor.float: torch.float32, Tensor.double: torch.float64}
_CASTS |= {Tensor.half: torch.float16, Tensor.bfloat16: torch.bfloat16}
_TABLE: list[tuple[Rule, str]] = [
    (_reshape, "view reshape"),
    (_flatten, "flatten"),
    (_index, "__getitem__"),
    (_transpose, "transpose swapaxes swapdims"),
    (_permute, "permute"),
    (_same, "contiguous clone"),
    (_convert, "to float double half bfloat16 type_as"),
    (
        _elementwise,
        "mul multiply div divide true_divide __mul__ __rmul__ __truediv__ __div__ neg negative __neg__ tanh",
    ),
    (_elementwise, "add sub __add__ __radd__ __sub__"),
    (_along_classes, "log_softmax"),
]
RULES: dict[Any, Rule] = {func: rule for rule, names in _TABLE for func in functions(names)}
