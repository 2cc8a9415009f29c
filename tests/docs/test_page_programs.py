"""Shown output is compared line by line: what may differ, and what may not."""

import pytest

from page_blocks import side
from page_programs import difference

PRINTED = "a table\n│ loss │ 0.5827 │\n│ step │ 12.3 ms │\nthe end\n"


@pytest.mark.parametrize(
    "shown",
    [
        PRINTED,
        "a table\nloss 0.5827\nstep 12.3 ms\nthe end\n",
        "a table\nloss 0.5826\nstep 12.3 ms\nthe end\n",
        "...\nloss 0.5827\n...\n",
        "a table\n...\nthe end\n",
    ],
)
def test_the_same(shown: str) -> None:
    assert difference(shown, PRINTED) is None


@pytest.mark.parametrize(
    "shown",
    [
        "a table\nloss 0.5827\nstep 12.3 ms\n",  # a line is not shown
        "a table\nloss 0.5927\nstep 12.3 ms\nthe end\n",
        "a table\nloss 0.5827\nstep 99.9 ms\nthe end\n",
        "a table\nloss 0.5827\nthe end\n",
        "the end\n...\na table\n",  # another order
        "a table\n...\nmore\n",
    ],
)
def test_not_the_same(shown: str) -> None:
    assert difference(shown, PRINTED) is not None


def test_measured_numbers_may_differ() -> None:
    assert difference("step 99.9 ms, off by 1.2e-16", "step 12.3 ms, off by 3.4e-15", measured=True) is None
    assert difference("loss 0.5 in 99.9 ms", "loss 0.6 in 12.3 ms", measured=True) is not None


def test_sides_of_a_diff() -> None:
    diff = " same\n-old\n+new\n \n last\n"
    assert side(diff, "-") == "same\nold\n\nlast\n" and side(diff, "+") == "same\nnew\n\nlast\n"
