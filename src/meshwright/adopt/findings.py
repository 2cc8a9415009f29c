"""All that is found wrong with a script."""

from __future__ import annotations

from meshwright.adopt import check_data, check_order, check_saving, check_steps, check_wraps
from meshwright.adopt.finding import MISTAKE, Finding
from meshwright.adopt.kind import Kind
from meshwright.adopt.script import Script

CHECKS = (check_data.check, check_steps.check, check_order.check, check_wraps.check, check_saving.check)


def find(script: Script, kind: Kind) -> list[Finding]:
    """Mistakes first, then advice, each by line."""
    found = {(one.name, one.line): one for check in CHECKS for one in check(script, kind)}
    return sorted(found.values(), key=lambda one: (one.grade != MISTAKE, one.line, one.name))
