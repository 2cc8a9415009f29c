"""Which kinds of tensors a pass is tried on, and in which order."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from meshwright.describe.pass_tensors import climb, on_fake, on_meta, on_real
from meshwright.recording.report_as_cpu import is_meta

BATCH = {"x": torch.ones(2, 3)}


def kind_of(tensor: Tensor) -> str:
    return "fake" if isinstance(tensor, FakeTensor) else "meta" if is_meta(tensor) else "real"


def failing_on(*kinds: str) -> tuple[Callable[[dict[str, Tensor]], str], list[str]]:
    tried: list[str] = []

    def run(batch: dict[str, Tensor]) -> str:
        tried.append(kind_of(batch["x"]))
        if tried[-1] in kinds:
            raise ValueError(tried[-1])
        return tried[-1]

    return run, tried


@pytest.mark.parametrize(
    ("fails", "expected"), [((), ["meta"]), (("meta",), ["meta", "fake"]), (("meta", "fake"), ["meta", "fake", "real"])]
)
def test_the_first_kind_that_works_is_used(fails: tuple[str, ...], expected: list[str]) -> None:
    run, tried = failing_on(*fails)
    assert climb(nn.Linear(3, 3), BATCH, run, on_meta, on_fake, on_real) == expected[-1]
    assert tried == expected


def test_the_last_error_is_raised() -> None:
    run, _ = failing_on("meta", "fake")
    with pytest.raises(ValueError, match="fake"):
        climb(nn.Linear(3, 3), BATCH, run, on_meta, on_fake)


def test_a_model_may_change_real_inputs() -> None:
    climb(nn.Linear(3, 3), BATCH, lambda batch: batch["x"].zero_(), on_real)
    assert BATCH["x"].eq(1).all()


def test_a_failed_pass_leaves_nothing_in_the_model() -> None:
    model = nn.Linear(3, 3)

    def run(batch: dict[str, Tensor]) -> bool:
        model.kept = batch["x"]
        if kind_of(batch["x"]) != "real":
            raise ValueError
        return True

    with pytest.raises(ValueError):
        climb(model, BATCH, run, on_meta, on_fake)
    assert not hasattr(model, "kept")
