"""Logits that do not exist: a tensor with a shape and no memory, in place of an output layer's result.

It is a node of autograd's graph like any other result, so hooks on it run and functions that do not know it get the
right gradient. Recorded functions give other `Logits`; losses run in pieces; any other function gets real logits.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from meshwright.errors import JobError
from meshwright.pieced_loss.gradient import PiecedGradient, Share, Whole, shares_of
from meshwright.pieced_loss.losses import ClassPart, Gradient
from meshwright.pieced_loss.recorded import Form, functions, next_form
from meshwright.pieced_loss.rows import Operands
from meshwright.torch_private.modes import without_tensor_classes, without_torch_function
from meshwright.torch_private.operators import schema_of
from meshwright.torch_private.tensors import TensorBase, make_wrapper, version_of
from meshwright.torch_private.trees import tree_map

Losses = dict[Any, Callable[..., Any]]
"""By a function of PyTorch: computes it from `Logits` in pieces, or returns NotImplemented."""
LOSSES: Losses = {}

_SHAPES = functions(
    "size dim ndimension numel nelement element_size stride is_contiguous is_floating_point is_complex is_signed "
    "get_device storage_offset requires_grad_ retain_grad register_hook __len__ __hash__ __dir__ is_inference "
    "is_tensor is_same_size has_names _is_view is_set_to is_neg is_conj register_post_accumulate_grad_hook"
)
_VALUES = ("T", "mT", "H", "mH", "data", "real", "imag")
"""Properties that read values; the others do not."""
_PROPERTIES = [
    found.__get__
    for place in (TensorBase, Tensor)
    for name, found in vars(place).items()
    if name not in _VALUES and hasattr(found, "__set__") and hasattr(found, "__get__")
]
ON_SHAPE = {*_SHAPES, *_PROPERTIES}
ON_SHAPE |= {getattr(Tensor, n).__set__ for n in ("requires_grad", "_backward_hooks")}
"""Functions that need no values."""


@dataclass(eq=False)
class Source:
    """The output layer's call that `Logits` stand for, shared by all that were derived from them."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    part: ClassPart | None = None
    """Which classes `weight` has, if ranks divide them."""
    join: Callable[[Tensor], Tensor] = lambda logits: logits
    """From this rank's part of the logits to what the layer would return."""
    region: Callable[[], AbstractContextManager[Any]] = nullcontext
    """Context in which functions handle the joined logits."""
    gradient: Gradient | None = None
    """A compiled kernel for the loss of a piece."""
    changed: bool = False
    """Whether the real logits were changed in place, so that pieces would be wrong."""
    needed_by: Counter[str] = field(default_factory=Counter)
    """Functions that needed the real logits."""
    derived: weakref.WeakSet[Logits] = field(default_factory=weakref.WeakSet)

    def __post_init__(self) -> None:
        self._version = None if self.hidden.is_inference() else version_of(self.hidden)

    @property
    def shape(self) -> tuple[int, ...]:
        return *self.hidden.shape[:-1], len(self.weight) * (self.part.ranks if self.part else 1)

    def operands(self) -> Operands:
        """The layer's operands, if they are still what they were in the call."""
        if self._version is not None and version_of(self.hidden) != self._version:
            raise JobError(
                "The model changed the input of its output layer in place before the loss was computed, which "
                "loss=pieced reads then; drop loss=pieced, or do not change it in place."
            )
        if not self.weight.untyped_storage().size() and self.weight.numel() and self.weight.device.type != "meta":
            raise JobError("The loss runs when the output layer's weight is no longer gathered; drop loss=pieced.")
        return Operands(rows=self.hidden.detach(), weight=self.weight.detach(), bias=self._bias(), part=self.part)

    def refuse_changed(self) -> None:
        if any(logits.was_changed() for logits in self.derived):
            raise JobError(
                "The model changes a part of its logits in place, and a loss in pieces would be computed without that "
                "change; drop loss=pieced, or change the logits themselves, as in logits[..., i:] = value."
            )

    def _bias(self) -> Tensor | None:
        return None if self.bias is None else self.bias.detach()


class Logits(Tensor):
    """The result of an output layer, or of recorded functions of it."""

    source: Source
    form: Form
    _make_real: Callable[[], Tensor] | None
    _real: Tensor | None
    _version_made: int | None

    @staticmethod
    def make(source: Source, form: Form, make_real: Callable[[], Tensor] | None = None) -> Logits:
        found: Logits = make_wrapper(Logits, form.shape, dtype=form.dtype, device=source.hidden.device)
        found.source, found.form, found._real, found._make_real = source, form, None, make_real
        source.derived.add(found)
        return found

    def computed(self) -> Tensor:
        """The logits themselves, computed once."""
        if self._real is None:
            with torch.enable_grad():  # a later caller may need the gradient that this one does not
                self._real = self._make_real() if self._make_real else self.source.join(_Real.apply(self))
            self._version_made = version_of(self._real) if not self._real.is_inference() else None
        return self._real

    def was_changed(self) -> bool:
        """Whether the real logits were changed in place, by a view that nobody followed."""
        return self._real is not None and self._version_made not in (None, version_of(self._real))

    def __repr__(self, **options: Any) -> str:  # type: ignore[override]
        return f"Logits(shape={self.form.shape}, dtype={self.form.dtype})"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in ON_SHAPE:
            with without_tensor_classes():
                return func(*args, **kwargs)
        given = args[0] if args and isinstance(args[0], Logits) else kwargs.get("input")
        if isinstance(given, Logits) and not given.source.changed:
            given.source.refuse_changed()
            found = _without_values(given, func, args, kwargs)
            if found is not NotImplemented:
                return found
        return _on_real(func, args, kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Operators that no torch function announced: autograd's node is there, so values suffice."""
        if schema_of(func).is_mutable:
            raise JobError(f"{func} changes logits in place, which loss=pieced does not follow; drop loss=pieced.")
        args, kwargs = tree_map(lambda leaf: _value(leaf) if isinstance(leaf, Logits) else leaf, (args, kwargs or {}))
        return func(*args, **kwargs)


def defer(source: Source) -> Logits:
    """The result of an output layer, without computing it."""
    found: Logits = _Layer.apply(source.hidden, source.weight, source.bias, source)
    return found


def _value(logits: Logits) -> Tensor:
    with torch.no_grad():
        return logits.computed().detach()


def _without_values(given: Logits, func: Any, args: Any, kwargs: Any) -> Any:
    if (loss := LOSSES.get(func)) is not None:
        return loss(*args, **kwargs)
    if func is Tensor.detach:
        return Logits.make(given.source, given.form, lambda: given.computed().detach())
    rest = args[1:] if args and args[0] is given else args
    rest_kwargs = {key: value for key, value in kwargs.items() if value is not given}
    form = next_form(given.form, given.source.hidden.device, func, rest, rest_kwargs)
    if form is None or (form.whole_rows and given.source.part is not None):
        return NotImplemented
    return _Recorded.apply(given, form, lambda logits: func(logits, *rest, **rest_kwargs))


def _on_real(func: Any, args: Any, kwargs: Any) -> Any:
    found: list[Logits] = []

    def real(leaf: Any) -> Any:
        if not isinstance(leaf, Logits):
            return leaf
        found.append(leaf)
        return leaf.computed()

    name = getattr(func, "__name__", str(func))
    with _region(args, kwargs):
        real_args, real_kwargs = tree_map(real, (args, kwargs))
        for logits in found:
            logits.source.needed_by[name] += 1
            if _changes(name, kwargs):
                _settle(logits.source)
        return func(*real_args, **real_kwargs)


def _region(args: Any, kwargs: Any) -> AbstractContextManager[Any]:
    found: list[Logits] = []
    tree_map(lambda leaf: found.append(leaf) if isinstance(leaf, Logits) else None, (args, kwargs))
    return found[0].source.region() if found else nullcontext()


def _changes(name: str, kwargs: dict[str, Any]) -> bool:
    """Whether a function may change its input in place."""
    in_place = name.endswith("_") and not name.startswith("__")
    operator = name.startswith("__i") and name not in ("__int__", "__index__", "__invert__")
    return in_place or operator or name in ("__setitem__", "__set__") or "out" in kwargs or bool(kwargs.get("inplace"))


def _settle(source: Source) -> None:
    """Compute all that was derived before the logits change in place."""
    source.changed = True
    for logits in list(source.derived):
        logits.computed()


class _Layer(torch.autograd.Function):
    """The output layer: its operands' gradients come from the shares that its gradient carries."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, source: Source) -> Logits:
        ctx.save_for_backward(hidden, weight, bias)
        ctx.part = source.part
        return Logits.make(source, Form(shape=source.shape, dtype=hidden.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        hidden, weight, bias = ctx.saved_tensors
        operands, needs = Operands(rows=hidden, weight=weight, bias=bias, part=ctx.part), ctx.needs_input_grad[:3]
        with without_torch_function():
            found = [share.gradients(operands, needs) for share in shares_of(gradient)]
            total = [_added([getattr(one, name) for one in found]) for name in ("rows", "weight", "bias")]
        return *(each if need else None for each, need in zip(total, needs, strict=True)), None  # type: ignore[return-value]


def _added(gradients: list[Tensor | None]) -> Tensor | None:
    present = [gradient for gradient in gradients if gradient is not None]
    return sum(present[1:], start=present[0]) if present else None


class _Recorded(torch.autograd.Function):
    """A function of logits that waits."""

    @staticmethod
    def forward(ctx: Any, given: Logits, form: Form, run: Callable[[Tensor], Tensor]) -> Logits:
        ctx.given, ctx.run = given, run
        return Logits.make(given.source, form, lambda: run(given.computed()))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        # Other shares are gradients of the layer's operands already.
        shares = (Whole(_back(ctx, s.change)) if isinstance(s, Whole) else s for s in shares_of(gradient))
        return pieced_gradient(like(ctx.given), *shares), None, None


def _back(ctx: Any, gradient: Tensor) -> Tensor:
    """The gradient of a recorded function's input from that of its result, which an autograd function computed."""
    given: Logits = ctx.given
    if given.source.part is not None:
        raise JobError("An autograd function reads logits that ranks divide, besides the loss; drop loss=pieced.")
    with torch.enable_grad():
        leaf = given.computed().detach().requires_grad_()
        return torch.autograd.grad(ctx.run(leaf), leaf, gradient)[0]


class _Real(torch.autograd.Function):
    """The values of an output layer's result, on this rank."""

    @staticmethod
    def forward(ctx: Any, logits: Logits) -> Tensor:
        ctx.like = like(logits)
        operands = logits.source.operands()
        found = operands.rows.new_empty(*operands.rows.shape[:-1], len(operands.weight))
        rows, out = operands.rows.flatten(0, -2), found.flatten(0, -2)
        # Not `F.linear`: it may return a view, which a model could not change in place.
        if operands.bias is None:
            torch.mm(rows, operands.weight.t(), out=out)
        else:
            torch.addmm(operands.bias, rows, operands.weight.t(), out=out)
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return pieced_gradient(ctx.like, Whole(gradient))


Like = tuple[tuple[int, ...], torch.dtype, torch.device]
"""Shape, dtype and device of a gradient."""


def like(logits: Logits) -> Like:
    return logits.form.shape, logits.form.dtype, logits.source.hidden.device


def pieced_gradient(of: Like, *shares: Share) -> PiecedGradient:
    return PiecedGradient.like(*of, shares=shares)
