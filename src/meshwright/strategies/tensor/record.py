"""Records the local program of a block while the block runs as it always does.

The recorder is the outermost function mode, so it sees the functions that rules call on this rank's parts, after every
other mode has changed them. It refuses to record what a program could not repeat:

- a tensor that is neither an argument, nor held by the block's modules, nor computed in the call;
- a read of values (`item`, `bool`, `tolist`), and a result whose shape depends on values;
- an autograd function of the model's author, checkpointing inside the block, and an operator that no torch function
  called: a mode over operators sees those;
- hooks on tensors, memory that is allocated and not filled, and changes of divided tensors in place.

What the block's Python code reads beside its arguments and its modules is `python_reads.py`'s to find.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Parameter
from torch.overrides import TorchFunctionMode

from meshwright.strategies import recorder
from meshwright.strategies.tensor.program import Instruction, Local, Program
from meshwright.strategies.tensor.rules import functions
from meshwright.torch_private.autograd import SET_GRAD_ENABLED, hooks_wrapped, own_functions_wrapped
from meshwright.torch_private.dtensor import local_tensor
from meshwright.torch_private.fake_tensors import FakeTensor
from meshwright.torch_private.modes import TorchDispatchMode, below_all_modes
from meshwright.torch_private.operators import reads_values
from meshwright.torch_private.tensors import READ_VERSION, is_meta

PLAIN = (Tensor, Parameter, FakeTensor)
"""The exact types of tensors in a program. Traces run on fake ones."""

_METADATA = functions(
    "size dim ndimension numel nelement element_size stride is_contiguous is_floating_point is_complex is_signed "
    "get_device storage_offset __len__ __hash__ is_same_size is_inference is_tensor broadcast_shapes promote_types "
    "can_cast result_type"
)
_METADATA |= {
    getattr(Tensor, name).__get__
    for name in [
        *(
            "shape",
            "dtype",
            "device",
            "ndim",
            "layout",
            "requires_grad",
            "is_leaf",
            "is_cuda",
            "is_cpu",
            "is_meta",
            "is_mps",
        ),
        *("is_xpu", "is_sparse", "is_nested", "is_quantized", "is_mkldnn", "itemsize", "nbytes", "grad_fn", "names"),
    ]
    if hasattr(Tensor, name)
}
_METADATA |= {READ_VERSION, SET_GRAD_ENABLED}  # each instruction knows whether gradients are recorded
_REFUSED = functions(
    "empty empty_like new_empty empty_strided new_empty_strided empty_permuted requires_grad_ retain_grad "
    "register_hook resize_ resize_as_ set_ share_memory_ data_ptr untyped_storage storage backward"
)
_CONVERSIONS = functions("to float half bfloat16 double type_as contiguous")
_CONSTANTS = (bool, int, float, complex, str, torch.dtype, torch.device, torch.memory_format, torch.layout)


class Unrecordable(Exception):
    """The call cannot be written down."""


class ProgramRecorder(TorchFunctionMode):
    """Writes down the functions of one call. `reason` says why it gave up; the call itself goes on."""

    def __init__(self, arguments: list[Tensor], held: Mapping[Any, Tensor], constants: tuple[Any, ...] = ()) -> None:
        """`arguments` are the tensors that the call gets, `held` those that its modules hold, by where."""
        super().__init__()
        self.reason: str | None = None
        self.read: dict[Any, int] = {}
        """The held tensors that the program reads, and their numbers."""
        self._held = {id(tensor): (place, tensor) for place, tensor in reversed(list(held.items()))}
        self._constants = constants
        self._instructions: list[Instruction] = []
        self._numbers: dict[int, tuple[weakref.ref[Tensor], int]] = {}
        self._shapes: dict[int, tuple[int, ...]] = {}
        self._arguments = [self._number(tensor) for tensor in arguments]
        self._inside = self._trusted = 0
        self._differentiated = torch.is_grad_enabled()

    def program(self, outputs: list[Tensor]) -> Program:
        """What was recorded, with these results."""
        numbers = tuple(self._known(tensor) for tensor in outputs)
        inputs = (*self._arguments, *self.read.values())
        return Program(inputs, tuple(self._instructions), numbers, self._shapes)

    def held_by_number(self) -> dict[int, Tensor]:
        """The held tensors that the program reads, by their numbers."""
        tensors = {place: tensor for place, tensor in self._held.values()}
        return {number: tensors[place] for place, number in self.read.items()}

    @contextmanager
    def recording(self) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(below_all_modes(self, but=_watches))
            stack.enter_context(_Operators(self))
            stack.enter_context(own_functions_wrapped(self._check_own_function))
            stack.enter_context(hooks_wrapped(lambda: self._refuse_outside("it keeps saved tensors in its own way")))
            token = recorder.active.set(self)
            stack.callback(recorder.active.reset, token)
            yield

    def refuse(self, reason: str) -> None:
        self.reason = self.reason or reason

    def note(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        self._trusted += 1
        try:
            result = function(*args)
        finally:
            self._trusted -= 1
        if not self._trusted:
            self._write(function, args, {}, result)
        return result

    def alias(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        self._trusted += 1
        try:
            result = function(*args)
        finally:
            self._trusted -= 1
        if not self._trusted and self.reason is None:
            try:
                number = self._known(args[0])
                self._numbers[id(result)] = weakref.ref(result), number
            except Unrecordable as why:
                self.refuse(str(why))
        return result

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._trusted or self.reason is not None:
            return func(*args, **kwargs)
        self._inside += 1
        try:
            result = func(*args, **kwargs)
        finally:
            self._inside -= 1
        if func not in _METADATA:
            self._write(func, args, kwargs, result)
        return result

    def saw_operator(self, operator: Any, types: Any, args: Any) -> None:
        if self._trusted or self.reason is not None:
            return
        if reads_values(operator, args):
            self.refuse(f"{operator} depends on values")
        elif not self._inside and not any(issubclass(kind, DTensor) for kind in types):
            self.refuse(f"{operator} was called by no torch function")

    def _check_own_function(self, name: str) -> None:
        self._refuse_outside(f"{name} is an autograd function of its author")

    def _refuse_outside(self, reason: str) -> None:
        if not self._trusted:
            self.refuse(reason)

    def _write(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        if self.reason is not None:
            return
        try:
            self._instruct(func, args, kwargs, result)
        except Unrecordable as why:
            self.refuse(f"{getattr(func, '__name__', func)}: {why}")

    def _instruct(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        name = getattr(func, "__name__", "")
        results, single = _results(name, result)
        if results and all(map(is_meta, results)):
            return  # a rule finds a shape
        if func in _REFUSED or name in ("__set__", "__delete__"):
            raise Unrecordable("a program cannot repeat it")
        if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
            raise Unrecordable("it runs under autocast")
        if single and func in _CONVERSIONS and args and result is args[0]:
            self._known(result)
            return  # a tensor that has the dtype and memory format already, and will again: both are guarded
        differentiated = torch.is_grad_enabled()
        if differentiated and not self._differentiated:
            raise Unrecordable("it records gradients inside of no_grad")
        given, named = self._encode(tuple(args)), self._encode(dict(kwargs))
        numbers = tuple(self._number(tensor) for tensor in results)
        unlike = differentiated is not self._differentiated
        self._instructions.append(Instruction(func, given, named, numbers, single, not unlike))

    def _encode(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return Local(self._known(value))
        kind = type(value)
        if kind in (tuple, torch.Size):
            return tuple([self._encode(item) for item in value])
        if kind is list:
            return [self._encode(item) for item in value]
        if kind is dict and all(type(key) is str for key in value):
            return {key: self._encode(item) for key, item in value.items()}
        if kind is slice:
            return slice(*(self._encode(item) for item in (value.start, value.stop, value.step)))
        if value is None or value is Ellipsis or kind in _CONSTANTS or any(value is one for one in self._constants):
            return value
        raise Unrecordable(f"its argument is a {kind.__name__}")

    def _number(self, tensor: Tensor) -> int:
        if not isinstance(tensor, DTensor) and type(tensor) not in PLAIN:
            raise Unrecordable(f"it returns a {type(tensor).__name__}")
        number = len(self._shapes)
        self._shapes[number] = tuple(local_tensor(tensor).shape if isinstance(tensor, DTensor) else tensor.shape)
        self._numbers[id(tensor)] = weakref.ref(tensor), number
        return number

    def _known(self, tensor: Tensor) -> int:
        reference, number = self._numbers.get(id(tensor), (lambda: None, -1))
        if reference() is tensor:
            return number
        place, held = self._held.get(id(tensor), (None, None))
        if held is not tensor or type(tensor) not in PLAIN:
            raise Unrecordable(f"it reads a {type(tensor).__name__} of shape {tuple(tensor.shape)} from elsewhere")
        if place not in self.read:
            self.read[place] = self._number(tensor)
        return self.read[place]


def _watches(mode: TorchFunctionMode) -> bool:
    """Whether a mode must see a program's functions too, so that it is not part of the program."""
    return getattr(mode, "recorded_as", None) == recorder.SELECTIVE


def _results(name: str, result: Any) -> tuple[list[Tensor], bool]:
    """The tensors that a function returned, and whether it returned one alone."""
    if isinstance(result, Tensor):
        return [result], True
    if isinstance(result, tuple | list) and result and all(isinstance(item, Tensor) for item in result):
        return list(result), False
    if result is None and name == "__setitem__":
        return [], False
    raise Unrecordable(f"it returns a {type(result).__name__}")


class _Operators(TorchDispatchMode):
    """Tells a recorder about every operator."""

    def __init__(self, told: ProgramRecorder) -> None:
        super().__init__()
        self._told = told

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._told.saw_operator(func, types, args)
        return func(*args, **(kwargs or {}))
