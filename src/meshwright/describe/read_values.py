"""The lines of a model's code that read values of tensors, and what a forecast assumes because of them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from meshwright.describe.code_lines import CodeLine, running_line

ENDLESS = 100_000
"""Reads of one line after which its loop counts as endless: made-up values may never meet its condition."""
LISTED = 3
"""The most lines that a sentence names."""


class ValuesUnknown(RuntimeError):
    """Values cannot be made up: too many, or a loop that does not end with them."""


@dataclass
class ReadValues:
    """The reads of values in a pass, by the line that made them: whether one of them was of made-up values."""

    lines: dict[CodeLine | None, bool] = field(default_factory=dict)
    _counts: Counter[CodeLine | None] = field(default_factory=Counter)

    def note(self, guessed: bool) -> None:
        line = running_line()
        self.lines[line] = self.lines.get(line, False) or guessed
        self._counts[line] += 1
        if self._counts[line] > ENDLESS:
            raise ValuesUnknown(f"{line} has read {ENDLESS} values, and may never end with made-up ones.")


def assumptions(reads: ReadValues) -> tuple[str, ...]:
    """What a forecast assumes, a sentence for each kind of read."""
    kinds = {
        False: "reads values that samples or random numbers decide: forecasts hold for the job's samples",
        True: "reads values that weights decide: forecasts hold for made-up ones",
    }
    found = []
    for guessed, sentence in kinds.items():
        lines = [str(line or "the backward pass") for line, made in reads.lines.items() if made == guessed]
        if lines:
            more = f" and {len(lines) - LISTED} more" if len(lines) > LISTED else ""
            found.append(f"The model {sentence} ({'; '.join(lines[:LISTED])}{more}).")
    return tuple(found)
