"""`meshwright rehearse`: one rank of a strategy or one of each role, and what to change if it does not fit."""

from __future__ import annotations

import sys
from contextlib import redirect_stdout
from typing import Any

from meshwright.api.compared_rank import Compared
from meshwright.api.rehearser import Rehearser
from meshwright.api.smaller import smallest_change
from meshwright.commands.preflight import tell_findings
from meshwright.errors import BadInput
from meshwright.facts.rehearsal import OUT_OF_MEMORY
from meshwright.facts.strategy import Strategy


def rehearse_strategy(
    rehearser: Rehearser, text: str, *, rank: int | None = None, all_roles: bool = False
) -> dict[str, Any]:
    """The document of `meshwright rehearse`: the fullest of the rehearsed ranks and, with `all_roles`, each of them.

    If it does not fit, "change" is the smallest change that was rehearsed and does.
    """
    with redirect_stdout(sys.stderr):
        strategy = rehearser.check(Strategy.parse(text))
        tell_findings(rehearser.planner.job, rehearser.planner.facts, [strategy])
    ranks = rehearser.roles(strategy) if all_roles else [_rank(rank, rehearser.site.world)]
    found = [rehearser.rehearse(strategy, one) for one in ranks]
    fullest = max(found, key=_fullness)
    document = {"job": rehearser.job, "cluster": str(rehearser.site.cluster), **fullest.to_json()}
    document["global_batch"] = rehearser.planner.global_batch
    document["roles"] = [one.to_json() for one in found] if all_roles else []
    document["change"] = None
    if _is_too_large(fullest):
        document["change"] = smallest_change(rehearser, fullest)
    return document


def _rank(rank: int | None, world: int) -> int:
    if rank is not None and rank >= world:
        raise BadInput(f"--rank {rank} is not in a world of {world}: ranks are 0 to {world - 1}.")
    return rank or 0


def _fullness(compared: Compared) -> tuple[bool, bool, int]:
    """Ranks that ran out of memory first, then others that failed, then by what they hold."""
    measured = compared.measured
    return measured.status == OUT_OF_MEMORY, not measured.ran, measured.held


def _is_too_large(compared: Compared) -> bool:
    return compared.measured.status == OUT_OF_MEMORY or (compared.measured.ran and not compared.fits)
