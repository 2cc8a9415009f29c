"""The facts of a model, found on fake tensors; and every way in which a job's parts can fail to fit."""

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from meshwright.describe.blocks import find_blocks
from meshwright.describe.model import describe
from meshwright.errors import JobError
from meshwright.facts.model import ModelFacts, ParameterFacts
from minimal import WIDTH, Block, Blocks, make_job, mlp, squares


class Mixed(nn.Module):
    """Tied, frozen and unused parameters beside ordinary ones."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(WIDTH, WIDTH, bias=False)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.unused = nn.Linear(WIDTH, 3)
        self.leave = nn.Linear(WIDTH, WIDTH, bias=False)
        self.leave.weight = self.enter.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(self.frozen(self.norm(self.enter(x))))


class Branching(Blocks):
    """Looks at a value, which fake tensors do not have."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(super().forward(x))
        return y if y.sum().item() < 1e30 else self.leave(y)


class Keeping(Branching):
    """Makes what it needs each time at the first call, as many do with tables of angles, and looks at values."""

    def __init__(self) -> None:
        super().__init__()
        self.table: Tensor | None = None
        self.register_buffer("ones", None)

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None:
            self.table, self.ones = torch.arange(x.shape[-1]), torch.ones(x.shape[-1])
        return super().forward(x * self.table * self.ones)


class WithAttribute(nn.Module):
    """Computes with a tensor that is neither parameter nor buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.scale = torch.linspace(1, 2, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.scale


def test_parameters() -> None:
    facts = describe(make_job(model=Mixed))
    by_name = {parameter.name: parameter for parameter in facts.parameters}
    assert list(by_name) == [name for name, _ in Mixed().named_parameters()]
    assert by_name["enter.weight"].names == ("enter.weight", "leave.weight")
    assert by_name["unused.weight"] == ParameterFacts(
        names=("unused.weight",), shape=(3, WIDTH), itemsize=4, trainable=True, used=False
    )
    assert not by_name["frozen.weight"].trainable
    assert facts.unused == ("unused.weight", "unused.bias")
    assert facts.batch_norms == ("norm",)
    assert facts.unseen == ""
    assert sum(p.count for p in facts.parameters) == sum(p.numel() for p in Mixed().parameters())


def test_json_round_trip() -> None:
    facts = describe(make_job(model=Mixed))
    assert ModelFacts.from_json(json.loads(json.dumps(facts.to_json()))) == facts


def test_a_smaller_dtype_is_seen() -> None:
    half = describe(make_job(model=lambda: nn.Linear(WIDTH, WIDTH).bfloat16(), inputs=lambda b: (b["x"].bfloat16(),)))
    assert {p.itemsize for p in half.parameters} == {2}


def test_blocks_are_those_that_are_called() -> None:
    class Unused(Blocks):
        def __init__(self) -> None:
            super().__init__()
            self.blocks.append(Block())

        def forward(self, x: Tensor) -> Tensor:
            return self.leave(self.blocks[1](self.blocks[0](self.enter(x))))

    assert describe(make_job(model=Unused)).blocks == ("blocks.0", "blocks.1")
    assert describe(make_job(model=Blocks, blocks=["enter"])).blocks == ("enter",)


def test_a_weight_that_is_read_without_a_call_is_no_block() -> None:
    """MultiheadAttention reads the weight of its out_proj without calling it."""

    class Attending(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention, self.head = nn.MultiheadAttention(WIDTH, 1), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.attention(x, x, x)[0])

    assert "attention.out_proj" in find_blocks(Attending())
    assert describe(make_job(model=Attending)).blocks == ("attention", "head")


def tokens_that_count(output: Tensor, batch: Any) -> tuple[Tensor, Tensor]:
    counts = batch["x"] > 0
    return (output * counts).sum(), counts.sum()


@pytest.mark.parametrize(
    ("loss", "weight"),
    [
        (squares, 1.0),
        (lambda output, batch: (output.sum(), output.numel()), float(WIDTH)),
        (lambda output, batch: (output.sum(), 0.5 * len(output)), 0.5),
        (tokens_that_count, None),
    ],
)
def test_weight_of_a_sample(loss: Callable[..., Any], weight: float | None) -> None:
    assert describe(make_job(loss=loss)).weight_per_sample == weight


@pytest.mark.parametrize(
    ("optimizer", "slots"),
    [
        (lambda params: AdamW(params), 2),
        (lambda params: AdamW(params, amsgrad=True), 3),
        (lambda params: SGD(params, lr=0.1, momentum=0.9), 1),
        (lambda params: SGD(params, lr=0.1), 0),
        (lambda params: AdamW([{"params": [p for n, p in params.named() if "bias" in n]}]), 2 * 10 / 58),
    ],
)
def test_optimizer_slots(optimizer: Callable[..., Optimizer], slots: float) -> None:
    assert describe(make_job(optimizer=optimizer)).optimizer_slots == pytest.approx(slots)


def test_a_model_that_looks_at_values_takes_a_real_step() -> None:
    facts = describe(make_job(model=Branching))
    assert facts.unseen == ""
    assert facts.blocks == ("blocks.0", "blocks.1")
    assert facts.unused == ()
    assert facts.weight_per_sample == 1.0


def test_a_model_that_keeps_something_may_look_at_values() -> None:
    """What it keeps of a pass without values does not get into the next one."""
    found = describe(make_job(model=Keeping))
    assert found == describe(make_job(model=Branching))


def test_a_model_that_computes_with_a_plain_tensor() -> None:
    facts = describe(make_job(model=WithAttribute))
    assert facts.unused == ()
    assert facts.unseen == ""


def test_data_where_there_is_no_sample() -> None:
    rows = [{"x": torch.zeros(WIDTH), "y": torch.zeros(WIDTH)} for _ in range(4)]
    assert describe(make_job(sample=None, data=rows)).weight_per_sample == 1.0


def broken(*parts: Any) -> Any:
    raise LookupError("no such thing")


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"sample": broken}, "Job(sample=...) raised LookupError: no such thing"),
        ({"sample": None}, "give Job(data=...) a dataset or a DataLoader"),
        ({"sample": None, "data": [1]}, "do not fit each other"),
        ({"sample": None, "data": lambda: iter([])}, "Job(data=...) has no samples"),
        ({"inputs": lambda batch: batch["x"]}, "Job(inputs=...) must return a tuple of positional or a dict"),
        ({"inputs": lambda batch: (batch["z"],)}, "KeyError: 'z'"),
        ({"model": lambda: nn.Linear(5, 5)}, "do not fit each other"),
        ({"model": broken}, "The job's model cannot be built"),
        ({"loss": broken}, "LookupError: no such thing"),
        ({"loss": lambda output, batch: output.sum()}, "Job(loss=...) must return (sum, weight), but it returned"),
        ({"loss": lambda output, batch: (output.sum(), 1, 2)}, "(sum, weight), but it returned tuple"),
        ({"loss": lambda output, batch: (3.0, 1)}, "(sum, weight)"),
        ({"loss": lambda output, batch: (output.sum(1), 2)}, "one number as its sum, but it has shape (2,)"),
        ({"loss": lambda output, batch: (output.detach().sum(), 2)}, "does not depend on any trainable parameter"),
        ({"loss": lambda output, batch: (output.sum(), None)}, "weight"),
        ({"optimizer": broken}, "Job(optimizer=..., schedule=...) raised LookupError: no such thing"),
        ({"optimizer": lambda params: 3}, "Job(optimizer=...) must return a torch optimizer, but it returned int"),
        ({"schedule": broken}, "Job(optimizer=..., schedule=...) raised LookupError: no such thing"),
        ({"schedule": lambda optimizer: 3}, "schedule"),
        ({"model": lambda: mlp().requires_grad_(False)}, "no trainable parameter"),
        ({"model": lambda: nn.Tanh()}, "no trainable parameter"),
        ({"blocks": ["nowhere"]}, "Job(blocks=...) names 'nowhere'"),
    ],
)
def test_what_does_not_fit_is_named(parts: dict[str, Any], message: str) -> None:
    with pytest.raises(JobError) as caught:
        describe(make_job(**parts))
    assert message in str(caught.value)
    assert "FakeTensor" not in str(caught.value)


def test_a_misfit_leaves_no_trace_of_torch(capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> None:
    """One clear message: a user does not want to read how fake tensors failed."""
    with pytest.raises(JobError):
        describe(make_job(model=lambda: nn.Linear(5, 5)))
    assert "Traceback" not in capfd.readouterr().err + caplog.text
