"""The range of a sweep as written on the command line: `devices=8..1024`, `batch=64,96,128`."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from meshwright.errors import BadInput
from meshwright.facts.grammar import nearest

UNITS: Mapping[str, str] = {"devices": "devices", "batch": "samples", "sequence": "tokens", "link": "GB/s"}
"""The unit of each quantity that can be swept."""
MOST = 64
"""The largest number of points."""
NEAR = 1.5
"""Points of a range that doubles are at least this factor apart."""
_NUMBER = re.compile(r"[0-9]{1,12}(?:\.[0-9]{1,6})?")
_FORMS = "Write devices=8..1024, which doubles from 8 to 1024, or a list such as devices=8,16,64"


@dataclass(frozen=True, kw_only=True)
class SweepRange:
    """A quantity and its values, ascending."""

    quantity: str
    values: tuple[float, ...]

    @property
    def unit(self) -> str:
        return UNITS[self.quantity]

    @classmethod
    def parse(cls, text: str) -> SweepRange:
        quantity, equals, written = text.partition("=")
        if quantity not in UNITS:
            near = nearest(quantity, UNITS)
            hint = f"did you mean {near!r}? " if near else ""
            raise BadInput(f"--sweep {text!r}: {quantity!r} cannot be swept; {hint}Use one of {', '.join(UNITS)}.")
        if not equals:
            raise BadInput(f"--sweep {text!r} names no values. {_FORMS}.")
        values = _values(text, quantity, written)
        if len(values) > MOST:
            raise BadInput(f"--sweep {text!r} has {len(values)} points; use at most {MOST}.")
        return cls(quantity=quantity, values=values)


def _values(text: str, quantity: str, written: str) -> tuple[float, ...]:
    first, dots, last = written.partition("..")
    if not dots:
        return tuple(sorted({_number(text, quantity, word) for word in written.split(",")}))
    start, end = _number(text, quantity, first), _number(text, quantity, last)
    if end < start:
        raise BadInput(f"--sweep {text!r} ends before it starts; write {quantity}={last}..{first}.")
    values = [start * 2**times for times in range(math.floor(math.log2(end / start)) + 1)]
    # The end is always a point; a doubling just below it would add nothing.
    below = [value for value in values if value * NEAR <= end]
    return (*below, end)


def _number(text: str, quantity: str, word: str) -> float:
    found = _NUMBER.fullmatch(word.strip())
    value = float(word) if found else 0.0
    if value <= 0:
        raise BadInput(f"--sweep {text!r}: {word!r} is not a number above 0. {_FORMS}.")
    if quantity == "link":
        return value
    if value != int(value):
        raise BadInput(f"--sweep {text!r}: {word!r} is not a whole number of {UNITS[quantity]}.")
    return int(value)
