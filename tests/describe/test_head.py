"""The output layer of a model, as a step on fake tensors shows it, and what is refused without one."""

from dataclasses import replace

import pytest

import pieced_jobs
from meshwright.assemble.check import check
from meshwright.describe.model import describe
from meshwright.errors import Refused
from meshwright.facts.model import HeadFacts, ModelFacts
from meshwright.facts.strategy import Strategy
from meshwright.strategies import Place

CLASSES, WIDTH = pieced_jobs.CLASSES, pieced_jobs.WIDTH


@pytest.mark.parametrize(
    ("job", "weight", "module", "needed_by"),
    [
        ("tied", "token.weight", "head", ()),
        ("biased", "head.weight", "head", ()),
        ("functional", "token.weight", "", ()),
        ("weighed", "token.weight", "head", ()),
        ("own_loss", "token.weight", "head", ()),
        ("squared", "token.weight", "head", ("square",)),
    ],
)
def test_head(job: str, weight: str, module: str, needed_by: tuple[str, ...]) -> None:
    found = describe(getattr(pieced_jobs, job))
    assert found.head == HeadFacts(weight=weight, module=module, classes=CLASSES, width=WIDTH, needed_by=needed_by)
    assert ModelFacts.from_json(found.to_json()).head == found.head


def refusal(job: str, strategy: str, ranks: int = 1, **changed: object) -> str:
    chosen = getattr(pieced_jobs, job)
    place = Place(device="cpu", devices=ranks, ranks=ranks, local_ranks=ranks)
    with pytest.raises(Refused) as caught:
        check(chosen, replace(describe(chosen), **changed), Strategy.parse(f"{strategy},loss=pieced"), place)
    return str(caught.value)


def test_refusals_say_what_to_do() -> None:
    assert "F.cross_entropy" in refusal("no_head", "single")
    assert "drop one of the two terms" in refusal("tied", "single,compile", blocks=())
    assert "48 classes" in refusal("functional", "tp=2", ranks=2)
