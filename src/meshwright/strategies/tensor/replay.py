"""Runs a block's recorded program where its conditions hold, and otherwise the block as it is.

What the tensor region decides for each function is the same in every call of a block with the same shapes and flags. So
the first call is recorded while it runs (`record.py`), and the next ones run the program on plain local tensors: no
mode, no divided tensors, none of the model's Python code. Both send the same messages in the same order, so ranks need
not agree on which of them they run. A checkpointed block runs in backward as it ran in forward.

A program is compared with the block from time to time: its 8th, 64th, 512th... call runs as it is and is recorded
again. A program that has become another one although all conditions hold is an error.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from meshwright.environment import programs_wanted
from meshwright.errors import Refused
from meshwright.strategies.recorder import SELECTIVE, choices
from meshwright.strategies.tensor.compiled import compiled
from meshwright.strategies.tensor.conditions import (
    Arguments,
    Conditions,
    held_tensors,
    keep_modules,
    keep_reads,
    read_held,
    torch_state,
)
from meshwright.strategies.tensor.layout import dim_of, divided_result, is_divided, pieces_of
from meshwright.strategies.tensor.matrix import forget_input
from meshwright.strategies.tensor.mode import DividedFunctions, mode_of, tensor_region
from meshwright.strategies.tensor.program import Program
from meshwright.strategies.tensor.python_reads import PythonReads, is_comparable
from meshwright.strategies.tensor.record import PLAIN, ProgramRecorder, Unrecordable
from meshwright.strategies.tensor.rewrite import rewrite
from meshwright.torch_private.autograd import backward_id, saves_by_hooks
from meshwright.torch_private.modes import function_modes, only_mode, without_torch_function
from meshwright.torch_private.modules import has_global_hooks

ATTEMPTS = 3
"""Calls of a block that could not be recorded, after which nobody tries again."""
PROGRAMS = 8
"""Programs of one block: for training, evaluation, a last batch of another shape and the like."""
CHECKED = 8
"""A program is compared with the block in the calls whose number is a power of this."""

_MISSING = (KeyError, AttributeError, IndexError, TypeError)
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


@dataclass
class BlockState:
    programs: list[BoundProgram] = field(default_factory=list)
    failures: int = 0
    reason: str = ""
    """Why the last attempt failed."""


_enabled = programs_wanted()


def recording(wanted: bool) -> None:
    """Switch programs on or off in this process. Off, blocks run as they are."""
    global _enabled
    _enabled = wanted


_compiling: WeakSet[nn.Module] = WeakSet()


def compile_programs(blocks: Iterable[nn.Module]) -> None:
    """Compile the programs of blocks; their first calls, and those that cannot be recorded, stay as they are."""
    _compiling.update(blocks)


_states: WeakKeyDictionary[nn.Module, BlockState] = WeakKeyDictionary()


def program_state(block: nn.Module) -> BlockState:
    """What was recorded of a block, or why nothing was."""
    found = _states.get(block)
    if found is None:
        found = _states[block] = BlockState()
    return found


@dataclass(frozen=True)
class Surroundings:
    """What surrounds a call beside its arguments."""

    state: tuple[Any, ...]
    """Torch's switches, and what modes are active."""
    watcher: Any = None
    """A mode that must see the program's functions."""


def _surroundings(mesh: DeviceMesh) -> Surroundings | None:
    """None where nothing is recorded."""
    if torch.is_inference_mode_enabled() or has_global_hooks() or torch.is_autocast_enabled("cpu"):
        return None
    if torch.cuda.is_initialized() and torch.is_autocast_enabled("cuda"):
        return None
    modes: dict[Any, None] = {"divided": None}
    watcher: Any = None
    for mode in function_modes():
        if isinstance(mode, DividedFunctions):
            if mode.mesh != mesh:
                return None
        elif (name := getattr(mode, "recorded_as", None)) is not None:
            modes[name] = None
            watcher = mode if name == SELECTIVE else watcher
        else:
            return None
    # A region that the model's author checkpoints must run twice in the same way, which only its own code promises.
    by_hooks = saves_by_hooks(watcher.hooks[0] if watcher is not None else None)
    if choices.get() is None and (by_hooks or backward_id() != -1):
        return None
    return Surroundings((*torch_state(), *modes), watcher)


class BlockPrograms:
    """The programs of blocks, in place of their `forward`."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self._mesh = mesh

    def __call__(self, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        forget_input()  # a program knows nothing of the copies of its caller
        around, made = _surroundings(self._mesh) if _enabled else None, choices.get()
        if made is not None and made.repeats:
            return self._repeat(made.take(), around, module, forward, args, kwargs)
        block = program_state(module)
        found = self._find(block.programs, around, args, kwargs) if around is not None else None
        known = found[0] if found is not None else None
        due = known is not None and known.is_due()
        if made is not None:
            made.add(None if due else known)
        if around is None:
            return self._run_plain(forward, args, kwargs)
        if found is None or due:
            return self._record(block, around, module, forward, args, kwargs, known)
        return self._run(around, *found)

    def _repeat(
        self,
        bound: BoundProgram | None,
        around: Surroundings | None,
        module: nn.Module,
        forward: Callable[..., Any],
        args: Any,
        kwargs: Any,
    ) -> Any:
        """Run a checkpointed block again as it ran first."""
        if bound is None:
            return self._run_plain(forward, args, kwargs)
        found = self._find([bound], around, args, kwargs) if around is not None else None
        if around is None or found is None:
            raise Refused(
                f"A checkpointed block ({type(module).__name__}) is not in backward what it was in forward: its "
                "attributes or settings have changed. Keep them until backward is over."
            )
        return self._run(around, *found)

    def _run(
        self, around: Surroundings, bound: BoundProgram, arguments: tuple[Any, ...], inputs: tuple[Tensor, ...]
    ) -> Any:
        mode_of(self._mesh).gathered.update(bound.gathered)
        if around.watcher is not None:
            with only_mode(around.watcher):
                results = bound.run(*inputs)
        else:
            with without_torch_function():
                results = bound.run(*inputs)
        del inputs
        with without_torch_function():
            return bound.finish(arguments, results)

    def _run_plain(self, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        with tensor_region(self._mesh):
            return forward(*args, **kwargs)

    def _find(
        self, programs: list[BoundProgram], around: Surroundings, args: Any, kwargs: Any
    ) -> tuple[BoundProgram, tuple[Any, ...], tuple[Tensor, ...]] | None:
        with without_torch_function():
            for bound in programs:
                if bound.state != around.state:
                    continue
                try:
                    found = bound.match(args, kwargs)
                except _MISSING:
                    found = None
                if found is not None:
                    return bound, *found
        return None

    def _record(
        self,
        block: BlockState,
        around: Surroundings,
        module: nn.Module,
        forward: Callable[..., Any],
        args: Any,
        kwargs: Any,
        known: BoundProgram | None,
    ) -> Any:
        """Run the block as it is and record it; with `known`, compare what was recorded with that."""
        full = known is None and (block.failures >= ATTEMPTS or len(block.programs) >= PROGRAMS)
        if full or sys.getprofile() is not None:  # recording needs the place of a profiler
            return self._run_plain(forward, args, kwargs)
        try:
            with without_torch_function():
                draft = Draft(module, args, kwargs, self._mesh)
        except Unrecordable as why:
            return self._give_up(block, str(why), forward, args, kwargs)
        with tensor_region(self._mesh):
            result = draft.call(forward, args, kwargs)
        try:
            with without_torch_function():
                bound = draft.bind(around.state, result, args, kwargs)
        except Unrecordable as why:
            block.failures, block.reason = block.failures + 1, str(why)
            if known is not None:
                block.programs.remove(known)
            return result
        if known is None:
            block.programs.insert(0, bound)
        elif not known.program.same_as(bound.program):
            raise Refused(
                f"A block ({type(module).__name__}) does other things than in its first calls, although its inputs, "
                "attributes and settings are the same, so the last steps may be wrong. Its forward depends on "
                "something that cannot be seen; set MESHWRIGHT_PROGRAMS=0 to run it as it is in every step."
            )
        return result

    def _give_up(self, block: BlockState, reason: str, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        block.failures, block.reason = block.failures + 1, reason
        return self._run_plain(forward, args, kwargs)


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
        self._reads = PythonReads()
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
        held = read_held(conditions, self._modules, list(self._recorder.read), self._held)
        given = ", ".join(f"{self._arguments.name_of(tensor)}" for tensor in self._arguments.tensors)
        self._arguments.open_carriers()
        inputs = ", ".join((*self._arguments.local_names(), *held))
        return BoundProgram(
            state=state,
            match=conditions.compile(f"({given}{',' if given else ''}), ({inputs}{',' if inputs else ''})"),
            program=program,
            run=self._function(rewrite(program, self._mesh)),
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
        except _MISSING:
            unchanged = None
        if not unchanged:
            raise Unrecordable("it changes attributes of its modules")
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
