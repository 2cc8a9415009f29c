"""The conditions under which a recorded program is a block's next call, and where the program's tensors come from.

They are Python source too (`condition_source.py`): one function checks arguments, modules and globals in a few
microseconds and returns the program's inputs, or None if something differs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from meshwright.strategies.tensor.condition_source import Conditions
from meshwright.strategies.tensor.layout import PIECES, dim_of, is_divided, part_of, pieces_of
from meshwright.strategies.tensor.memory import MEMORY, OUTDATED, check_unchanged
from meshwright.strategies.tensor.object_state import checks_of, is_comparable
from meshwright.strategies.tensor.python_reads import PythonReads
from meshwright.strategies.tensor.record import PLAIN, Unrecordable
from meshwright.torch_private.dtensor import layout_of, local_tensor
from meshwright.torch_private.modules import HOOKS, OTHER_ATTRIBUTES, REGISTERED

Place = tuple[int, str, str]
"""The module's number in its block, the attribute in which it keeps the tensor, and the tensor's name."""
READ = "read"
"""In place of an attribute: the tensor is what reading the module's attribute of that name gives."""


class Arguments:
    """The tensors among a call's arguments, and the conditions that the arguments set."""

    def __init__(self, args: Any, kwargs: Any, mesh: DeviceMesh) -> None:
        self.tensors: list[Tensor] = []
        self.conditions = Conditions()
        self._mesh = mesh
        self._names: dict[int, str] = {}
        self.plain: dict[str, Tensor] = {}
        """The plain tensors among the arguments, and this rank's parts of divided ones, by name."""
        self._walk("args", tuple(args))
        self._walk("kwargs", dict(kwargs))
        names = [self.name_of(tensor) for tensor in self.tensors]
        if len(names) > 1:  # which of them are one tensor was seen above
            self.conditions.require(f"len({{{', '.join(f'id({name})' for name in names)}}}) == {len(names)}")

    def name_of(self, tensor: Tensor) -> str | None:
        """The name of an argument in the conditions' source; None for another tensor."""
        return self._names.get(id(tensor))

    def local_names(self) -> list[str]:
        return [f"{self.name_of(x)}_own" if isinstance(x, DTensor) else f"{self.name_of(x)}" for x in self.tensors]

    def open_carriers(self) -> None:
        """Read this rank's parts, last of all: it is the only thing that autograd sees."""
        for tensor in self.tensors:
            if isinstance(tensor, DTensor):
                name = self.name_of(tensor)
                self.conditions.assign(f"{name}_own", f"{self.conditions.bind(part_of)}({name})")

    def _walk(self, read: str, value: Any) -> None:
        kind = type(value)
        if isinstance(value, Tensor):
            self._tensor(read, value)
        elif kind in (tuple, list, dict):
            self.conditions.require(f"{read}.__class__ is {kind.__name__} and len({read}) == {len(value)}")
            for key, item in value.items() if kind is dict else enumerate(value):
                if type(key) not in (str, int):
                    raise Unrecordable("an argument has keys that are no words")
                self._walk(f"{read}[{key!r}]", item)
        elif is_comparable(value):
            self.conditions.keep(read, value)
        else:
            raise Unrecordable(f"an argument is a {kind.__name__}")

    def _tensor(self, read: str, value: Tensor) -> None:
        known = self.name_of(value)
        if known is not None:
            self.conditions.require(f"{read} is {known}")
            return
        name = self._names[id(value)] = f"x{len(self.tensors)}"
        self.tensors.append(value)
        conditions = self.conditions
        conditions.assign(name, read)
        if not is_divided(value, self._mesh):
            self.plain[name] = value
            conditions.require(f"{OUTDATED!r} not in {name}.__dict__")
            return
        bind = conditions.bind
        conditions.require(f"{name}.__class__ is {bind(DTensor)} and {name}.requires_grad is {value.requires_grad}")
        same = f"all(map(is_, {bind(layout_of)}({name}), {bind(layout_of(value))}))"
        conditions.require(f"{same} or {bind(_is_divided_along)}({name}, {dim_of(value)}, {bind(self._mesh)})")
        conditions.require(f"{name}.__dict__.get({PIECES!r}, 1) == {pieces_of(value)}")
        conditions.assign("_", f"{MEMORY!r} in {name}.__dict__ and {bind(check_unchanged)}({name})")
        conditions.assign(f"{name}_own", f"{bind(local_tensor)}({name})")
        own = self.plain[f"{name}_own"] = local_tensor(value)
        if type(own) not in PLAIN:
            raise Unrecordable(f"an argument holds a {type(own).__name__}")


def _is_divided_along(x: Any, dim: int, mesh: DeviceMesh) -> bool:
    return is_divided(x, mesh) and dim_of(x) == dim


def held_tensors(modules: list[nn.Module]) -> Iterator[tuple[Place, Tensor]]:
    """What a block's modules hold, by place. A parameter that is read as a copy is there twice."""
    for number, module in enumerate(modules):
        for kind in ("_parameters", "_buffers"):
            for name, tensor in vars(module)[kind].items():
                if tensor is None:
                    continue
                yield (number, kind, name), tensor
                if kind == "_parameters" and isinstance(getattr(type(module), name, None), property):
                    yield (number, READ, name), getattr(module, name)
        for name, value in vars(module).items():
            if isinstance(value, Tensor):
                yield (number, "", name), value


def keep_attributes(conditions: Conditions, held: Iterable[Tensor]) -> None:
    """Require the attributes that tensors of modules have: simple ones, with which authors mark them."""
    for tensor in {id(one): one for one in held}.values():
        own = vars(tensor)
        conditions.keep_length(own)
        for name, value in own.items():
            if not name.startswith("_meshwright") and is_comparable(value):
                conditions.keep_item(own, name, value)


def keep_modules(conditions: Conditions, modules: list[nn.Module]) -> None:
    """Require that a block's modules are what they are now, down to their attributes."""
    for cls in dict.fromkeys(cls for module in modules for cls in _classes(module)):
        _keep_class(conditions, cls)
    for number, module in enumerate(modules):
        own = vars(module)
        conditions.keep_type(module)
        conditions.keep_length(own)
        for name, value in own.items():
            if name in HOOKS:
                _refuse_hooks(conditions, own, name, is_block=number == 0)
            elif name in REGISTERED and not value:
                conditions.keep_empty(own, name)
            elif name in REGISTERED:
                conditions.keep_identity(own, name, value)
                conditions.keep_length(value)
                for key, item in value.items():
                    if name == "_modules" or item is None:
                        conditions.keep_identity(value, key, item)
            elif name not in OTHER_ATTRIBUTES and not getattr(type(value), "changes_are_seen", False):
                conditions.keep_item(own, name, value)


def _classes(module: nn.Module) -> tuple[type, ...]:
    classes = type(module).__mro__
    return classes[: classes.index(nn.Module)]


def _keep_class(conditions: Conditions, cls: type) -> None:
    """Require that the methods and settings of a module's class are those of now."""
    own: Any = vars(cls)  # a view, another one in each read
    conditions.keep_length(own)
    for name, value in own.items():
        if isinstance(value, FunctionType) or (not name.startswith("__") and _can_be_kept(value)):
            conditions.keep_item(own, name, value)


def _can_be_kept(value: Any) -> bool:
    """Whether a class's attribute can be compared. Others, as tables for its subclasses, may be there and unused."""
    try:
        return any(True for _ in checks_of(value))
    except Unrecordable:
        return False


def _refuse_hooks(conditions: Conditions, own: dict[str, Any], name: str, *, is_block: bool) -> None:
    """Hooks of the block itself run around the program; those of modules inside would not run at all."""
    if is_block:
        return
    if own[name]:
        raise Unrecordable("a module inside of it has hooks")
    conditions.keep_empty(own, name)


def keep_reads(conditions: Conditions, reads: PythonReads) -> None:
    """Require that what the block's code reads beside its arguments and modules is what it is now."""
    for space, name, value in reads.globals_read():
        _refuse_tensors(value)
        conditions.keep_item(space, name, value)
    for space, name in reads.missing:
        conditions.require(f"{name!r} not in {conditions.bind(space)}")
    for cls in reads.sized:
        conditions.keep_length(vars(cls))
    conditions.keep_functions([*dict.fromkeys(reads.functions())])
    for cell, value in reads.enclosing_variables():
        _refuse_tensors(value)
        conditions.keep(f"{conditions.bind(cell)}.cell_contents", value)


def _refuse_tensors(value: Any) -> None:
    if isinstance(value, nn.Module | Tensor):
        raise Unrecordable(f"it reads a {type(value).__name__} from elsewhere")


def read_held(
    conditions: Conditions, modules: list[nn.Module], places: list[Place], held: dict[Place, Tensor]
) -> dict[str, Tensor]:
    """Assign the held tensors that a program reads, by name, and require the ties among all of them."""
    found: dict[str, Tensor] = {}
    for place in places:
        name = f"p{len(found)}"
        found[name] = held[place]
        conditions.assign(name, _source(conditions, modules, place))
        for other, tensor in held.items():
            if tensor is held[place] and other != place and other[1] != READ:
                conditions.require(f"{_source(conditions, modules, other)} is {name}")
    return found


def _source(conditions: Conditions, modules: list[nn.Module], place: Place) -> str:
    """The expression that reads a held tensor."""
    number, kind, name = place
    if kind == READ:
        return f"{conditions.bind(modules[number])}.{name}"
    space = vars(modules[number])[kind] if kind else vars(modules[number])
    return f"{conditions.bind(space)}[{name!r}]"


def torch_state() -> tuple[Any, ...]:
    """The switches of torch that change what a function does when it is recorded."""
    return torch.is_grad_enabled(), torch.get_default_dtype()
