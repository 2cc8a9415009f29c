"""The units that a model is cut into for pipeline stages: its blocks, and the modules with weights around them."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch import nn

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
