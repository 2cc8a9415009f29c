"""Find a model's blocks, which are sharded, recomputed and compiled as units, and the units of pipeline stages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

from torch import nn
from torch.nn.utils.parametrize import ParametrizationList

from meshwright.errors import JobError

# If nothing repeats, a layer with at least this share of all parameters is worth a separate gather.
LARGE = 0.1


def find_blocks(model: nn.Module, *, hint: Sequence[str] | None = None) -> tuple[str, ...]:
    """Names of the model's blocks, in the order of its modules.

    A module that shares a parameter with another (tied embeddings) is no block: it cannot be sharded alone.
    """
    if hint is not None:
        return _checked(model, hint)
    candidates = _repeating(model) or _large_layers(model)
    owners = _owners(model)
    return tuple(name for name in candidates if not _shares_outside(owners, model.get_submodule(name)))


def _repeating(model: nn.Module) -> list[str]:
    """Children of one parent that have the same class and inner structure, outermost first.

    One that shares a parameter with the outside is searched for blocks, such as an encoder that shares an embedding.
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
    """Whether a module has parameters in at least two modules: a single layer is too small a unit."""
    return sum(bool(own_parameters(m)) for m in module.modules()) > 1 and any(True for _ in module.children())


def own_parameters(module: nn.Module) -> list[nn.Parameter]:
    """The parameters of the module itself, without those of its children."""
    return [parameter for parameter in module._parameters.values() if parameter is not None]


def _large_layers(model: nn.Module) -> list[str]:
    total = sum(p.numel() for p in model.parameters())
    return [
        name
        for name, module in model.named_modules()
        if name
        and not isinstance(module, ParametrizationList)
        and sum(p.numel() for p in own_parameters(module)) >= LARGE * total
    ]


def _owners(model: nn.Module) -> dict[int, set[int]]:
    """The modules that own each parameter, both by id."""
    owners: dict[int, set[int]] = {}
    for module in model.modules():
        for parameter in own_parameters(module):
            owners.setdefault(id(parameter), set()).add(id(module))
    return owners


def sharing_modules(model: nn.Module) -> frozenset[str]:
    """Names of the modules that share a parameter with a module outside of them."""
    owners = _owners(model)
    return frozenset(name for name, module in model.named_modules() if _shares_outside(owners, module))


def _shares_outside(owners: dict[int, set[int]], block: nn.Module) -> bool:
    inside = {id(module) for module in block.modules()}
    return any(owners[id(parameter)] - inside for module in block.modules() for parameter in own_parameters(module))


def _checked(model: nn.Module, hint: Sequence[str]) -> tuple[str, ...]:
    modules = dict(model.named_modules())
    if unknown := [name for name in hint if name not in modules or not name]:
        known = ", ".join(list(modules)[1:9])
        raise JobError(f"Job(blocks=...) names {unknown[0]!r}, which the model does not have; it has {known}, ...")
    if twice := [name for name in hint if list(hint).count(name) > 1]:
        raise JobError(f"Job(blocks=...) names {twice[0]!r} twice.")
    if inner := [name for name in hint if any(name.startswith(f"{other}.") for other in hint)]:
        raise JobError(f"Job(blocks=...) names {inner[0]!r}, which is inside another of the blocks.")
    if lists := [name for name in hint if isinstance(modules[name], nn.ModuleList | nn.ModuleDict)]:
        raise JobError(f"Job(blocks=...) names {lists[0]!r}, a list that is never called; name what is in it.")
    owners = _owners(model)
    if shared := [name for name in hint if _shares_outside(owners, modules[name])]:
        raise JobError(f"Job(blocks=...) names {shared[0]!r}, which shares a parameter with a module outside of it.")
    return tuple(hint)


CONTAINERS = (nn.ModuleList, nn.ModuleDict)


def find_units(model: nn.Module, blocks: Sequence[str], called: Collection[str]) -> tuple[str, ...]:
    """Names of the blocks, and of the outermost called modules that have parameters and contain no block.

    A module that contains blocks (the model itself) is no unit: its code is the glue between units.
    """
    found: list[str] = []

    def visit(module: nn.Module, name: str) -> None:
        if name in blocks:
            found.append(name)
        elif not any(True for _ in module.parameters()):
            return
        elif name and name in called and not isinstance(module, CONTAINERS) and not _holds(name, blocks):
            found.append(name)
        else:
            for child_name, child in module.named_children():
                visit(child, f"{name}.{child_name}" if name else child_name)

    visit(model, "")
    return tuple(found)


def _holds(name: str, blocks: Sequence[str]) -> bool:
    return any(block.startswith(f"{name}.") for block in blocks)
