"""Give fake tensors values where a model reads them, so that it runs without its weights.

A model may read a number out of a tensor (`item`, `if mask.any()`), make a shape of values (`x[mask]`, `nonzero`), or
go through numpy. Fake tensors have no values. While `known_values` is active, small tensors have some beside them: the
samples, what is computed from them, random numbers and constants. Large tensors have none, and nor has what weights
decide, such as a router's scores. If such a tensor is read, its values are made up, once. Every read is noted with the
line of the author's code, because a forecast then holds for those values only.

The mode also helps where a fake kernel refuses what the real one accepts: it runs the operator in bf16, or for real.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from meshwright.describe.dtypes import HALF
from meshwright.describe.flops import ALLOCATIONS
from meshwright.describe.read_values import ReadValues, ValuesUnknown
from meshwright.errors import one_line
from meshwright.recording.operation import changed_by
from meshwright.recording.report_as_cpu import change_leaves, tensors_in
from meshwright.torch_private.autograd import backward_id
from meshwright.torch_private.fake_tensors import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
)
from meshwright.torch_private.modes import TorchDispatchMode, outside_of_modes
from meshwright.torch_private.operators import PACK_PADDED_SEQUENCE, PAD_PACKED_SEQUENCE, flop_registry, schema_of
from meshwright.torch_private.tensors import storage_id

aten = torch.ops.aten
FLOATS, INTEGERS = 1 << 16, 1 << 24
"""The most elements of a tensor that is computed beside a fake one: of floats, and of integers and bools."""
EVALUATED = 1 << 27
"""The most elements of all tensors of an operator that runs for real."""
MEMORY_READS = {torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__}
"""Functions that read a tensor's memory without an operator."""
_OVERWRITES = frozenset(("copy_", "fill_", "zero_", "normal_", "uniform_", "random_", "bernoulli_", "exponential_"))
_VALUE = "meshwright_value"


@dataclass(frozen=True)
class _Value:
    """What a fake tensor holds."""

    real: torch.Tensor
    guessed: bool
    """Whether it depends on values that were made up."""


@contextmanager
def known_values(reads: ReadValues, *, draws: bool = False) -> Iterator[None]:
    """Inside a fake tensor mode: run models that read values. With `draws`, single random numbers are really drawn."""
    mode = _KnownValues(reads, draws=draws)
    with _MemoryReads(mode), mode:
        yield


def set_value(tensor: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
    """Give a fake tensor known values. Returns the fake tensor. A model may change values in place, so small ones are
    copied; large ones, such as expanded samples, are not kept."""
    if real.numel() <= INTEGERS:
        with outside_of_modes():
            setattr(tensor, _VALUE, _Value(real.detach().cpu().clone(), guessed=False))
    return tensor


def copy_value(tensor: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Give a fake tensor the known values of another one. Returns the fake tensor."""
    value: _Value | None = getattr(other, _VALUE, None)
    return set_value(tensor, value.real) if value else tensor


class _MemoryReads(TorchFunctionMode):
    """Reads the memory of fake tensors, which no operator shows."""

    recorded_as = "known values"  # a block that reads none runs the same program with this mode as without it

    def __init__(self, mode: _KnownValues) -> None:
        super().__init__()
        self._mode = mode

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in MEMORY_READS and isinstance(args[0], FakeTensor):
            return self._mode.read(args[0], lambda value: func(value, *args[1:], **(kwargs or {})))
        if func is torch.Tensor.__format__ and isinstance(args[0], FakeTensor) and not args[0].dim():
            return self._mode.read(args[0], lambda value: format(value.item(), *args[1:]))
        if getattr(func, "__name__", "") == PAD_PACKED_SEQUENCE.__name__ and isinstance(args[0], FakeTensor):
            return _padded(*args)
        return func(*args, **(kwargs or {}))


class _KnownValues(TorchDispatchMode):
    def __init__(self, reads: ReadValues, *, draws: bool) -> None:
        super().__init__()
        self._reads, self._draws = reads, draws
        self._generator = torch.Generator()  # the model's own random numbers do not change
        self._holders: dict[int, list[weakref.ref[torch.Tensor]]] = {}
        """By their storage, the tensors with values: a change of one changes its views and what it is a view of."""

    def read(self, tensor: torch.Tensor, look: Callable[[torch.Tensor], Any]) -> Any:
        """What `look` finds in a tensor's values."""
        value = self._value(tensor) or self._make_up(tensor)
        self._reads.note(value.guessed)
        with outside_of_modes():
            return look(value.real.detach())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        try:
            found = func(*args, **kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException):
            return self._evaluate(func, args, kwargs)
        except (RuntimeError, NotImplementedError, TypeError, ValueError, AssertionError) as error:
            return self._replace(func, args, kwargs, error)
        if made := tensors_in(found):
            self._follow(func, args, kwargs, found, made)
        return found

    def _follow(self, func: Any, args: Any, kwargs: Any, found: Any, made: list[torch.Tensor]) -> None:
        """Compute the results' values too, if they are small or decide something."""
        changed = changed_by(func, args, kwargs)
        given = tensors_in((args, kwargs))
        if not given and _is_constant(func) and made[0].numel() > FLOATS:
            with outside_of_modes():
                real = _single(func, args, made[0].dtype).expand(made[0].shape)
            self._hold(made[0], _Value(real, guessed=False))
            return
        if not self._worth(func, given, made) or not all(isinstance(tensor, FakeTensor) for tensor in changed):
            self._forget(changed)
            self._follow_repeated(func, args, kwargs, made)
            return
        bound = FLOATS if all(tensor.is_floating_point() for tensor in made) else INTEGERS
        if any(self._value(tensor) is None and tensor.numel() > bound for tensor in given):
            self._forget(changed)
            self._follow_uniform(func, args, kwargs, made)
            return
        repeated = [one for one in changed if (known := self._value(one)) is not None and _is_repeated(one, known.real)]
        try:
            real, guessed = self._run(func, args, kwargs)
        except Exception:  # made-up values may be out of an operator's range
            self._forget(changed)
            return
        self._forget(repeated)  # it was one number for all that share the memory, of which one has changed
        for tensor, value in zip(made, tensors_in(real), strict=False):
            if value.shape == tensor.shape and value.device.type == "cpu" and isinstance(tensor, FakeTensor):
                self._hold(tensor, _Value(value, guessed))

    def _worth(self, func: Any, given: list[torch.Tensor], made: list[torch.Tensor]) -> bool:
        """Whether to compute the values of results. Products of floats are made up when they are read.

        Floats that known integers choose may be many: a router marks each token's experts, and counts the marks.
        """
        if func in flop_registry or func.overloadpacket in flop_registry or _is_unsafe(func) or backward_id() != -1:
            return False
        chosen = any(not tensor.is_floating_point() for tensor in given) and all(map(self._value, given))
        floats = INTEGERS if chosen else FLOATS
        return all(tensor.numel() <= (floats if tensor.is_floating_point() else INTEGERS) for tensor in made)

    def _hold(self, tensor: torch.Tensor, value: _Value) -> None:
        setattr(tensor, _VALUE, value)
        self._holders.setdefault(storage_id(tensor.untyped_storage()), []).append(weakref.ref(tensor))

    def _forget(self, changed: list[torch.Tensor]) -> None:
        """Forget values of changed tensors, and of those that share their memory."""
        for tensor in [tensor for tensor in changed if isinstance(tensor, FakeTensor)]:
            key = storage_id(tensor.untyped_storage())
            sharing = [held() for held in self._holders.pop(key, [])]
            for one in (tensor, *(one for one in sharing if one is not None)):
                if storage_id(one.untyped_storage()) == key and _VALUE in getattr(one, "__dict__", {}):
                    delattr(one, _VALUE)

    def _follow_repeated(self, func: Any, args: Any, kwargs: Any, made: list[torch.Tensor]) -> None:
        """Known values repeated along some dims, as an expanded mask is, whose result has too many elements."""
        found = {id(tensor): self._value(tensor) for tensor in tensors_in((args, kwargs))}
        known = {key: value for key, value in found.items() if value is not None}
        if len(made) != 1 or not known or len(known) < len(found):
            return
        reals = {key: value.real for key, value in known.items()}
        try:
            with outside_of_modes(), torch.no_grad():
                real = _view(func, args, kwargs, reals) if _is_view(func) else None
                if _is_elementwise(func):
                    real = _compute_once(func, args, kwargs, reals, made[0].shape)
        except Exception:  # what is dense for the model cannot always be viewed alike if it is repeated
            return
        if real is not None and real.shape == made[0].shape:
            self._hold(made[0], _Value(real, any(value.guessed for value in known.values())))

    def _follow_uniform(self, func: Any, args: Any, kwargs: Any, made: list[torch.Tensor]) -> None:
        """Conditions on each element of a large tensor: all are like that on the number 1."""
        if torch.Tag.pointwise not in func.tags or any(tensor.dtype != torch.bool for tensor in made):
            return
        with outside_of_modes():
            ones = change_leaves(lambda leaf: _one(leaf) if isinstance(leaf, torch.Tensor) else leaf, (args, kwargs))
            for tensor, value in zip(made, tensors_in(func(*ones[0], **ones[1])), strict=True):
                self._hold(tensor, _Value(value.expand(tensor.shape), guessed=True))

    def _evaluate(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator whose number or shape depends on values."""
        if func is aten.index.Tensor:
            return self._index(*args)
        if func is aten.masked_select.default:
            return self._select(*args)
        real, guessed = self._run(func, args, kwargs)
        self._reads.note(guessed)
        if func is PACK_PADDED_SEQUENCE.default:
            return self._fake(real[0], guessed), real[1]  # recurrent layers read the batch sizes from memory
        return change_leaves(lambda leaf: self._fake(leaf, guessed) if isinstance(leaf, torch.Tensor) else leaf, real)

    def _index(self, source: torch.Tensor, indices: list[torch.Tensor | None]) -> torch.Tensor:
        """`x[mask]`: index by the places where the mask is set, which must be known."""
        places: list[torch.Tensor | None] = []
        for index in indices:
            if index is None or index.dtype not in (torch.bool, torch.uint8):
                places.append(index)
                continue
            mask = self._value(index) or self._make_up(index)
            self._reads.note(mask.guessed)
            with outside_of_modes():
                found = mask.real.nonzero().unbind(1)
            places += [self._fake(each, mask.guessed) for each in found]
        found = aten.index.Tensor(source, places)
        self._follow(aten.index.Tensor, (source, places), {}, found, [found])
        return found  # type: ignore[no-any-return]

    def _select(self, source: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        source, mask = torch.broadcast_tensors(source, mask)
        known = self._value(mask) or self._make_up(mask)
        self._reads.note(known.guessed)
        with outside_of_modes():
            count = int(known.real.sum())
        return source.new_empty(count)

    def _replace(self, func: Any, args: Any, kwargs: Any, error: Exception) -> Any:
        """The result of an operator whose fake kernel fails: computed in bf16, or for real."""
        if not schema_of(func).is_mutable:
            try:
                return self._in_half(func, args, kwargs)
            except Exception:  # not a matter of dtypes
                pass
        try:
            real, guessed = self._run(func, args, kwargs)
        except ValuesUnknown:
            raise ValuesUnknown(f"{func} does not run on fake tensors: {one_line(error)}") from error
        except Exception:
            raise error from None
        if schema_of(func).is_mutable:
            return args[0]
        return change_leaves(lambda leaf: self._fake(leaf, guessed) if isinstance(leaf, torch.Tensor) else leaf, real)

    def _in_half(self, func: Any, args: Any, kwargs: Any) -> Any:
        dtypes = {tensor.dtype for tensor in tensors_in((args, kwargs)) if tensor.is_floating_point()}
        if len(dtypes) != 1 or dtypes <= set(HALF):
            raise TypeError("not one dtype")
        (dtype,) = dtypes

        def half(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor) or not leaf.is_floating_point():
                return leaf
            return torch.empty_strided(leaf.size(), leaf.stride(), dtype=torch.bfloat16)

        args, kwargs = change_leaves(half, (args, kwargs))
        found = func(*args, **kwargs)
        return change_leaves(
            lambda leaf: (
                torch.empty_strided(leaf.size(), leaf.stride(), dtype=dtype)
                if isinstance(leaf, torch.Tensor) and leaf.dtype == torch.bfloat16
                else leaf
            ),
            found,
        )

    def _run(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, bool]:
        """Run an operator on values; whether they depend on made-up ones."""
        given = tensors_in((args, kwargs))
        if _is_unsafe(func):
            raise ValuesUnknown(f"{func} cannot run on made-up values.")
        if sum(tensor.numel() for tensor in given) > EVALUATED:
            raise ValuesUnknown(f"{func} has too many elements to run for real.")
        values = {id(tensor): self._value(tensor) or self._make_up(tensor) for tensor in given}
        changed = {id(tensor) for tensor in changed_by(func, args, kwargs)}

        def real_of(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            real = values[id(leaf)].real
            if id(leaf) not in changed:
                return real
            # A constant is one number until it is changed. A view is changed with what it is a view of.
            return real.clone(memory_format=torch.contiguous_format) if _is_repeated(leaf, real) else real

        with outside_of_modes(), torch.no_grad():
            real_args, real_kwargs = change_leaves(real_of, (args, kwargs))
            real = func(*real_args, **real_kwargs)
            real = self._settled(name := func.overloadpacket.__name__, real, args)
        counted = given[1:] if name in _OVERWRITES else given
        return real, name in ALLOCATIONS or any(values[id(tensor)].guessed for tensor in counted)

    def _settled(self, name: str, real: Any, args: Any) -> Any:
        """A new tensor without content is all zeros, and a single random number from a range is its middle."""
        if name in ALLOCATIONS:
            return real.zero_()
        if not self._draws and name in ("rand", "rand_like", "uniform_") and real.numel() == 1:
            low, high = (*args[1:], *(0.0, 1.0)[len(args) - 1 :]) if name == "uniform_" else (0.0, 1.0)
            return real.fill_((low + high) / 2)
        return real

    def _value(self, tensor: torch.Tensor) -> _Value | None:
        if not isinstance(tensor, FakeTensor):
            return _Value(tensor, guessed=False)
        found: _Value | None = getattr(tensor, _VALUE, None)
        return found

    def _make_up(self, tensor: torch.Tensor) -> _Value:
        """Values for a tensor that has none. Numbers are near zero, but a single one is 1; bools are true."""
        if prod(tensor.shape) > EVALUATED:
            raise ValuesUnknown(f"A tensor of shape {tuple(tensor.shape)} is too large for made-up values.")
        with outside_of_modes():
            real = torch.zeros(tensor.shape, dtype=tensor.dtype)
            if tensor.dtype == torch.bool or tensor.numel() == 1:
                real.fill_(1)
            elif tensor.is_floating_point():
                real.normal_(std=0.02, generator=self._generator)
        value = _Value(real, guessed=True)
        self._hold(tensor, value)
        return value

    def _fake(self, real: torch.Tensor, guessed: bool) -> torch.Tensor:
        fake = torch.empty_strided(real.size(), real.stride(), dtype=real.dtype)
        self._hold(fake, _Value(real, guessed))
        return fake


def _is_unsafe(func: Any) -> bool:
    """Whether a kernel may crash on made-up values: those of recurrent layers trust their workspaces."""
    return any(word in func.overloadpacket.__name__ for word in ("rnn", "lstm", "gru"))


def _is_repeated(tensor: torch.Tensor, real: torch.Tensor) -> bool:
    """Whether known values are fewer than the memory of the tensor, or of what it is a view of, could hold."""
    return real.untyped_storage().nbytes() < tensor.untyped_storage().nbytes()


def _is_view(func: Any) -> bool:
    return not schema_of(func).is_mutable and any(argument.alias_info for argument in schema_of(func).arguments)


def _view(func: Any, args: Any, kwargs: Any, reals: dict[int, torch.Tensor]) -> Any:
    real_args, real_kwargs = change_leaves(lambda leaf: reals.get(id(leaf), leaf), (args, kwargs))
    return func(*real_args, **real_kwargs)


def _compute_once(
    func: Any, args: Any, kwargs: Any, reals: dict[int, torch.Tensor], shape: torch.Size
) -> torch.Tensor | None:
    """The result of an elementwise operator, repeated as its arguments are; None if too many elements are not."""
    repeated = {key: real.expand(shape) for key, real in reals.items()}
    strides = zip(*(real.stride() for real in repeated.values()), strict=True)
    once = tuple(slice(None) if any(each) else slice(1) for each in strides)
    parts = {key: real[once] for key, real in repeated.items()}
    if any(part.numel() > FLOATS for part in parts.values()):
        return None
    real_args, real_kwargs = change_leaves(lambda leaf: parts.get(id(leaf), leaf), (args, kwargs))
    found: torch.Tensor = func(*real_args, **real_kwargs)
    return found.expand(shape)


def _is_elementwise(func: Any) -> bool:
    """Whether each element of the result comes from those at its place, and nothing is changed."""
    pointwise = torch.Tag.pointwise in func.tags or func.overloadpacket.__name__ in ("_to_copy", "clone")
    return pointwise and torch.Tag.nondeterministic_seeded not in func.tags and not schema_of(func).is_mutable


def _is_constant(func: Any) -> bool:
    return func.overloadpacket.__name__ in ("zeros", "ones", "full")


def _single(func: Any, args: Any, dtype: torch.dtype) -> torch.Tensor:
    """The number that a constant is full of."""
    number = {"zeros": 0, "ones": 1}.get(func.overloadpacket.__name__)
    return torch.full((), args[1] if number is None else number, dtype=dtype)


def _one(tensor: torch.Tensor) -> torch.Tensor:
    return torch.ones((), dtype=tensor.dtype)


def _padded(
    data: torch.Tensor, batch_sizes: torch.Tensor, batch_first: bool, padding: float, length: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """A packed sequence as a padded batch. PyTorch's function writes the lengths to memory that fake tensors lack."""
    with outside_of_modes():
        sizes = batch_sizes.tolist()
        lengths = torch.tensor([sum(size > sample for size in sizes) for sample in range(sizes[0])])
        rows = torch.tensor([step * sizes[0] + sample for step, size in enumerate(sizes) for sample in range(size)])
    steps = max(length, len(sizes))
    flat = data.new_full((steps * sizes[0], *data.shape[1:]), padding).index_copy(0, rows, data)
    padded = flat.view(steps, sizes[0], *data.shape[1:])
    return padded.transpose(0, 1) if batch_first else padded, lengths
