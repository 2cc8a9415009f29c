"""Models that read values are described and forecast without their weights, however large they are."""

from collections.abc import Callable

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright import Strategy
from meshwright.describe import pass_tensors
from meshwright.describe.known_values import known_values, set_value
from meshwright.describe.model import describe
from meshwright.describe.read_values import ReadValues, assumptions
from meshwright.torch_private.fake_tensors import FakeTensorMode
from meshwright.tracing import trace_step
from meshwright.tracing.costs import measure_costs
from minimal import WIDTH, Blocks, make_job


class Branch(Blocks):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if x.abs().mean() < 1e6 else x


class Masked(Blocks):
    def forward(self, x: Tensor) -> Tensor:
        kept = torch.where(x[:, 0] > -9)[0]
        return torch.zeros_like(x).index_copy(0, kept, super().forward(x[x[:, 0] > -9]))


class Numpy(Blocks):
    def forward(self, x: Tensor) -> Tensor:
        hidden = numpy.asarray(x.detach().cpu().numpy() > 9)
        return super().forward(x.masked_fill(torch.from_numpy(hidden), 0.0))


class Experts(nn.Module):
    """Only experts that a token chooses run, on its rows."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 3)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.gate(x).softmax(-1).topk(2)
        y = torch.zeros_like(x)
        for expert in F.one_hot(chosen, 3).sum((0, 1)).nonzero():
            row, place = torch.where(chosen == expert)
            y = y.index_add(0, row, self.experts[int(expert)](x[row]) * weights[row, place, None])
        return y


class Halting(Blocks):
    """Repeats its blocks until a trained number has been added up."""

    def __init__(self) -> None:
        super().__init__()
        self.halt = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        x, done = self.enter(x), torch.zeros(len(x))
        while (done < 0.9).any():
            done = done + self.halt(x).sigmoid().squeeze(-1)
            for block in self.blocks:
                x = block(x)
        return self.leave(x)


MODELS = (Branch, Masked, Numpy, Experts, Halting)


@pytest.mark.parametrize("model", MODELS)
def test_large_models_that_read_values(model: Callable[[], nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pass_tensors, "SMALL", 0)
    job = make_job(model=model)
    facts = describe(job)
    assert not facts.unseen
    assert facts.by_value
    assert __file__.rpartition("/")[2] in facts.assumed[0]
    costs = measure_costs(job, facts, "fp32")
    assert sum(kernel.flops.each for unit in costs.units for kernel in unit.forward) > 0
    assert trace_step(job, facts, Strategy.parse("ddp"), ranks=2).peak > 0


def test_reads_of_samples_are_exact_and_those_of_weights_are_made_up() -> None:
    reads, given = ReadValues(), torch.tensor([1.0, 2.0, 3.0, 4.0])
    with FakeTensorMode(allow_non_fake_inputs=True), known_values(reads):
        x = set_value(torch.empty(4), given)
        assert int((x > 2).sum()) == 2
        assert x[x > 1].shape == (3,)
        assert x.long().tolist() == [1, 2, 3, 4]
        assert f"expert {x.long()[1]}" == "expert 2"
        assert not any(reads.lines.values())
        score = torch.empty(5, 8) @ torch.empty(8, 3)
        assert 0 <= int(score.argmax(-1)[0]) < 3
    assert any(reads.lines.values())
    assert len(assumptions(reads)) == 2


@pytest.mark.parametrize("in_place", [False, True])
def test_a_router_counts_the_tokens_of_each_expert_however_many_there_are(in_place: bool) -> None:
    """The counts are sizes to split the tokens by, as in JetMoE."""
    tokens, experts = 1 << 15, 8
    with FakeTensorMode(allow_non_fake_inputs=True), known_values(ReadValues()):
        chosen = (torch.empty(tokens, 4) @ torch.empty(4, experts)).topk(2, dim=1).indices
        marks = torch.zeros(tokens, experts)
        marks = marks.scatter_(1, chosen, 1) if in_place else marks.scatter(1, chosen, 1)
        counts = marks.long().sum(0).tolist()
        parts = torch.empty(2 * tokens, 4).split(counts)
    assert len(parts) == experts and sum(counts) == 2 * tokens
    assert max(counts) < 1.1 * min(counts)


def test_values_of_the_batch_are_not_changed() -> None:
    given = torch.ones(3)
    with FakeTensorMode(allow_non_fake_inputs=True), known_values(ReadValues()):
        x = set_value(torch.empty(3), given)
        x.add_(1)
        assert float(x.sum()) == 6
    assert given.tolist() == [1, 1, 1]


def test_an_operator_whose_fake_kernel_wants_half_precision() -> None:
    library = torch.library.Library("meshwright_tests", "DEF")
    library.define("halves(Tensor x) -> Tensor")
    library.impl("halves", lambda x: x.clone(), "CPU")
    library.impl("halves", _halves, "Meta")
    with FakeTensorMode(allow_non_fake_inputs=True), known_values(ReadValues()):
        found = torch.ops.meshwright_tests.halves.default(torch.empty(2, 3))
    assert (found.dtype, found.shape) == (torch.float32, (2, 3))


def _halves(x: Tensor) -> Tensor:
    if x.dtype != torch.bfloat16:
        raise RuntimeError("expected bf16")
    return torch.empty_like(x)


def test_packed_sequences() -> None:
    layer, given = nn.LSTM(WIDTH, WIDTH, batch_first=True), torch.tensor([3, 2])
    with FakeTensorMode(allow_non_fake_inputs=True), known_values(ReadValues()):
        lengths = set_value(torch.empty(2, dtype=torch.long), given)
        packed = nn.utils.rnn.pack_padded_sequence(torch.empty(2, 3, WIDTH), lengths, batch_first=True)
        padded, sizes = nn.utils.rnn.pad_packed_sequence(layer(packed)[0], batch_first=True, total_length=5)
        padded.sum().backward()
    assert padded.shape == (2, 5, WIDTH)
    assert sizes.tolist() == [3, 2]


def test_values_that_are_repeated_along_dims_are_known_however_many_they_are() -> None:
    reads, places = ReadValues(), torch.ones(2, 4096, dtype=torch.int64)
    places[1, -3:] = 0
    with FakeTensorMode(allow_non_fake_inputs=True), known_values(reads):
        mask = set_value(torch.empty(2, 4096, dtype=torch.int64), places)
        mask = 1.0 - mask[:, None, None].expand(-1, 1, 4096, -1).to(torch.float32)  # as Longformer makes it
        mask = (mask.masked_fill(mask.bool(), -1e9) * mask)[:, 0, 0, :]
        assert (mask < 0).sum().item() == 3 and not (mask > 0).any()
        assert not any(reads.lines.values())
        dropped = torch.ones(4096, 1).expand(-1, 4096).bernoulli()
        assert dropped.sum().item() and any(reads.lines.values())  # random numbers are not alike


def _column(rows: Tensor) -> None:
    rows[:, 3] = True


def _flat(rows: Tensor) -> None:
    rows.view(-1)[5] = True


def _all(rows: Tensor) -> None:
    rows |= True


@pytest.mark.parametrize("change", [_column, _flat, _all])
@pytest.mark.parametrize("repeats", [False, True])
@pytest.mark.parametrize(("count", "width"), [(16, 4), (4096, 4), (4096, 4096)])
def test_what_is_changed_through_a_view_is_not_known_as_it_was(
    change: Callable[[Tensor], None], repeats: bool, count: int, width: int
) -> None:
    """A small tensor's values change with it; those of a large one, which are kept as one number, are unknown then."""
    rows, reads = torch.zeros(count, width, dtype=torch.bool), ReadValues()
    change(rows)
    with FakeTensorMode(), known_values(reads):
        one = torch.zeros(1 if repeats else count, width, dtype=torch.bool)
        found = one.expand(count, width).clone() if repeats else one
        change(found)
        assert bool(found.any())
        last = found[-1, -1].item()
    assert last == rows[-1, -1].item() or any(reads.lines.values())
