"""Evaluate expressions of a script that depend on literals alone, as one process without a GPU would."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

UNKNOWN: Any = object()
"""Stands for a value that is known only when the script runs."""
_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_COMPARED: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
    ast.In: lambda a, b: a in b,
    ast.NotIn: lambda a, b: a not in b,
}
_PLAIN: dict[str, Callable[..., Any]] = {
    "int": int,
    "float": float,
    "bool": bool,
    "str": str,
    "len": len,
    "min": min,
    "max": max,
    "abs": abs,
}
_ALONE: dict[str, Any] = {
    "torch.cuda.is_available": False,
    "torch.accelerator.is_available": False,
    "torch.backends.mps.is_available": False,
    "torch.cuda.device_count": 0,
    "torch.accelerator.device_count": 0,
    "torch.distributed.is_available": False,
    "torch.distributed.is_initialized": False,
    "torch.distributed.get_rank": 0,
    "torch.distributed.get_world_size": 1,
}
RANKED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "SLURM_PROCID")
LARGEST = 10**12
"""Numbers and texts beyond this size are left unknown."""


def evaluate(node: ast.AST, known: Mapping[str, Any], dotted: Callable[[ast.AST], str]) -> Any:
    """The value of an expression, or UNKNOWN. `known` has the values of names; `dotted` resolves imports."""

    def of(part: ast.AST) -> Any:
        try:
            value = _one(part)
        except (ArithmeticError, TypeError, ValueError, LookupError, AttributeError, RecursionError):
            return UNKNOWN
        is_large = (isinstance(value, int | float) and not abs(value) < LARGEST) and value not in (math.inf, -math.inf)
        return UNKNOWN if is_large or (isinstance(value, str | list) and len(value) > 10_000) else value

    def _one(part: ast.AST) -> Any:
        match part:
            case ast.Constant():
                return part.value
            case ast.Name():
                return known.get(part.id, UNKNOWN)
            case ast.Attribute():
                base = of(part.value)
                return vars(base).get(part.attr, UNKNOWN) if isinstance(base, SimpleNamespace) else UNKNOWN
            case ast.Subscript():
                base, index = of(part.value), of(part.slice)
                return UNKNOWN if UNKNOWN in (base, index) or isinstance(part.slice, ast.Slice) else base[index]
            case ast.List() | ast.Tuple():
                items = [of(one) for one in part.elts]
                return UNKNOWN if UNKNOWN in items else items if isinstance(part, ast.List) else tuple(items)
            case ast.Dict():
                pairs = [
                    (UNKNOWN if key is None else of(key), of(value))
                    for key, value in zip(part.keys, part.values, strict=True)
                ]
                return (
                    UNKNOWN if any(key is UNKNOWN for key, _ in pairs) else {k: v for k, v in pairs if v is not UNKNOWN}
                )
            case ast.UnaryOp():
                value = of(part.operand)
                if value is UNKNOWN:
                    return UNKNOWN
                return (
                    not value if isinstance(part.op, ast.Not) else -value if isinstance(part.op, ast.USub) else +value
                )
            case ast.BinOp():
                left, right = of(part.left), of(part.right)
                if UNKNOWN in (left, right) or type(part.op) not in _BINARY:
                    return left**right if isinstance(part.op, ast.Pow) and _small(left, right) else UNKNOWN
                return (
                    _BINARY[type(part.op)](left, right)
                    if _small(left, right) or isinstance(part.op, ast.Add)
                    else UNKNOWN
                )
            case ast.BoolOp():
                return _joined([of(one) for one in part.values], is_and=isinstance(part.op, ast.And))
            case ast.Compare():
                return _compared(
                    [of(part.left), *(_environment(one, dotted) or of(one) for one in part.comparators)], part.ops
                )
            case ast.IfExp():
                test = of(part.test)
                return UNKNOWN if test is UNKNOWN else of(part.body if test else part.orelse)
            case ast.Call():
                return _called(part)
        return UNKNOWN

    def _called(call: ast.Call) -> Any:
        name = dotted(call.func)
        if name in _ALONE:
            return _ALONE[name]
        arguments = [of(one) for one in call.args]
        if name in ("os.environ.get", "os.getenv") and arguments and arguments[0] in RANKED:
            return arguments[1] if len(arguments) > 1 else None
        if name == "dict" and not call.args:
            return {one.arg: value for one in call.keywords if one.arg and (value := of(one.value)) is not UNKNOWN}
        if name in _PLAIN and not call.keywords and UNKNOWN not in arguments:
            return _PLAIN[name](*arguments)
        return UNKNOWN

    return of(node)


def _small(*values: Any) -> bool:
    return all(isinstance(value, int | float) and abs(value) < 1e9 for value in values)


def _joined(values: list[Any], *, is_and: bool) -> Any:
    """`and` and `or`, also if one side decides and the other is unknown."""
    for value in values:
        if value is UNKNOWN:
            decided = [other for other in values if other is not UNKNOWN and bool(other) is not is_and]
            return decided[0] if decided else UNKNOWN
        if bool(value) is not is_and:
            return value
    return values[-1]


def _compared(values: list[Any], operators: list[ast.cmpop]) -> Any:
    if UNKNOWN in values or any(type(one) not in _COMPARED for one in operators):
        return UNKNOWN
    pairs = zip(values, values[1:], operators, strict=False)
    return all(_COMPARED[type(one)](left, right) for left, right, one in pairs)


def _environment(node: ast.AST, dotted: Callable[[ast.AST], str]) -> Any:
    """The environment of a process that no launcher started: it has none of the names that launchers set."""
    return {"PATH": ""} if dotted(node) == "os.environ" else None
