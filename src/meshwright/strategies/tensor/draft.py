"""A call of a block that is being recorded, and what comes of it: a program with its conditions and its results."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakSet

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from meshwright.strategies.tensor.compiled import compiled
from meshwright.strategies.tensor.condition_source import Conditions
from meshwright.strategies.tensor.conditions import (
    Arguments,
    held_tensors,
    keep_attributes,
    keep_modules,
    keep_reads,
    read_held,
)
from meshwright.strategies.tensor.layout import dim_of, divided_result, is_divided, pieces_of
from meshwright.strategies.tensor.mode import mode_of
from meshwright.strategies.tensor.object_state import is_comparable
from meshwright.strategies.tensor.program import Program
from meshwright.strategies.tensor.python_reads import PythonReads
from meshwright.strategies.tensor.record import PLAIN, ProgramRecorder, Unrecordable
from meshwright.strategies.tensor.rewrite import rewrite

CHECKED = 8
"""A program is compared with the block in the calls whose number is a power of this."""
MISSING = (KeyError, AttributeError, IndexError, TypeError)
"""What conditions raise if something they read is not there."""


@dataclass
class BoundProgram:
    """A program of one block: its conditions, its code, and how its results are returned."""

    state: Any
    """Torch's switches and the modes under which it was recorded."""
    match: Callable[[Any, Any], tuple[tuple[Any, ...], tuple[Tensor, ...]] | None]
    """(args, kwargs) -> the program's arguments and inputs, or None."""
    program: Program
    run: Callable[..., tuple[Tensor, ...]]
    finish: Callable[[tuple[Any, ...], tuple[Tensor, ...]], Any]
    """(arguments, results) -> what the block returns."""
    gathered: Counter[str]
    """Functions that ran on gathered tensors."""
    calls: int = 0
    next_check: int = field(default_factory=lambda: CHECKED)

    def is_due(self) -> bool:
        """Count a call, and say whether it is one of those that are compared with the block."""
        self.calls += 1
        if self.calls < self.next_check:
            return False
        self.next_check *= CHECKED
        return True


_compiling: WeakSet[nn.Module] = WeakSet()


def compile_programs(blocks: Iterable[nn.Module]) -> None:
    """Compile the programs of blocks; their first calls, and those that cannot be recorded, stay as they are."""
    _compiling.update(blocks)


class Draft:
    """A call that is being recorded."""

    def __init__(self, module: nn.Module, args: Any, kwargs: Any, mesh: DeviceMesh) -> None:
        self._mesh = mesh
        self._modules = list(module.modules())
        self._arguments = Arguments(args, kwargs, mesh)
        if any(tensor.is_meta for tensor in self._arguments.tensors):
            raise Unrecordable("tensors have no values")
        unchanged = Conditions()
        keep_modules(unchanged, self._modules)
        self._unchanged = unchanged.compile("True")
        keep_modules(self._arguments.conditions, self._modules)
        self._held = dict(held_tensors(self._modules))
        self._recorder = ProgramRecorder(self._arguments.tensors, self._held, (mesh,))
        self._reads = PythonReads(self._modules)
        self._gathered = Counter(mode_of(mesh).gathered)

    def call(self, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        with self._recorder.recording(), self._reads.watching():
            return forward(*args, **kwargs)

    def bind(self, state: Any, result: Any, args: Any, kwargs: Any) -> BoundProgram:
        if reason := self._recorder.reason or self._reads.reason:
            raise Unrecordable(reason)
        self._refuse_changes(args, kwargs)
        outputs = Outputs(result, self._arguments, self._mesh)
        program = self._recorder.program(outputs.tensors)
        conditions = self._arguments.conditions
        keep_reads(conditions, self._reads)
        keep_attributes(conditions, self._held.values())
        held = read_held(conditions, self._modules, list(self._recorder.read), self._held)
        tensors = self._arguments.plain | held
        conditions.keep_tensors([*tensors], [*tensors.values()])
        given = ", ".join(f"{self._arguments.name_of(tensor)}" for tensor in self._arguments.tensors)
        self._arguments.open_carriers()
        inputs = ", ".join((*self._arguments.local_names(), *held))
        return BoundProgram(
            state=state,
            match=conditions.compile(f"({given}{',' if given else ''}), ({inputs}{',' if inputs else ''})"),
            program=program,
            run=self._function(rewrite(program, self._mesh, self._recorder.held_by_number())),
            finish=outputs.finish(),
            gathered=Counter(mode_of(self._mesh).gathered) - self._gathered,
        )

    def _function(self, program: Program) -> Callable[..., tuple[Tensor, ...]]:
        wanted = self._modules[0] in _compiling
        return (compiled(program) if wanted else None) or program.compile()

    def _refuse_changes(self, args: Any, kwargs: Any) -> None:
        """Refuse a call that changed its modules or its arguments' containers: a program would not."""
        try:
            unchanged = self._unchanged((), {})
        except MISSING:
            unchanged = None
        if not unchanged:
            raise Unrecordable("it changes attributes of its modules")
        self._reads.refuse_changes()
        now = Arguments(args, kwargs, self._mesh)
        if [id(tensor) for tensor in now.tensors] != [id(tensor) for tensor in self._arguments.tensors]:
            raise Unrecordable("it changes its arguments")


class Outputs:
    """The tree that a block returned, as source that builds the next one from arguments `a` and results `r`."""

    def __init__(self, result: Any, arguments: Arguments, mesh: DeviceMesh) -> None:
        self.tensors: list[Tensor] = []
        """Results of the program, divided or not."""
        self._arguments, self._mesh = arguments, mesh
        self._conditions = Conditions()
        self._text = self._build(result)

    def finish(self) -> Callable[..., Any]:
        return self._conditions.compile(self._text)

    def _build(self, value: Any) -> str:
        kind = type(value)
        if isinstance(value, Tensor):
            return self._tensor(value)
        if kind is tuple:
            return f"({''.join(f'{self._build(item)}, ' for item in value)})"
        if kind is list:
            return f"[{', '.join(map(self._build, value))}]"
        if kind is dict and all(type(key) is str for key in value):
            return f"{{{', '.join(f'{key!r}: {self._build(item)}' for key, item in value.items())}}}"
        if value is None or (is_comparable(value) and kind in (bool, int, float, str)):
            return self._conditions.bind(value)
        raise Unrecordable(f"it returns a {kind.__name__}")

    def _tensor(self, value: Tensor) -> str:
        for place, argument in enumerate(self._arguments.tensors):
            if value is argument:
                return f"args[{place}]"
        if any(value is tensor for tensor in self.tensors):
            raise Unrecordable("it returns a tensor twice")
        self.tensors.append(value)
        own = f"kwargs[{len(self.tensors) - 1}]"
        if is_divided(value, self._mesh):
            bind = self._conditions.bind
            return f"{bind(divided_result)}({own}, {dim_of(value)}, {bind(self._mesh)}, {pieces_of(value)})"
        if type(value) not in PLAIN:
            raise Unrecordable(f"it returns a {type(value).__name__}")
        return own
