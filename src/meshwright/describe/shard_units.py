"""Find a model's shard units: the modules whose parameters FSDP gathers, frees and reduces together.

By default these are the blocks, and every module around them that is as large as a block, such as the embedding and
the head of a language model: together with the rest they would stay gathered for the whole step. `Job(units=...)`
chooses others.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from fnmatch import fnmatchcase

from torch import nn
from torch.nn.utils.parametrize import ParametrizationList

from meshwright.describe.blocks import CONTAINERS, own_parameters, sharing_modules
from meshwright.errors import JobError


def candidate_units(model: nn.Module, blocks: Sequence[str], hint: Sequence[str] | int | None) -> tuple[str, ...]:
    """Names of modules that may be units, in the order of modules, as far as the model's structure shows."""
    if hint is None:
        chosen = {*blocks, *_large_around(model, blocks)}
        return tuple(name for name, _ in model.named_modules() if name in chosen)
    if isinstance(hint, int) and not isinstance(hint, bool) and hint > 0:
        return tuple(_of_least_size(model, hint))
    if isinstance(hint, (int, str)) or not all(isinstance(item, str) for item in hint):
        raise JobError(
            f"Job(units=...) must be a list of classes or names of modules, or a number of parameters above 0, but it "
            f"is {hint!r}."
        )
    return tuple(_matching(model, hint))


def usable_units(
    units: Sequence[str], blocks: Sequence[str], called: Collection[str], read_outside: Collection[str], *, chosen: bool
) -> tuple[str, ...]:
    """The candidates that forward calls. Those that nobody chose must not have a parameter that others read."""
    if chosen:
        if idle := [name for name in units if name not in called]:
            raise JobError(
                f"Job(units=...) chooses {idle[0]}, which the model's forward does not call, so its parameters cannot "
                "be gathered for the call; choose a module around it."
            )
        return tuple(units)
    return tuple(name for name in units if name in called and (name in blocks or name not in read_outside))


def _large_around(model: nn.Module, blocks: Sequence[str]) -> Iterator[str]:
    """Modules outside of blocks whose own parameters are as many as those of an average block."""
    sizes = [sum(p.numel() for p in model.get_submodule(name).parameters()) for name in blocks]
    if not sizes:
        return
    least, inside = sum(sizes) / len(sizes), tuple(f"{name}." for name in blocks)
    shares = sharing_modules(model)
    for name, module in model.named_modules():
        own = sum(parameter.numel() for parameter in own_parameters(module))
        if not name or own < least or name in blocks or name.startswith(inside):
            continue
        if next(module.children(), None) is None and not isinstance(module, ParametrizationList) and name not in shares:
            yield name


def _of_least_size(model: nn.Module, least: int) -> Iterator[str]:
    """The innermost modules with at least this many parameters that are in no unit inside of them."""
    shares, found = sharing_modules(model), []

    def visit(module: nn.Module, name: str) -> int:
        left = sum(parameter.numel() for parameter in own_parameters(module))
        left += sum(visit(child, f"{name}.{part}" if name else part) for part, child in module.named_children())
        if left < least or not name or name in shares or isinstance(module, (*CONTAINERS, ParametrizationList)):
            return left
        found.append(name)
        return 0

    visit(model, "")
    yield from found


def _matching(model: nn.Module, patterns: Sequence[str]) -> Iterator[str]:
    """Modules whose class or name one of the patterns gives; a `*` in a name stands for one part of it."""
    modules = {name: module for name, module in model.named_modules() if name}
    shares = sharing_modules(model)
    matches = {pattern: {name for name, m in modules.items() if _matches(name, m, pattern)} for pattern in patterns}
    for pattern, names in matches.items():
        if not names:
            known = ", ".join(dict.fromkeys(type(module).__name__ for module in modules.values()))
            raise JobError(
                f"Job(units=...) has {pattern!r}, which is no class and no name of a module in the model; its classes "
                f"are {known}."
            )
        if lists := sorted(name for name in names if isinstance(modules[name], CONTAINERS)):
            raise JobError(
                f"Job(units=...) has {pattern!r}, which is the list {lists[0]!r} that is never called; write "
                f"'{lists[0]}.*' for what is in it."
            )
        if shared := sorted(names & shares):
            raise JobError(
                f"Job(units=...) has {pattern!r}, but {shared[0]!r} shares a parameter with a module outside of it."
            )
    chosen = set().union(*matches.values())
    yield from (name for name in modules if name in chosen)


def _matches(name: str, module: nn.Module, pattern: str) -> bool:
    if any(cls.__name__ == pattern for cls in type(module).__mro__[:-2]):
        return True
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted))
