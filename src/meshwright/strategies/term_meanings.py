"""What each term of a strategy's text means, in one line: for help texts, the reference and notebooks."""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.facts.grammar import Term, TermRow, table
from meshwright.facts.model_axis import MODEL_AXES, AxisTerm
from meshwright.facts.strategy import Strategy
from meshwright.strategies import DATA_STRATEGIES, model_axis


@dataclass(frozen=True, kw_only=True)
class TermMeaning:
    forms: tuple[str, ...]
    """How the term is written, such as `fsdp`, `fsdp=N`."""
    meaning: str


def term_meanings() -> list[TermMeaning]:
    """Every term that a strategy may have, in the order of the canonical text."""
    return [meaning for row in table() for meaning in _of_row(row)]


def words_of(strategy: Strategy) -> list[tuple[str, str]]:
    """Each term of a strategy beside its meaning."""
    meanings = {Term.split(form).head: one.meaning for one in term_meanings() for form in one.forms}
    return [(term, meanings[Term.split(term).head]) for term in str(strategy).split(",")]


def _of_row(row: TermRow) -> list[TermMeaning]:
    """A row of policies or of an axis has one meaning; data strategies share a row, and each has its own."""
    if row.meaning:
        return [TermMeaning(forms=row.forms, meaning=row.meaning)]
    heads = {Term.split(form).head for form in row.forms}
    if axes := heads & MODEL_AXES.keys():
        return [TermMeaning(forms=row.forms, meaning=model_axis(AxisTerm(word, 1)).summary) for word in axes]
    return [
        TermMeaning(forms=_forms(row, (*traits.aliases, word)), meaning=DATA_STRATEGIES[word].summary)
        for word, traits in ((word, strategy.traits) for word, strategy in DATA_STRATEGIES.items())
    ]


def _forms(row: TermRow, heads: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(form for form in row.forms if Term.split(form).head in heads)
