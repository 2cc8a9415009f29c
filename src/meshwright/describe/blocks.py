"""Find what repeats in a model: the modules that are sharded, recomputed and compiled as one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

from torch import nn
from torch.nn.utils.parametrize import ParametrizationList

from meshwright.errors import JobError

# Where nothing repeats, a layer with at least this share of all parameters is worth a gather of its own.
LARGE = 0.1


def find_blocks(
    model: nn.Module, *, hint: Sequence[str] | None = None, called: Collection[str] | None = None
) -> tuple[str, ...]:
    """Names of the model's blocks, in the order of its modules.

    `called` are the modules that a step calls; a block must be called, because its parameters are gathered then.
    A module that shares a parameter with the outside (tied embeddings) is no block: it cannot be moved alone.
    """
    if hint is not None:
        return _checked(model, hint)
    candidates = _repeating(model) or _large_layers(model)
    free = [name for name in candidates if called is None or name in called]
    owners = _owners(model)
    return tuple(name for name in free if not _shares_outside(owners, model.get_submodule(name)))


def _repeating(model: nn.Module) -> list[str]:
    """Children of one parent that are of one class and have inner structure, outermost first.

    One that shares a parameter with the outside is looked into: an encoder and a decoder over one embedding, say.
    """
    found: list[str] = []
    seen: set[int] = set()
    owners = _owners(model)

    def visit(module: nn.Module, prefix: str) -> None:
        kinds = Counter(type(child) for child in module.children() if _has_structure(child))
        for name, child in module.named_children():
            if id(child) in seen:
                continue
            seen.add(id(child))
            path = f"{prefix}{name}"
            repeats = kinds[type(child)] > 1 and not isinstance(child, nn.Sequential | nn.ModuleList | nn.ModuleDict)
            if repeats and not _shares_outside(owners, child):
                found.append(path)
            else:
                visit(child, f"{path}.")

    visit(model, "")
    return found


def _has_structure(module: nn.Module) -> bool:
    """Made of other modules, with parameters in at least two of them: a layer on its own is too small a unit."""
    owners = [m for m in module.modules() if _own(m)]
    return len(owners) > 1 and any(True for _ in module.children())


def _own(module: nn.Module) -> list[nn.Parameter]:
    """The parameters that a module holds itself."""
    return [parameter for parameter in module._parameters.values() if parameter is not None]


def _large_layers(model: nn.Module) -> list[str]:
    total = sum(p.numel() for p in model.parameters())
    return [
        name
        for name, module in model.named_modules()
        if name
        and not isinstance(module, ParametrizationList)
        and sum(p.numel() for p in _own(module)) >= LARGE * total
    ]


def _owners(model: nn.Module) -> dict[int, set[int]]:
    """The modules that hold each parameter, both by identity."""
    owners: dict[int, set[int]] = {}
    for module in model.modules():
        for parameter in _own(module):
            owners.setdefault(id(parameter), set()).add(id(module))
    return owners


def _shares_outside(owners: dict[int, set[int]], block: nn.Module) -> bool:
    inside = {id(module) for module in block.modules()}
    return any(owners[id(parameter)] - inside for module in block.modules() for parameter in _own(module))


def _checked(model: nn.Module, hint: Sequence[str]) -> tuple[str, ...]:
    modules = dict(model.named_modules())
    unknown = [name for name in hint if name not in modules or not name]
    if unknown:
        known = ", ".join(list(modules)[1:9])
        raise JobError(f"Job(blocks=...) names {unknown[0]!r}, which the model does not have; it has {known}, ...")
    if twice := [name for name in hint if list(hint).count(name) > 1]:
        raise JobError(f"Job(blocks=...) names {twice[0]!r} twice.")
    if inner := [name for name in hint if any(name.startswith(f"{other}.") for other in hint)]:
        raise JobError(f"Job(blocks=...) names {inner[0]!r}, which lies inside another of the blocks.")
    if lists := [name for name in hint if isinstance(modules[name], nn.ModuleList | nn.ModuleDict)]:
        raise JobError(f"Job(blocks=...) names {lists[0]!r}, a list that is never called; name what is in it.")
    owners = _owners(model)
    shared = [name for name in hint if _shares_outside(owners, modules[name])]
    if shared:
        raise JobError(f"Job(blocks=...) names {shared[0]!r}, which shares a parameter with a module outside of it.")
    return tuple(hint)
