"""Record how a model is built without building it, and play the recording later, one tensor at a time.

Weights must be the same under every strategy and world size: those of `torch.manual_seed(seed); build()`. So the
builder runs once with every tensor on the meta device while each operator is recorded. Then each rank plays the whole
tape in order on the CPU from the same seed. A tensor is handed over and freed once no later operator uses it, so a rank
never holds more than its own shards and the tensor being filled. Tensors are identified by their meta storage, so views
and tied weights need no special treatment.

Real tensors that the builder uses are referenced, not copied: of a memory-mapped file, only a rank's part is read.
Tensors that the builder itself puts on the meta device are left alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from meshwright.recording import operation
from meshwright.recording.constants import Constants
from meshwright.recording.operation import Draw, SetState, Slot, TapeOperation
from meshwright.recording.report_as_cpu import META, change_leaves, is_meta, leaves_in, meta_of, tensors_in
from meshwright.torch_private.modes import TorchDispatchMode, outside_of_modes
from meshwright.torch_private.operators import schema_of
from meshwright.torch_private.tensors import storage_id


class NotRecorded(Exception):
    """The builder does something that a recording cannot repeat, so it must run for real."""


class Tape(TorchDispatchMode):
    """While active, every new tensor is a meta tensor and every operator on one is recorded."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed = seed
        self.operations: list[TapeOperation] = []
        self.doubt = ""
        """Why the recording cannot be trusted; empty if it can."""
        self.constants = Constants()
        self._paused = False
        self._taken: set[int] = set()
        """Real storages that were assigned to a recorded tensor's `data`."""
        self._written: set[int] = set()
        """Recorded storages that hold more than uninitialised memory."""
        self._kept: dict[int, torch.UntypedStorage] = {}  # kept alive, so that no id is reused
        self._generators: dict[torch.Generator, torch.Tensor] = {}  # the builder's generators with their first states
        self._states_before: dict[int, dict[torch.Generator, torch.Tensor]] = {}
        self._states_at_end: tuple[int, dict[torch.Generator, torch.Tensor]] | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        tensors = tensors_in((args, kwargs))
        recorded = [self.has(tensor) for tensor in tensors]
        if self._paused or _makes_nothing(func, args):
            return func(*args, **kwargs)
        if tensors and not any(recorded):
            return self._on_others(func, args, kwargs, tensors)
        if operation.gives_numbers(func):
            return self._result(func, *change_leaves(self._to_slot, change_leaves(self._to_meta, (args, kwargs))))
        changed = operation.changed_by(func, args, kwargs)
        if any(is_meta(tensor) and not self.has(tensor) for tensor in tensors):
            if changed and all(is_meta(tensor) and not self.has(tensor) for tensor in changed):
                return func(*change_leaves(self._to_meta, args), **change_leaves(self._to_meta, kwargs))
            raise NotImplementedError("Cannot copy out of meta tensor; no data!")  # PyTorch's own message
        if not all(self.has(tensor) for tensor in changed):
            self.refuse(f"{func} changes a tensor made from data in place")
        return self._record(func, args, kwargs)

    def _on_others(self, func: Any, args: Any, kwargs: dict[str, Any], tensors: list[torch.Tensor]) -> Any:
        """Run an operator that has no recorded tensor among its arguments."""
        if all(map(is_meta, tensors)):
            is_new = kwargs.get("device", META) != META and _makes_alike(func)
            return self._record(func, args, kwargs) if is_new else func(*args, **kwargs)
        changed = operation.changed_by(func, args, kwargs)
        if torch.Tag.nondeterministic_seeded in func.tags:
            if changed:
                self.refuse(f"{func} changes a tensor made from data in place")
            return self._record(func, args, kwargs)
        for tensor in changed:
            if storage_id(tensor.untyped_storage()) in self._taken:
                self.refuse(f"{func} changes data that was assigned to a parameter before")
            self.constants.before_change(tensor)
        return func(*args, **kwargs)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Record nothing, because the builder requested tensors on the meta device."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def refuse(self, reason: str) -> None:
        """Raise `NotRecorded`. The reason is also stored in `doubt`, because the builder may catch the exception."""
        self.doubt = self.doubt or reason
        raise NotRecorded(reason)

    def take_over(self, tensor: torch.Tensor) -> torch.Tensor:
        """A recorded tensor that replaces a real one in `parameter.data = tensor`."""
        recorded = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype).copy_(tensor)
        self._taken.add(storage_id(tensor.untyped_storage()))
        return recorded

    def slot(self, tensor: torch.Tensor) -> Slot:
        """The slot of a recorded or a real tensor."""
        if not is_meta(tensor):
            tensor = self.constants.stand_in(tensor)
        storage = tensor.untyped_storage()
        key = storage_id(storage)
        self._kept[key] = storage
        return Slot(key, tensor.dtype, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))

    def has(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is part of the recording."""
        strided = is_meta(tensor) and tensor.layout == torch.strided
        return strided and storage_id(tensor.untyped_storage()) in self._kept

    def is_written(self, slot: Slot) -> bool:
        """Whether the builder has written to a storage."""
        return slot.storage in self._written or slot.storage in self.constants.storages or 0 in slot.size

    def play(self, hand_over: Callable[[int, torch.UntypedStorage], None]) -> None:
        """Run all operators in order, and pass each storage to `hand_over` once it is final."""
        last = {slot.storage: index for index, op in enumerate(self.operations) for slot in op.slots}
        live = dict(self.constants.storages)
        with self._from_the_seed(), torch.no_grad():
            for index, entry in enumerate(self.operations):
                entry.play(live)
                for key in {slot.storage for slot in entry.slots if last[slot.storage] == index}:
                    hand_over(key, live.pop(key))
            for key in list(live):
                hand_over(key, live.pop(key))

    def _record(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        kwargs.pop("pin_memory", None)
        args, kwargs = change_leaves(self._to_meta, (args, kwargs))
        # Slots are taken before the operator runs: it may change a tensor's shape in place.
        slotted_args, slotted_kwargs = change_leaves(self._to_slot, (args, kwargs))
        if operation.takes_device(func):
            kwargs["device"], slotted_kwargs["device"] = META, torch.device("cpu")
        certain = operation.is_certain(func)
        try:
            if certain and operation.has_own_layout(func):
                result = self._shapes(func, slotted_args, slotted_kwargs)
            else:
                result = args[0] if operation.only_draws(func) else func(*args, **kwargs)
        except NotImplementedError:
            if not certain:
                self.refuse(f"{func} has no kernel for tensors without values")
            result = self._shapes(func, slotted_args, slotted_kwargs)
        outputs = tuple(self.slot(tensor) for tensor in tensors_in(result))
        self._note_generators(kwargs.values())
        entry = TapeOperation(func, slotted_args, slotted_kwargs, outputs)
        self.operations.append(entry)
        self._note_written(entry)
        return result

    def _note_written(self, entry: TapeOperation) -> None:
        sources = leaves_in(Slot, (entry.args, entry.kwargs))
        if operation.leaves_empty(entry.function, [self.is_written(slot) for slot in sources]):
            return
        taken = {slot.storage for slot in sources}
        changed = operation.changed_by(entry.function, entry.args, entry.kwargs, Slot)
        self._written |= {slot.storage for slot in changed}
        self._written |= {slot.storage for slot in entry.outputs if slot.storage not in taken}

    def _to_slot(self, leaf: Any) -> Any:
        return self.slot(leaf) if isinstance(leaf, torch.Tensor) and self.has(leaf) else leaf

    def _to_meta(self, leaf: Any) -> Any:
        """A real tensor that meets a recorded one becomes a constant of the tape."""
        if not isinstance(leaf, torch.Tensor) or is_meta(leaf):
            return leaf
        meta = self.constants.stand_in(leaf)
        self.slot(meta)
        return meta

    def _result(self, func: Any, args: Any, kwargs: Any) -> Any:
        """An operator's result for the current values of its arguments."""
        with torch.no_grad(), outside_of_modes(), torch.device("cpu"):
            return TapeOperation(func, args, kwargs, ()).call(self._real)

    def _shapes(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The results of an operator without a meta kernel, as meta tensors."""
        result = self._result(func, args, kwargs)
        with outside_of_modes():
            return change_leaves(meta_of, tuple(result) if isinstance(result, tuple) else result)

    def real(self, tensor: torch.Tensor) -> torch.Tensor:
        """The current value of a recorded tensor: for `linspace(...).item()`, or `any()` in a rejection loop."""
        return self._real(self.slot(tensor))

    def _real(self, wanted: Slot) -> torch.Tensor:
        needed, chosen = {wanted.storage}, []
        for index in reversed(range(len(self.operations))):
            keys = {slot.storage for slot in self.operations[index].slots}
            if keys & needed:
                needed |= keys
                chosen.append(index)
        live = {key: storage for key, storage in self.constants.storages.items() if key in needed}
        with self._from_the_seed(), torch.no_grad():
            self._find_random_states()
            for index in reversed(chosen):
                if self.operations[index].random:
                    self._set_states(self._states_before[index])
                self.operations[index].play(live)
            return wanted.on(live[wanted.storage]).clone()

    def random_state(self) -> torch.Tensor:
        """The state of torch's generator at this point of a plain build."""
        with self._from_the_seed():
            self._find_random_states()
            return torch.default_generator.get_state()

    def set_random_state(self, state: torch.Tensor) -> None:
        """Record that the builder sets torch's generator."""
        self.operations.append(TapeOperation(SetState(state.clone()), (), {}, ()))

    def draw(self, function: Callable[..., Any], tensor: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        """Record a function that fills a recorded tensor as one operator.

        Each of the function's own looks at what it has drawn would play the tape.
        """
        with outside_of_modes(), torch.device("cpu"):
            function(torch.empty(0, dtype=tensor.dtype), *args, **kwargs)  # for its errors and warnings
        self._note_generators((*args, *kwargs.values()))
        slot = self.slot(tensor)
        self.operations.append(TapeOperation(Draw(function), (slot, *args), kwargs, ()))
        self._written.add(slot.storage)

    def _note_generators(self, values: Iterable[Any]) -> None:
        generators = (value for value in values if isinstance(value, torch.Generator))
        self._generators |= {g: g.get_state() for g in generators if g not in self._generators}

    def _find_random_states(self) -> None:
        """Find the generators' states before each random operator. They depend only on the layouts of the tensors."""
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
        """Make real tensors on the CPU, with the generators at their first states, and restore both afterwards."""
        before = self._get_states()
        with torch.device("cpu"), outside_of_modes():
            try:
                torch.default_generator.manual_seed(self.seed)
                for generator, first in self._generators.items():
                    generator.set_state(first)
                yield
            finally:
                for generator, state in before.items():
                    generator.set_state(state)


def _makes_nothing(func: Any, args: Any) -> bool:
    """Whether an operator makes an empty tensor: PyTorch uses one to wrap a storage, so it must be real."""
    return func is torch.ops.aten.empty.memory_format and list(args[0]) == [0]


def _makes_alike(func: Any) -> bool:
    """Whether an operator uses only the shape of its tensor argument: `empty_like`, `new_zeros`."""
    name: str = schema_of(func).name.removeprefix("aten::")
    return name.endswith("_like") or name.startswith("new_")
