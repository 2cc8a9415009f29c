"""Precision with the same meaning under every strategy.

Under `bf16` and `fp16` a model computes with parameters cast to that dtype. Floating inputs of the model and of each
block are cast too; buffers are not; the loss sees outputs in fp32. Operators that lose accuracy in 16 bits compute in
fp32 (`operator_dtypes.py`). Gradients are cast to fp32 before they are summed over micro-batches or ranks, and the
optimizer updates fp32 masters. FSDP2 and our ZeRO cast parameters themselves, so that they can send and keep the
16-bit ones; otherwise a step casts all of them first (`low_copies.py`). (`torch.autocast` depends on the strategy: a
transformer's residual stream is fp32 under DDP and bf16 under FSDP2. `bf16:autocast` selects it.)
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import torch
from torch import nn

from meshwright.assemble.autocast import Region, run_within
from meshwright.assemble.low_copies import ATTRIBUTE, NO_COPY, ReadCopies
from meshwright.assemble.operator_dtypes import computing_in
from meshwright.describe.dtypes import LOW
from meshwright.describe.observe import call_loss
from meshwright.facts.job import Job
from meshwright.facts.precision import FORMATS
from meshwright.facts.strategy import Strategy
from meshwright.recording.wrap_forward import Around, wrap_forward
from meshwright.torch_private.modes import without_torch_function
from meshwright.torch_private.modules import RNN_READS_ATTRIBUTES, BatchNorm
from meshwright.torch_private.tensors import version_of
from meshwright.torch_private.trees import tree_map


def apply_precision(
    model: nn.Module,
    blocks: list[nn.Module],
    dtype: torch.dtype,
    *,
    pure: bool,
    left_to_cast: Collection[str] | None = None,
    autocast: Region | None = None,
) -> None:
    """Compute in `dtype`. Parameters are cast for good if `pure`.

    If the data axis casts parameters itself, `left_to_cast` names the ones it does not; None means all. With `autocast`
    nothing is cast here, and the model runs inside that region.
    """
    if dtype == torch.float32:
        return
    if autocast is not None:
        run_within(model, blocks, autocast)
        return
    if pure:
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.data = parameter.data.to(dtype)
    else:
        cast_parameters(model, dtype, left_to_cast, blocks=blocks)
    batch_norm_in_fp32(model, dtype)
    cast_borders(model, blocks, dtype)


def cast_borders(model: nn.Module, blocks: list[nn.Module], dtype: torch.dtype) -> None:
    """Cast the inputs of the model and of each block to `dtype`, and make their operators follow the table.

    The caller casts the model's outputs. Blocks are wrapped as well, because recomputing calls them directly.
    """
    for block in blocks:
        wrap_forward(block, _entering(dtype))
    wrap_forward(model, _entering_model(dtype))


def follow_table(modules: Iterable[nn.Module], dtype: torch.dtype) -> None:
    """Make operators in modules that are called directly follow the table."""
    for module in modules:
        wrap_forward(module, _following(dtype))


def cast_parameters(
    model: nn.Module, dtype: torch.dtype, only: Collection[str] | None = None, *, blocks: Iterable[nn.Module] = ()
) -> None:
    """Make every read of a parameter return a copy in `dtype`; gradients flow back to the original.

    Each module gets a subclass of its class on which its parameters are properties. They return the step's copies
    while a step holds some (`low_copies.py`), which are made and cast back a block at a time. At other times a copy is
    made where the parameter is used.
    """
    block_of = {id(module): block for block in blocks for module in block.modules()}
    chosen = {id(p) for n, p in model.named_parameters() if p.is_floating_point() and (only is None or n in only)}
    for module in model.modules():
        names = tuple(n for n, p in module.named_parameters(recurse=False) if id(p) in chosen)
        if names and not isinstance(module, BatchNorm):
            module.__class__ = _reading_in(type(module), names, dtype)  # type: ignore[arg-type]  # hashable
            vars(module)[ATTRIBUTE] = ReadCopies(names, block_of.get(id(module)))


def batch_norm_in_fp32(model: nn.Module, dtype: torch.dtype) -> None:
    """Make BatchNorm compute with weights rounded to `dtype` but held in fp32, like the running statistics.

    Its kernels need one dtype for both. Properties would not work: FSDP2 must find its own parameters on the module.
    """
    for module in model.modules():
        if isinstance(module, BatchNorm):
            wrap_forward(module, _with_fp32_weights(dtype))


def loss_under(
    precision: str, job: Job, *, compiled: bool = False, autocast: Region | None = None
) -> Callable[[Any, Any], tuple[torch.Tensor, float | torch.Tensor]]:
    """The job's loss on outputs cast to fp32 if the model computes in less; with `autocast`, inside that region.

    The cast is part of the loss and not of the model, so that a compiled loss never writes the outputs in fp32: with a
    vocabulary of 50,000 they are the largest tensor of a step.
    """
    is_low = FORMATS[precision].is_low

    def loss(output: Any, batch: Any) -> tuple[torch.Tensor, float | torch.Tensor]:
        if autocast is not None:
            with autocast():
                return call_loss(job, output, batch)
        return call_loss(job, raise_small(output) if is_low else output, batch)

    return torch.compile(loss) if compiled else loss


def compiles_loss(strategy: Strategy) -> bool:
    """Whether the loss is compiled too. Inner axes run it by their rules; pieces have a kernel of their own."""
    return strategy.compile and not strategy.inner_axes and strategy.loss == "whole"


def cast(tree: Any, dtype: torch.dtype) -> Any:
    """Cast the floating tensors of a tree. Plain containers are quick: this runs in every call of a block."""
    kind = type(tree)
    if isinstance(tree, torch.Tensor):
        with without_torch_function():  # modes need not see who reads a dtype
            found = tree.dtype
        return tree if found == dtype or not found.is_floating_point else _cast_once(tree, dtype)
    if kind is tuple:
        return tuple([cast(item, dtype) for item in tree])
    if kind is dict:
        return {key: cast(item, dtype) for key, item in tree.items()}
    if tree is None or kind in (bool, int, float, str):
        return tree
    return tree_map(lambda leaf: cast(leaf, dtype) if torch.is_tensor(leaf) else leaf, tree)


Casts = dict[tuple[int, torch.dtype], tuple[torch.Tensor, int, torch.Tensor, int]]
"""By a tensor's identity and the dtype it was cast to: the tensor and its version, the copy and its version."""
_casts: ContextVar[Casts | None] = ContextVar("casts", default=None)
"""What the running model has cast."""
_shared: ContextVar[bool] = ContextVar("shared_casts", default=True)


@contextmanager
def separate_casts() -> Iterator[None]:
    """Region in which each block casts for itself, as blocks on different ranks do."""
    token = _shared.set(False)
    try:
        yield
    finally:
        _shared.reset(token)


def _cast_once(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Cast a tensor, once for all blocks of a call: each of them gets the same positions and masks.

    A tensor with a gradient is cast each time, because autograd would sum the gradients in the smaller dtype.
    """
    known = None if torch.compiler.is_compiling() else _casts.get()
    if known is None:
        return x.to(dtype)
    with without_torch_function():
        if x.requires_grad or x.is_inference():
            known = None
        else:
            source, version, copy, copy_version = known.get((id(x), dtype), (None, 0, x, 0))
            if source is x and version_of(x) == version and version_of(copy) == copy_version:
                return copy
    copy = x.to(dtype)
    if known is not None:
        with without_torch_function():
            known[id(x), dtype] = x, version_of(x), copy, version_of(copy)
    return copy


def raise_small(tree: Any) -> Any:
    return tree_map(lambda leaf: leaf.float() if torch.is_tensor(leaf) and leaf.dtype in LOW else leaf, tree)


@cache
def _entering(dtype: torch.dtype) -> Around:
    def enter(module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        args, kwargs = cast((args, kwargs), dtype)
        with computing_in(dtype):
            return forward(*args, **kwargs)

    return enter


@cache
def _entering_model(dtype: torch.dtype) -> Around:
    inside = _entering(dtype)

    def enter(module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return inside(module, forward, args, kwargs)
        token = _casts.set({} if _shared.get() else None)
        try:
            return inside(module, forward, args, kwargs)
        finally:
            _casts.reset(token)

    return enter


@cache
def _following(dtype: torch.dtype) -> Around:
    def follow(module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        with computing_in(dtype):
            return forward(*args, **kwargs)

    return follow


@cache
def _with_fp32_weights(dtype: torch.dtype) -> Around:
    def normalise(module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        originals = {name: p for name, p in module._parameters.items() if p is not None}
        for name, parameter in originals.items():
            module._parameters[name] = parameter.to(dtype).float()  # type: ignore[assignment]  # for this call
        try:
            return forward(*args, **kwargs)
        finally:
            module._parameters.update(originals)

    return normalise


@lru_cache(maxsize=256)
def _reading_in(cls: Any, names: tuple[str, ...], dtype: torch.dtype) -> type[nn.Module]:
    """A subclass of `cls` on which reading one of `names` gives a copy in `dtype`. Equal modules share one subclass."""
    members: dict[str, Any] = {name: property(_reader(name, dtype)) for name in names}
    if issubclass(cls, nn.RNNBase):
        # It also keeps a list of its parameters; build the list from the properties instead.
        members |= RNN_READS_ATTRIBUTES
    members |= {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    return type(cls.__name__, (cls,), members)


def _reader(name: str, dtype: torch.dtype) -> Callable[[nn.Module], torch.Tensor]:
    def read(self: nn.Module) -> torch.Tensor:
        parameter: torch.Tensor = self._parameters[name]  # type: ignore[assignment]  # it is there, else not in names
        original, copy = self.__dict__[ATTRIBUTE].get(name, NO_COPY)
        # A data strategy, an inner axis or `functional_call` may have put another tensor in its place for a call.
        return copy if original is parameter else parameter.to(dtype)

    return read


@dataclass
class LossScale:
    """The factor that keeps fp16 gradients from underflowing; a step whose gradients overflow is skipped.

    The global gradient norm is the same on every rank, so all ranks skip the same steps. The constants are those of
    `torch.amp.GradScaler`.
    """

    value: float = 65536.0
    growth: float = 2.0
    interval: int = 2000
    steps_since: int = 0

    def after(self, finite: bool) -> None:
        """Adapt the scale: halve it after an overflow, double it after `interval` finite steps."""
        self.steps_since = self.steps_since + 1 if finite else 0
        if not finite:
            self.value /= self.growth
        elif self.steps_since == self.interval:
            self.value, self.steps_since = self.value * self.growth, 0
