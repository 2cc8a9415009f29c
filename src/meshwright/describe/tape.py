"""Record how a model is built without building it; play the recording later, one tensor at a time.

Weights must be the same under every strategy and world size, and must be those of
`torch.manual_seed(seed); build()`. So the builder runs once with every tensor on the meta device while each
operator is written down, and each rank plays the whole tape in order on the CPU from the same seed. A tensor is
handed over as soon as no later operator touches it, and freed: a rank never holds more than its own shards and
what is being filled at the moment. A meta tensor's storage is its identity, so views and tied weights need no care.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from meshwright.describe.disguise import META, Disguise, change_leaves, tensors_in
from meshwright.errors import JobError


@dataclass(frozen=True)
class Slot:
    """Where a tensor lies in a recorded storage."""

    storage: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def on(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """The real tensor, once its storage is real."""
        return torch.empty(0, dtype=self.dtype).set_(storage, self.offset, self.size, self.stride)

    def scratch(self) -> torch.Tensor:
        """A tensor of the same layout with arbitrary content."""
        return torch.empty_strided(self.size, self.stride, dtype=self.dtype)


@dataclass(frozen=True)
class Operation:
    """One recorded operator; tensors in `args`, `kwargs` and `outputs` are slots."""

    function: Any
    args: Any
    kwargs: Any
    outputs: tuple[Slot, ...]

    @property
    def random(self) -> bool:
        return torch.Tag.nondeterministic_seeded in self.function.tags

    @property
    def slots(self) -> list[Slot]:
        found: list[Slot] = []
        change_leaves(
            lambda leaf: found.append(leaf) if isinstance(leaf, Slot) else None, (self.args, self.kwargs, self.outputs)
        )
        return found

    def play(self, live: dict[int, torch.UntypedStorage]) -> None:
        """Run on real storages; storages that this operator makes are added."""
        results = self.call(lambda slot: slot.on(live[slot.storage]))
        for slot, result in zip(self.outputs, tensors_in(results), strict=True):
            live.setdefault(slot.storage, result.untyped_storage())

    def call(self, real: Callable[[Slot], torch.Tensor]) -> Any:
        args, kwargs = change_leaves(
            lambda leaf: real(leaf) if isinstance(leaf, Slot) else leaf, (self.args, self.kwargs)
        )
        return self.function(*args, **kwargs)


class Tape(TorchDispatchMode):
    """While active, every tensor that is made is a meta tensor and every operator on one is written down."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed = seed
        self.operations: list[Operation] = []
        self._constants: dict[int, torch.UntypedStorage] = {}
        self._kept: dict[int, torch.UntypedStorage] = {}  # alive, so that no identity is used twice
        self._generators: dict[torch.Generator, torch.Tensor] = {}  # the builder's own, with their first states
        self._states_before: dict[int, dict[torch.Generator, torch.Tensor]] = {}
        self._states_at_end: tuple[int, dict[torch.Generator, torch.Tensor]] | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        tensors = tensors_in((args, kwargs))
        recorded = not tensors or any(self.has(tensor) for tensor in tensors)
        if not recorded and torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        if func is torch.ops.aten._local_scalar_dense.default:
            return self.real(args[0]).item()
        if func._schema.is_mutable and isinstance(args[0], torch.Tensor) and not self.has(args[0]):
            raise JobError(
                f"The model's builder changes a tensor made from data in place ({func}); it cannot be built on the "
                "meta device that way. Make the tensor with torch.empty and fill that."
            )
        return self._record(func, args, kwargs)

    def slot(self, tensor: torch.Tensor) -> Slot:
        """Where a meta tensor lies."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        self._kept[key] = storage
        return Slot(key, tensor.dtype, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))

    def play(self, hand_over: Callable[[int, torch.UntypedStorage], None]) -> None:
        """Run all operators in order; `hand_over` gets each storage once, when it is final."""
        last = {slot.storage: index for index, op in enumerate(self.operations) for slot in op.slots}
        live = {key: storage.clone() for key, storage in self._constants.items()}
        with self._from_the_seed(), torch.no_grad():
            for index, operation in enumerate(self.operations):
                operation.play(live)
                for key in {slot.storage for slot in operation.slots if last[slot.storage] == index}:
                    hand_over(key, live.pop(key))

    def _record(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        names = {argument.name for argument in func._schema.arguments}
        kwargs.pop("pin_memory", None)
        args, kwargs = change_leaves(self._to_meta, (args, kwargs))
        # Slots are taken before the operator runs: it may change a tensor's shape in place.
        slotted_args, slotted_kwargs = change_leaves(self._to_slot, (args, kwargs))
        if "device" in names:
            kwargs["device"], slotted_kwargs["device"] = META, torch.device("cpu")
        try:
            result = args[0] if _only_draws(func) else func(*args, **kwargs)
        except NotImplementedError as error:
            # Torch's parametrizations would swallow it and go on with other weights.
            raise JobError(f"The model's builder uses {func}, which cannot be recorded on the meta device.") from error
        outputs = tuple(self.slot(tensor) for tensor in tensors_in(result))
        self._generators |= {g: g.get_state() for g in _generators(kwargs) if g not in self._generators}
        self.operations.append(Operation(func, slotted_args, slotted_kwargs, outputs))
        return result

    def _to_slot(self, leaf: Any) -> Any:
        return self.slot(leaf) if isinstance(leaf, torch.Tensor) else leaf

    def has(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is one of the recording's."""
        return tensor.untyped_storage()._cdata in self._kept

    def _to_meta(self, leaf: Any) -> Any:
        """A real tensor that meets a recorded one becomes a constant of the tape."""
        if not isinstance(leaf, torch.Tensor) or self.has(leaf):
            return leaf
        copy = leaf.detach().clone()
        meta = torch.empty_strided(copy.size(), copy.stride(), dtype=copy.dtype, device=META)
        self._constants[self.slot(meta).storage] = copy.untyped_storage()
        return meta

    def real(self, tensor: torch.Tensor) -> torch.Tensor:
        """What a recorded tensor holds now: for `linspace(...).item()`, or a rejection loop's `any()`."""
        wanted = self.slot(tensor)
        needed, chosen = {wanted.storage}, []
        for index in reversed(range(len(self.operations))):
            keys = {slot.storage for slot in self.operations[index].slots}
            if keys & needed:
                needed |= keys
                chosen.append(index)
        live = {key: storage.clone() for key, storage in self._constants.items() if key in needed}
        with self._from_the_seed(), torch.no_grad():
            self._find_random_states()
            for index in reversed(chosen):
                if self.operations[index].random:
                    self._set_states(self._states_before[index])
                self.operations[index].play(live)
            return wanted.on(live[wanted.storage]).clone()

    def random_state(self) -> torch.Tensor:
        """The state that torch's generator would have at this point of a plain build."""
        with self._from_the_seed():
            self._find_random_states()
            return torch.default_generator.get_state()

    def set_random_state(self, state: torch.Tensor) -> None:
        """The builder sets torch's generator."""
        self.operations.append(Operation(_SetState(state.clone()), (), {}, ()))

    def _find_random_states(self) -> None:
        """The generators' states before each random operator; how far one moves them depends on layout alone."""
        start, states = self._states_at_end or (0, self._get_states())
        self._set_states(states)
        for index in range(start, len(self.operations)):
            if self.operations[index].random:
                self._states_before[index] = self._get_states()
                self.operations[index].call(Slot.scratch)
        self._states_at_end = len(self.operations), self._get_states()

    def _get_states(self) -> dict[torch.Generator, torch.Tensor]:
        return {generator: generator.get_state() for generator in (torch.default_generator, *self._generators)}

    def _set_states(self, states: dict[torch.Generator, torch.Tensor]) -> None:
        for generator, first in self._generators.items():
            generator.set_state(states.get(generator, first))
        torch.default_generator.set_state(states[torch.default_generator])

    @contextmanager
    def _from_the_seed(self) -> Iterator[None]:
        """Real tensors on the CPU and generators at their start; all is put back afterwards."""
        before = self._get_states()
        with torch.device("cpu"), torch.utils._python_dispatch._disable_current_modes():
            try:
                torch.default_generator.manual_seed(self.seed)
                for generator, first in self._generators.items():
                    generator.set_state(first)
                yield
            finally:
                for generator, state in before.items():
                    generator.set_state(state)


@dataclass(frozen=True)
class _SetState:
    """An operator that sets torch's generator."""

    state: torch.Tensor
    tags = (torch.Tag.nondeterministic_seeded,)

    def __call__(self) -> None:
        torch.default_generator.set_state(self.state)


class _Disguise(Disguise):
    """Also a recorded tensor's values can be had, as those of a tensor on the CPU."""

    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self._tape = tape

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.tolist and self._tape.has(args[0]):
            return self._tape.real(args[0]).tolist()
        return super().__torch_function__(func, types, args, kwargs)


@contextmanager
def recording(seed: int) -> Iterator[Tape]:
    """Record a builder. Python's and numpy's generators start from the seed, too, and are put back afterwards."""
    python_state, numpy_state = random.getstate(), numpy.random.get_state()
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    tape = Tape(seed)
    try:
        with _builder_may_seed(tape), _Disguise(tape), tape:
            yield tape
    finally:
        random.setstate(python_state)
        numpy.random.set_state(numpy_state)


@contextmanager
def _builder_may_seed(tape: Tape) -> Iterator[None]:
    """`torch.manual_seed`, `fork_rng` and the like act on the recording instead of the generator."""

    def manual_seed(seed: int) -> torch.Generator:
        tape.set_random_state(torch.Generator().manual_seed(int(seed)).get_state())
        return torch.default_generator

    replaced = {
        "manual_seed": manual_seed,
        "get_rng_state": tape.random_state,
        "set_rng_state": tape.set_random_state,
    }
    places = [(module, name) for module in (torch, torch.random) for name in replaced]
    before = [getattr(module, name) for module, name in places]
    for module, name in places:
        setattr(module, name, replaced[name])
    try:
        yield
    finally:
        for (module, name), value in zip(places, before, strict=True):
            setattr(module, name, value)


@cache
def _only_draws(func: Any) -> bool:
    """Whether an operator fills its first argument at random and does nothing else, as `normal_` does.

    On the meta device it would do nothing at all, slowly: half of the time that it takes to record a model.
    """
    tensors = [argument for argument in func._schema.arguments if "Tensor" in str(argument.type)]
    drawn = torch.Tag.nondeterministic_seeded in func.tags and func._schema.name.endswith("_")
    return drawn and len(tensors) == 1 and tensors[0].name == "self"


def _generators(kwargs: dict[str, Any]) -> list[torch.Generator]:
    return [value for value in kwargs.values() if isinstance(value, torch.Generator)]
