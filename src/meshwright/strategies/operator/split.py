"""Operator-wise parallelism: each large operator is divided over the ranks separately and combined right after.

It needs no structure between operators, so it works for models without column and row pairs, such as CNNs. Between
operators every rank of the axis holds the same activations, in plain tensors under plain autograd. The user's modules
and names stay; each divided module gets a subclass of its class, and parameters of the local size.

| operator | divided over | sent in forward; in backward |
| --- | --- | --- |
| linear | outputs | outputs gathered; input's gradient summed |
| linear whose outputs do not divide | inputs | outputs summed; input's gradient gathered |
| convolution, transposed or not | output channels, or groups | as linear over outputs; for groups, gradient gathered |
| embedding | entries, or features where entries do not divide | outputs summed, or gathered; nothing |
| attention | heads | outputs summed; inputs' gradients summed |

Cross-entropy sees gathered logits and stays whole: if it were divided, the logits' whole gradient would be sent, only
for the gather to drop most of it.

Convolutions are always divided, because their work is not proportional to their parameters. The smallest of the other
operators, which together hold less than 1 % of the parameters, stay whole: a message costs more than they do.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, wraps
from itertools import product
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.utils.parametrize import ParametrizationList, is_parametrized

from meshwright.errors import Refused
from meshwright.recording.wrap_forward import wrap_forward
from meshwright.strategies.cuts import Cut, Cuts, narrow
from meshwright.strategies.operator.axis import SMALL, smallest
from meshwright.strategies.operator.rules import Forward, OperatorKind, Way, recognise
from meshwright.strategies.tensor.replay import BlockPrograms


@dataclass(frozen=True, kw_only=True)
class Operator:
    """An operator of a model and how it is divided."""

    name: str
    """The module's name."""
    kind: str
    along: str = ""
    """What is divided: "outputs", "heads"; empty if nothing can be."""
    size: int = 0
    """The number of outputs, heads and so on in the whole operator."""
    parts: int = 1
    why: str = ""
    """Why it stays whole; empty if it is divided."""

    def __str__(self) -> str:
        what = f"{self.name or 'the model'}: {self.kind}"
        return f"{what}, whole: {self.why}" if self.why else f"{what}, {self.size} {self.along} in {self.parts} parts"


@dataclass(frozen=True, kw_only=True)
class OperatorPlan:
    """All operators in the order of the model's modules, divided or with the reason why not."""

    ranks: int
    operators: tuple[Operator, ...]

    @property
    def divided(self) -> tuple[Operator, ...]:
        return tuple(operator for operator in self.operators if not operator.why)

    @property
    def whole(self) -> tuple[Operator, ...]:
        return tuple(operator for operator in self.operators if operator.why)

    def __str__(self) -> str:
        return "\n".join(map(str, self.operators))


def plan_operators(model: nn.Module, ranks: int, read_elsewhere: frozenset[str] = frozenset()) -> OperatorPlan:
    """Decide which of the model's operators to divide over `ranks`, from structure and sizes only.

    `read_elsewhere` names parameters that the model reads outside their module's `forward`, as
    `F.linear(x, self.token.weight)` does. They must stay whole.
    """
    found = _find(model, read_elsewhere)
    rows: dict[str, Operator] = {}
    for group in _tied(found):
        rows |= _choose(group, ranks)
    plan = OperatorPlan(ranks=ranks, operators=tuple(rows[name] for name, one in found.items() if one.is_operator))
    if not plan.divided:
        raise Refused(_nothing_divides(plan, found))
    return plan


def split_operators(model: nn.Module, plan: OperatorPlan, mesh: DeviceMesh, blocks: Sequence[str] = ()) -> Cuts:
    """Divide a model on the meta device as planned, and return the cuts of its divided parameters.

    Blocks with divided operators run recorded programs (`strategies/tensor/replay.py`).
    """
    names: dict[int, list[str]] = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names[id(parameter)].append(name)
    cuts: Cuts = {}
    narrowed: dict[int, nn.Parameter] = {}
    # narrow() identifies parameters by id, so all whole ones must live until the last is replaced.
    whole = list(model.parameters())
    classes: dict[tuple[type, Forward], type[nn.Module]] = {}
    for row in plan.divided:
        module = model.get_submodule(row.name)
        way = next(way for way in recognise(module).ways(module) if way.along == row.along)  # type: ignore[union-attr]
        for path, (dim, pieces) in way.cuts.items():
            cut = Cut(dim=dim, mesh=mesh, pieces=pieces)
            owner_path, _, name = path.rpartition(".")
            owner = module.get_submodule(owner_path)
            if owner._parameters.get(name) is None:  # another stage of a pipeline holds it
                continue
            cuts |= {known: cut for known in names[id(owner._parameters[name])]}
            narrow(owner, name, cut, narrowed)
        _swap_forward(module, way.forward, mesh, classes)
    del whole
    _close_fast_paths(model)
    programs = BlockPrograms(mesh, nullcontext)
    for name in blocks:
        if any(f"{row.name}.".startswith(f"{name}." if name else "") for row in plan.divided):
            wrap_forward(model.get_submodule(name), programs)
    return cuts


@dataclass(frozen=True, eq=False)
class _Found:
    """A module with parameters: an operator, or a module that may share parameters with operators."""

    name: str
    module: nn.Module
    kind: str
    ways: list[Way]
    objection: str

    @cached_property
    def parameters(self) -> dict[str, nn.Parameter]:
        inner = isinstance(self.module, nn.MultiheadAttention)
        return dict(self.module.named_parameters(recurse=inner, remove_duplicate=False))

    @property
    def is_operator(self) -> bool:
        """Whether it gets a row in the plan. Norms, which hold vectors, and parametrizations do not."""
        if isinstance(self.module, ParametrizationList):
            return False
        return recognise(self.module) is not None or any(p.dim() > 1 for p in self.parameters.values())

    @property
    def elements(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters.values())


def _find(model: nn.Module, read_elsewhere: frozenset[str]) -> dict[str, _Found]:
    read = {id(p) for n, p in model.named_parameters(remove_duplicate=False) if n in read_elsewhere}
    inner = {id(m.out_proj) for m in model.modules() if isinstance(m, nn.MultiheadAttention)}
    found: dict[str, _Found] = {}
    for name, module in model.named_modules():
        # Attention reads its out_proj's weight and never calls it: the two are one operator.
        if id(module) not in inner and (one := _inspect(name, module, read)):
            found[name] = one
    small = smallest({name: one.elements for name, one in found.items()}, sum(p.numel() for p in model.parameters()))
    for name in small:
        if not found[name].objection and "convolution" not in found[name].kind:
            found[name] = replace(found[name], objection=_TOO_SMALL)
    return found


_TOO_SMALL = f"it is one of the smallest operators, which together hold less than {SMALL:.0%} of the parameters"


def _inspect(name: str, module: nn.Module, read: set[int]) -> _Found | None:
    kind = recognise(module)
    if kind is None:
        if not any(True for _ in module.parameters(recurse=False)):
            return None
        return _Found(name, module, type(module).__name__, [], "no rule divides such a module")
    objection = _objection(module, kind)
    one = _Found(name, module, kind.name, [] if objection else kind.ways(module), objection)
    return one if objection else replace(one, objection=_hidden_use(one, read))


def _objection(module: nn.Module, kind: OperatorKind) -> str:
    base = next((cls for cls in kind.classes if isinstance(module, cls)), None)
    if base is not None and (type(module).forward is not base.forward or "forward" in module.__dict__):
        return f"its forward is not nn.{base.__name__}'s"
    if any(is_parametrized(inner) for inner in module.modules()):
        return "its parameters are parametrized"
    return kind.objection(module)


def _hidden_use(one: _Found, read: set[int]) -> str:
    for name in {name: None for way in one.ways for name in way.cuts}:
        if name not in one.parameters:  # PyTorch's older weight_norm, spectral_norm and pruning
            return f"its {name} is computed from other parameters"
        if id(one.parameters[name]) in read:
            return f"its {name} is also read outside of its forward"
    return ""


def _tied(found: dict[str, _Found]) -> list[list[_Found]]:
    """Group operators that share parameters; most groups have one member."""
    group_of: dict[int, list[_Found]] = {}
    for one in found.values():
        group = [one]
        for parameter in one.parameters.values():
            group = [*(other for other in group_of.get(id(parameter), []) if other not in group), *group]
        group_of |= {id(parameter): group for member in group for parameter in member.parameters.values()}
    return list({id(group): group for group in group_of.values()}.values())


def _choose(group: list[_Found], ranks: int) -> dict[str, Operator]:
    """Choose a way for each operator of a group such that shared parameters are cut the same; else all stay whole."""
    reasons = {one.name: one.objection or _misfit(one, ranks) for one in group}
    if not any(reasons.values()):
        fitting = [[way for way in one.ways if way.size % ranks == 0] for one in group]
        for ways in product(*fitting):
            if _alike(group, ways):
                return {one.name: _row(one, way, parts=ranks) for one, way in zip(group, ways, strict=True)}
    end = "which stays whole" if any(reasons.values()) else "which divides differently"
    for one in group:
        others = " and ".join(other.name or "the model" for other in group if other is not one)
        reasons[one.name] = reasons[one.name] or f"it shares a parameter with {others}, {end}"
    return {one.name: _row(one, one.ways[0] if one.ways else None, why=reasons[one.name]) for one in group}


def _row(one: _Found, way: Way | None, parts: int = 1, why: str = "") -> Operator:
    along, size = (way.along, way.size) if way else ("", 0)
    return Operator(name=one.name, kind=one.kind, along=along, size=size, parts=parts, why=why)


def _misfit(one: _Found, ranks: int) -> str:
    if any(way.size % ranks == 0 for way in one.ways):
        return ""
    return f"its {' and '.join(f'{way.size} {way.along}' for way in one.ways)} do not divide by {ranks}"


def _alike(group: list[_Found], ways: tuple[Way, ...]) -> bool:
    seen: dict[int, tuple[int, int] | None] = {}
    for one, way in zip(group, ways, strict=True):
        for name, parameter in one.parameters.items():
            if seen.setdefault(id(parameter), way.cuts.get(name)) != way.cuts.get(name):
                return False
    return True


def _nothing_divides(plan: OperatorPlan, found: dict[str, _Found]) -> str:
    sizes = sorted({way.size for one in found.values() if not one.objection for way in one.ways})
    divide = [n for n in range(2, 65) if n != plan.ranks and any(size % n == 0 for size in sizes)]
    first = "; ".join(map(str, plan.operators[:4])) or "the model has none"
    more = f"; and {len(plan.operators) - 4} more" if len(plan.operators) > 4 else ""
    advice = f"op={' or op='.join(map(str, divide[:4]))} would divide some" if divide else "choose another strategy"
    return (
        f"op={plan.ranks} divides linear, convolution, embedding and attention operators over {plan.ranks} ranks, "
        f"but can divide none here ({first}{more}); {advice}."
    )


def _swap_forward(
    module: nn.Module, forward: Forward, mesh: DeviceMesh, classes: dict[tuple[type, Forward], type[nn.Module]]
) -> None:
    """Give a module a subclass with the new forward. Equal modules share it, so that torch.compile compiles it once."""
    cls = type(module)
    if (cls, forward) not in classes:

        @wraps(cls.forward)
        def divided(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return forward(self, mesh, *args, **kwargs)

        names = {"forward": divided, "__module__": cls.__module__, "__qualname__": cls.__qualname__}
        classes[cls, forward] = type(cls.__name__, (cls,), names | {"__doc__": cls.__doc__})
    module.__class__ = classes[cls, forward]


def _close_fast_paths(model: nn.Module) -> None:
    """Switch off PyTorch's fused kernels for encoders in inference, which would read divided weights."""
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoderLayer):
            module.activation_relu_or_gelu = 0
        if isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = False
