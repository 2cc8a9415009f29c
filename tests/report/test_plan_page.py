"""A ranking in the terminal: the recommendation first, no strategy broken inside a term, long lists folded."""

import pytest

from meshwright.report.plan import plan_page
from terminal_pages import FIRST, broken_terms, ranking, shown


@pytest.mark.parametrize("width", [60, 80, 100, 160])
def test_no_term_is_broken(width: int) -> None:
    lines = shown(plan_page(ranking()), width)
    assert broken_terms(lines) == set()
    assert max(map(len, lines)) <= width
    assert not any("…" in line for line in lines)


def test_a_broken_term_would_be_found() -> None:
    assert broken_terms(["│ zero1=16,tp=4,pp=2:inter │", "│ leaved,bf16 │"])


def test_the_recommendation_comes_first_with_its_reason() -> None:
    lines = shown(plan_page(ranking()), 80)
    assert lines[1] == f"Recommended: {FIRST}"
    assert lines[2].startswith("64.33 s per step, 8,150 tokens/s per device, 70.0 GiB per device.")
    table = next(number for number, line in enumerate(lines) if "strategy" in line)
    assert any("more complex" in line for line in lines[:table])


def test_long_lists_are_folded() -> None:
    text = "\n".join(shown(plan_page(ranking()), 100))
    assert text.count("would cost 3%") == 3
    assert "... and 2 more in the table" in text
    assert "... and 3 more reasons" in text


def test_reasons_that_differ_in_the_strategy_only_are_one() -> None:
    reasons = [{"strategy": f"tp={size}", "reason": f"head is whole under tp={size}."} for size in (2, 4, 8)]
    text = "\n".join(shown(plan_page(ranking() | {"refused": reasons}), 100))
    assert "  3  head is whole under the strategy." in text
