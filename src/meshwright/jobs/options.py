"""Options after the name of a preset or a Hugging Face config: `preset:llama3-8b:seq=4096,batch=512`."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields

from meshwright.errors import JobError
from meshwright.facts.grammar import nearest

_TAIL = re.compile(r"(?P<name>.*):(?P<options>\w+=[^:/\\]*)", re.S)
_FORM = "write seq=TOKENS and batch=SAMPLES, as in :seq=4096,batch=512"


@dataclass(frozen=True, kw_only=True)
class Options:
    """None means the job's default."""

    seq: int | None = None
    """Tokens of a sample."""
    batch: int | None = None
    """Samples of one optimizer step, over all ranks."""


def split_options(text: str) -> tuple[str, Options]:
    """The name, and the options after the last colon, if any."""
    found = _TAIL.fullmatch(text)
    if found is None:
        return text, Options()
    given: dict[str, int] = {}
    for part in found["options"].split(","):
        word, _, number = part.partition("=")
        _check(text, part, word, number)
        given[word] = int(number)
    return found["name"], Options(**given)


def _check(text: str, part: str, word: str, number: str) -> None:
    known = [field.name for field in fields(Options)]
    if word not in known:
        near = nearest(word, known)
        hint = f"did you mean {near!r}? " if near else ""
        raise JobError(f"{text}: there is no option {part!r}; {hint}{_FORM}.")
    if not (number.isascii() and number.isdigit() and int(number) > 0):
        raise JobError(f"{text}: {part!r} needs a whole number of at least 1; {_FORM}.")
