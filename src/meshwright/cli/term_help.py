"""The terms of a strategy for `--help`: taken from what is registered, so that none is missing."""

from __future__ import annotations

from meshwright.strategies.term_meanings import term_meanings


def with_terms(notes: str) -> str:
    """An epilog: the notes, then a strategy's terms, each with its meaning on a line of its own."""
    lines = [f"[bold]{escaped(', '.join(one.forms))}[/]  {escaped(one.meaning)}" for one in term_meanings()]
    lead = "A strategy is comma-separated terms, such as fsdp,tp=2,bf16:"
    return "\n\n".join([notes, lead, *lines])


def escaped(text: str) -> str:
    """Text that rich shows as it is."""
    return text.replace("[", "\\[")
