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
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from meshwright.environment import programs_wanted
from meshwright.errors import Refused
from meshwright.strategies.recorder import SELECTIVE, choices
from meshwright.strategies.tensor.conditions import torch_state
from meshwright.strategies.tensor.draft import MISSING, BoundProgram, Draft
from meshwright.strategies.tensor.matrix import forget_input
from meshwright.strategies.tensor.mode import DividedFunctions, mode_of, tensor_region
from meshwright.strategies.tensor.record import Unrecordable
from meshwright.strategies.tensor.rules import without_fusing
from meshwright.torch_private.autograd import backward_id, saves_by_hooks
from meshwright.torch_private.modes import function_modes, only_mode, without_torch_function
from meshwright.torch_private.modules import has_global_hooks

ATTEMPTS = 3
"""Calls of a block that could not be recorded, after which nobody tries again."""
PROGRAMS = 8
"""Programs of one block: for training, evaluation, a last batch of another shape and the like."""


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


_states: WeakKeyDictionary[nn.Module, BlockState] = WeakKeyDictionary()


def program_state(block: nn.Module) -> BlockState:
    """What was recorded of a block, or why nothing was."""
    found = _states.get(block)
    if found is None:
        found = _states[block] = BlockState()
    return found


class Surroundings(NamedTuple):
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
            if mode.mesh is not mesh and mode.mesh != mesh:
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

    def __init__(self, mesh: DeviceMesh, region: Callable[[], AbstractContextManager[Any]] | None = None) -> None:
        """`region` is the context of a block that runs as it is: by default that of divided tensors."""
        self._mesh = mesh
        self._region = region or partial(tensor_region, mesh)

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
        if bound.gathered:
            mode_of(self._mesh).gathered.update(bound.gathered)
        with without_torch_function() if around.watcher is None else only_mode(around.watcher):
            results = bound.run(*inputs)
        del inputs
        with without_torch_function():
            return bound.finish(arguments, results)

    def _run_plain(self, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        with self._region(), without_fusing():
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
                except MISSING:
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
            _note_failure(block, module, str(why))
            return self._run_plain(forward, args, kwargs)
        with self._region(), without_fusing():
            result = draft.call(forward, args, kwargs)
        try:
            with without_torch_function():
                bound = draft.bind(around.state, result, args, kwargs)
        except Unrecordable as why:
            _note_failure(block, module, str(why))
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


_told: set[tuple[type, str]] = set()


def _note_failure(block: BlockState, module: nn.Module, reason: str) -> None:
    """Count an attempt that failed; after the last one say once that such blocks stay slow, and why."""
    block.failures, block.reason = block.failures + 1, reason
    kind = (type(module), reason)
    if block.failures < ATTEMPTS or kind in _told or not any(module.children()) or dist.get_rank() != 0:
        return
    _told.add(kind)
    hint = " Call the model with use_cache=False, or set it in its config." if reason.endswith("Cache") else ""
    warnings.warn(
        f"{type(module).__name__} runs without a recorded program, which costs the host several times as much: "
        f"{reason}.{hint}",
        stacklevel=2,
    )
