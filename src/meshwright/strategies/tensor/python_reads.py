"""What a block's Python code reads and changes beside tensors: the state that a recorded program depends on.

A program leaves the model's Python code out, so it is right only while that code would do the same again. The code that
ran is known (`sys.setprofile`), and so are the globals and the variables of enclosing functions that it names, and the
attributes of modules and other objects in reach. All of them are written down as checks; a call for which one fails
does not run the program. State that cannot be compared, and code whose results nobody can foresee (clocks, files,
context variables, torch's switches, random numbers of Python), is refused.
"""

from __future__ import annotations

import builtins
import enum
import gc
import importlib.util
import inspect
import os
import random
import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from types import BuiltinFunctionType, CellType, CodeType, FrameType, FunctionType, ModuleType
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from meshwright.strategies.tensor.code_names import Import, names_in
from meshwright.strategies.tensor.condition_source import Conditions
from meshwright.strategies.tensor.found_functions import closure_of, function_in, functions_below
from meshwright.strategies.tensor.object_state import CACHED
from meshwright.strategies.tensor.record import Unrecordable
from meshwright.torch_private.modules import SETTINGS

_TORCH = str(Path(torch.__file__).parent)
_LAYERS = str(Path(_TORCH, "nn", "modules"))
_CALLS = str(Path(_LAYERS, "module.py"))
_OURS = str(Path(__file__).parents[2])
_LIBRARY = str(Path(enum.__file__).parent)
_UNFORESEEN = ("time", "random", "_random", "posix", "io", "_io", "_contextvars", "datetime", "_thread")
_SWITCHES_SEEN = (
    *("is_grad_enabled", "_set_grad_enabled", "get_default_dtype", "is_autocast_enabled", "_is_tracing"),
    *("is_inference_mode_enabled", "_get_tracing_state"),
)
"""Functions of torch that read switches which a program's state has, or which exclude programs."""


class PythonReads:
    """Watches the Python code of one call."""

    def __init__(self, parts: Collection[nn.Module]) -> None:
        """`parts` are the block and the modules inside of it."""
        self.reason: str | None = None
        self.sized: dict[type, None] = {}
        """Classes in which a method of a base was looked up: if they define more, they may define that."""
        self.missing: list[tuple[dict[str, Any], str]] = []
        """Globals that the code names and that are not there."""
        self._parts = {id(module): module for module in parts}
        self._read: dict[tuple[int, str], tuple[Any, Any]] = {}
        self._before = Conditions()
        """The state of what was read, before the code could change it."""
        self._seen: set[CodeType] = set()
        self._cached: set[CodeType] = set()
        self._methods: set[tuple[CodeType, type]] = set()
        self._enclosed: dict[tuple[Any, ...], tuple[CodeType, dict[str, Any], Conditions]] = {}

    @contextmanager
    def watching(self) -> Iterator[None]:
        drawn = _random_states()
        sys.setprofile(self._event)
        try:
            yield
        finally:
            sys.setprofile(None)
        if _random_states() != drawn:
            self.reason = self.reason or "it draws random numbers of Python or numpy"

    def refuse_changes(self) -> None:
        """Refuse a call that changed what it had read: a program would not."""
        for conditions in (self._before, *(kept for _, _, kept in self._enclosed_before())):
            if not conditions.compile("True")((), {}):
                raise Unrecordable("it changes what it reads outside of itself")

    def globals_read(self) -> Iterator[tuple[Mapping[str, Any], str, Any]]:
        """Globals that the code names, and attributes of global objects: the dict that holds each, name and value."""
        for (_, name), (space, value) in self._read.items():
            yield space, name, value

    def functions(self) -> Iterator[FunctionType]:
        """The model's functions that ran and that were read or that modules hold: their code may be exchanged."""
        ran = {code for code in self._seen if is_of_model(code)}
        for value in self._known():
            function = function_in(value)
            if isinstance(function, FunctionType) and function.__code__ in ran:
                yield function

    def _known(self) -> Iterator[Any]:
        """What was read, and what the modules and their classes hold."""
        yield from (value for _, value in self._read.values())
        yield from (value for part in self._parts.values() for value in vars(part).values())
        for cls in {cls for part in self._parts.values() for cls in type(part).__mro__}:
            yield from vars(cls).values()

    def enclosing_variables(self) -> Iterator[tuple[CellType, Any]]:
        """The variables of enclosing functions that the code reads, and their values."""
        read = [*self._enclosed_before()]
        made = self._functions_of({code for code, _, _ in read}) if read else []
        for code, values, _ in read:
            closures = [cells for function in made if (cells := closure_of(function, code, values)) is not None]
            if not closures:
                raise Unrecordable(f"{code.co_qualname} reads variables of the function around it")
            for cells in closures:
                yield from ((cells[name], value) for name, value in values.items())

    def _functions_of(self, codes: set[CodeType]) -> list[FunctionType]:
        """The functions with this code. The garbage collector does not name those that were made before a freeze."""
        named = [one for one in gc.get_referrers(*codes) if isinstance(one, FunctionType)]
        found = {id(one): one for one in (*named, *functions_below(self._known()))}
        return [one for one in found.values() if one.__code__ in codes]

    def _enclosed_before(self) -> Iterator[tuple[CodeType, dict[str, Any], Conditions]]:
        """What functions read that were not made in this call."""
        inside = {const for code in self._seen for const in code.co_consts if isinstance(const, CodeType)}
        yield from (one for one in self._enclosed.values() if one[0] not in inside)

    def _event(self, frame: FrameType, event: str, arg: Any) -> None:
        if event == "c_call":
            self._check_call(frame, arg)
        elif event == "call":
            code = frame.f_code
            if code.co_name == "forward":
                self._refuse_other_module(frame)
            if is_of_model(code):
                self._note_method(frame)
                self._note_enclosed(frame)
            if code not in self._seen:
                self._seen.add(code)
                self._enter(frame)

    def _enter(self, frame: FrameType) -> None:
        """Look at code that runs for the first time."""
        code, space = frame.f_code, frame.f_globals
        if is_of_model(code) or space is vars(os):  # which reads the environment from its global
            self._inspect(frame)
        elif space is vars(random):
            self._refuse("it draws random numbers of Python")
        elif space is vars(importlib) and code.co_name == "import_module":
            self._refuse("it imports modules by name")
        elif code.co_filename.startswith(_LAYERS) and code.co_filename != _CALLS:
            for chain in names_in(code).read:
                if isinstance(space.get(chain[0]), ModuleType):  # a function of torch that may be exchanged
                    self._follow(space, chain)

    def _check_call(self, caller: FrameType, called: Any) -> None:
        owner = getattr(called, "__self__", None)
        if owner is SETTINGS:
            known = called.__name__ in _SWITCHES_SEEN or called.__name__.startswith("_has_torch_function")
            if not known and _asked_by_model(caller):
                self._refuse(f"{called.__name__} asks for a setting of torch")
        elif isinstance(owner, torch.Generator) and not _is_below_ours(caller):
            self._refuse("it seeds or reads a generator of random numbers")
        elif is_of_model(caller.f_code):
            source = owner if isinstance(owner, type) else type(owner)
            module = getattr(called, "__module__", None) or getattr(source, "__module__", None)
            if module in _UNFORESEEN or isinstance(owner, ContextVar) or called is globals:
                self._refuse(f"{module}.{called.__name__} is called")

    def _refuse(self, reason: str) -> None:
        self.reason = self.reason or reason

    def _refuse_other_module(self, frame: FrameType) -> None:
        module = _first_argument(frame)
        if isinstance(module, nn.Module) and id(module) not in self._parts:
            self._refuse(f"it runs a {type(module).__name__} that is no part of it")

    def _inspect(self, frame: FrameType) -> None:
        names = names_in(frame.f_code)
        if names.changed:
            self._refuse(f"{frame.f_code.co_qualname} changes the variable {names.changed} outside of itself")
        for chain in names.read:
            if chain[0] not in frame.f_globals and not hasattr(builtins, chain[0]):
                self.missing.append((frame.f_globals, chain[0]))
            self._follow(frame.f_globals, chain)
        for one in names.imports:
            self._note_import(one, frame)

    def _note(self, space: Mapping[str, Any], name: str, value: Any, owner: Any = None) -> None:
        """`owner` is the class whose attributes `space` is a view of."""
        key = id(space if owner is None else owner), name
        if key in self._read:
            return
        self._read[key] = space, value
        try:
            self._before.keep_item(space, name, value)
        except Unrecordable as why:
            self._refuse(str(why))

    def _note_enclosed(self, frame: FrameType) -> None:
        code = frame.f_code
        if not code.co_freevars:
            return
        held = frame.f_locals
        values = {name: held[name] for name in code.co_freevars if name in held}
        key = code, *map(id, values.values())
        if key in self._enclosed:
            return
        conditions = Conditions()
        self._enclosed[key] = code, values, conditions
        for value in values.values():
            with suppress(Unrecordable):  # said again if the function was there before
                conditions.keep(conditions.bind(value), value)

    def _note_method(self, frame: FrameType) -> None:
        """Note from which class a method comes, as another one may be put there or in front of it."""
        code, owner = frame.f_code, _first_argument(frame)
        cls = owner if isinstance(owner, type) else type(owner)
        if owner is None or isinstance(owner, Tensor) or (code, cls) in self._methods:
            return
        self._methods.add((code, cls))
        for place, one in enumerate(cls.__mro__):
            found = vars(one).get(code.co_name)
            if found is not None and getattr(function_in(found), "__code__", None) is code:
                self._note(vars(one), code.co_name, found, owner=one)
                self.sized |= dict.fromkeys(cls.__mro__[:place])
                return

    def _note_import(self, one: Import, frame: FrameType) -> None:
        """Note what code imports as it runs."""
        name = one.module
        if one.level:
            name = importlib.util.resolve_name("." * one.level + name, frame.f_globals.get("__package__") or "")
        if (module := sys.modules.get(name)) is None:
            self._refuse(f"it imports {name}")
            return
        if name.partition(".")[0] in ("torch", "meshwright", *sys.stdlib_module_names):
            return
        top = sys.modules[name.partition(".")[0]]
        for space, key in [(vars(module), key) for key in one.names] or self._attributes((module, top), frame):
            if isinstance(value := space.get(key), ModuleType):
                for inner, each in self._attributes((value,), frame):
                    self._follow(inner, (each,))
            elif key in space:
                self._follow(space, (key,))

    def _attributes(self, modules: tuple[ModuleType, ...], frame: FrameType) -> list[tuple[dict[str, Any], str]]:
        """Attributes of modules that the code may read."""
        return [(vars(one), name) for one in modules for name in frame.f_code.co_names if name in vars(one)]

    def _follow(self, space: Any, chain: tuple[str, ...]) -> None:
        """Note what `a.b.c` reads, as far as each is kept in the dict of the one before, or of its class."""
        owner: Any = None
        of_torch = False
        for name in chain:
            if name not in space:
                return
            value = space[name]
            if value is sys.modules:
                self._refuse("it looks modules up in sys.modules")
            elif isinstance(value, ModuleType):
                of_torch = value.__name__.partition(".")[0] == "torch"
            elif of_torch and not isinstance(value, FunctionType | BuiltinFunctionType):
                return
            else:
                self._note(space, name, value, owner)
            if of_torch and not isinstance(value, ModuleType):
                return
            if isinstance(value, CACHED):
                self._follow_cached(value)
            owner = None
            if isinstance(value, type):
                bases: list[type] = [*inspect.getmro(value), *inspect.getmro(type(value))]
                owner = next((one for one in bases if chain[-1] in vars(one)), value)
                self.sized |= dict.fromkeys(bases[: bases.index(owner)])
                space = vars(owner)
            elif isinstance(inner := getattr(value, "__dict__", None), dict):
                space = inner
            else:
                return

    def _follow_cached(self, cached: Any) -> None:
        """Note what a function reads whose result may come from a cache, which somebody may empty."""
        function = cached.__wrapped__
        if not isinstance(function, FunctionType) or function.__code__ in self._cached:
            return
        self._cached.add(function.__code__)
        if is_of_model(function.__code__):
            for chain in names_in(function.__code__).read:
                self._follow(function.__globals__, chain)


def _first_argument(frame: FrameType) -> Any:
    code = frame.f_code
    return frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None


def _asked_by_model(frame: FrameType) -> bool:
    """Whether a model's code, or a function of torch that it calls, asks torch for a setting."""
    if is_of_model(frame.f_code):
        return True
    above = frame.f_back
    own = frame.f_code.co_filename
    return own.startswith(_TORCH) and not own.startswith(_LAYERS) and above is not None and is_of_model(above.f_code)


def _is_below_ours(frame: FrameType | None) -> bool:
    """Whether our code runs this, as a rule for dropout that every rank draws alike, and not the model's."""
    while frame is not None and not is_of_model(frame.f_code):
        if frame.f_code.co_filename.startswith(_OURS):
            return True
        frame = frame.f_back
    return False


def _random_states() -> tuple[Any, ...]:
    """The states of Python's and numpy's generators."""
    of_numpy: Any = numpy.random.get_state()
    return random.getstate(), of_numpy[1].tobytes(), of_numpy[2]


def is_of_model(code: CodeType) -> bool:
    """Whether code is the model author's, and neither torch's, ours, nor Python's own."""
    file = code.co_filename
    if file.startswith((_TORCH, _OURS, "<")):
        return False
    return not file.startswith(_LIBRARY) or "-packages" in file
