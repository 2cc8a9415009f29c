"""Parameter groups by patterns of names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from meshwright.errors import JobError

if TYPE_CHECKING:
    from torch import nn

Patterns = Mapping[str | tuple[str, ...], Mapping[str, Any]]
"""Options by pattern, or by several patterns."""


def group_by_pattern(
    named: Iterable[tuple[str, nn.Parameter]], patterns: Patterns, known: Sequence[str] | None
) -> list[dict[str, Any]]:
    """One group for each entry, in order, and a last one for the rest; the first entry that matches a name takes it.

    Every rank gets all groups, some of them without parameters where a pipeline's stage has none. A pattern that
    matches none of the `known` names of the whole model is refused, if they are given.
    """
    wanted = [(_several(pattern), options) for pattern, options in patterns.items()]
    for one in (pattern for several, _ in wanted for pattern in several):
        if known is not None and not any(fnmatchcase(name, one) for name in known):
            raise JobError(
                f"The pattern {one!r} of a parameter group matches no trained parameter; "
                f"names are like {', '.join(known[:3]) or 'none at all'}."
            )
    groups: list[dict[str, Any]] = [{**options, "params": []} for _, options in wanted] + [{"params": []}]
    for name, parameter in named:
        place = next((i for i, (several, _) in enumerate(wanted) if _matches(name, several)), len(wanted))
        groups[place]["params"].append(parameter)
    return groups


def _several(pattern: str | tuple[str, ...]) -> tuple[str, ...]:
    return (pattern,) if isinstance(pattern, str) else tuple(pattern)


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)
