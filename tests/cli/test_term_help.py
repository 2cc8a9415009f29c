"""`--help` of the verbs that take a strategy names every term, with its meaning."""

import re

import pytest
from typer.testing import CliRunner

from meshwright.cli.main import app
from meshwright.facts.grammar import table
from meshwright.facts.strategy import Strategy
from meshwright.strategies.term_meanings import term_meanings, words_of


@pytest.mark.parametrize(
    "verb", ["plan", "train", "verify", "compare", "rehearse", "explain", "layout", "preflight", "export"]
)
def test_every_term_is_named(verb: str) -> None:
    text = CliRunner().invoke(app, [verb, "--help"], env={"COLUMNS": "200", "TERMINAL_WIDTH": "200"}).stdout
    plain = re.sub(r"\s+", " ", re.sub(r"\x1b\[[\d;]*m", "", text))
    for row in table():
        for form in row.forms:
            assert form in plain, form
    for one in term_meanings():
        assert one.meaning in plain


def test_every_form_has_one_meaning() -> None:
    forms = [form for one in term_meanings() for form in one.forms]
    assert sorted(forms) == sorted(form for row in table() for form in row.forms)
    assert all(one.meaning for one in term_meanings())


def test_words_of_a_strategy() -> None:
    strategy = Strategy.parse("zero3=2,tp=2,pp=2:zbv,bf16:pure,ac=full,offload=nvme:DIR,compile")
    assert [term for term, _ in words_of(strategy)] == str(strategy).split(",")
