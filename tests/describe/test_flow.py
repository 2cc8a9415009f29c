"""Who feeds whom between watched calls: through glue of every kind, and where that cannot be followed, it shows."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import grad, vmap

import pipeline_jobs
from meshwright.describe.calls import ConstantLeaf, Flow, InputLeaf, Inside, StrangeLeaf, TensorLeaf, Value
from meshwright.describe.flow import Watcher
from meshwright.describe.model import describe
from meshwright.describe.observe import trace
from meshwright.recording.blueprint import record

WIDTH = 4


class Model(nn.Module):
    """Three linear layers; what happens between them is up to the test."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.places = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.third(self.second(self.first(x)))


def follow(model: nn.Module, names: Sequence[str], *args: Any) -> Flow:
    """On real tensors, which give the same flow as fake ones."""
    watcher = Watcher(names)
    with watcher.watching(model, dict(model.named_parameters())):
        total = model(*args).sum()
    return watcher.flow(total)


def flow_of(forward: Any) -> Flow:
    """The flow of a model with this forward pass, whose three layers are watched."""
    kind = type("Changed", (Model,), {"forward": forward})
    return follow(kind(), ["first", "second", "third"], torch.randn(2, WIDTH))


def test_a_chain() -> None:
    flow = flow_of(Model.forward)
    assert [call.name for call in flow.calls] == ["first", "second", "third"]
    assert [call.needs for call in flow.calls] == [frozenset(), {Value(0, 0)}, {Value(1, 0)}]
    assert flow.needs == {Value(2, 0)}
    assert flow.calls[0].reads == {"first.weight", "first.bias"}
    assert flow.calls[0].leaves == (TensorLeaf((2, WIDTH), torch.float32),)


def test_glue_carries_what_it_read() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        one = self.first(x)
        other = self.second(x * 2)
        return self.third(torch.cat([one.relu(), other.exp()]).mean(0)) + one.sum()

    flow = flow_of(forward)
    assert flow.calls[1].needs == frozenset()
    assert flow.calls[2].needs == {Value(0, 0), Value(1, 0)}
    assert flow.needs == {Value(0, 0), Value(2, 0)}


def test_views_and_changes_in_place() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        one, other = self.first(x), self.second(x)
        view = one.t()[1:]
        kept = torch.zeros(2, WIDTH)
        kept[0] = other[0]
        kept.add_(1.0)
        return self.third(view.t() @ torch.ones(WIDTH - 1, WIDTH)) + self.third(kept)

    flow = flow_of(forward)
    assert flow.calls[2].needs == {Value(0, 0)}
    assert flow.calls[3].needs == {Value(1, 0)}


def test_parameters_that_glue_reads() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        return F.linear(self.second(self.first(x) + self.places), self.first.weight)

    flow = flow_of(forward)
    assert flow.calls[1].needs == {Value(0, 0), "places"}
    assert flow.needs == {Value(1, 0), "first.weight"}
    assert flow.readers("first.weight") == [0, 2], "in the first call, and between the last one and the loss"
    assert flow.readers("places") == [1]
    assert flow.readers("third.weight") == []


def test_a_module_that_is_called_twice() -> None:
    flow = flow_of(lambda self, x: self.first(self.second(self.first(x))))
    assert [call.name for call in flow.calls] == ["first", "second", "first"]
    assert flow.calls[2].needs == {Value(1, 0)}
    assert flow.readers("first.bias") == [0, 2]


def test_a_module_that_is_called_inside_a_transform_is_glue() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        inside = vmap(grad(lambda row: self.second(row).sum()))
        return self.third(inside(self.first(x)))

    flow = flow_of(forward)
    assert [call.name for call in flow.calls] == ["first", "third"]
    assert flow.calls[1].needs == {Value(0, 0), "second.weight", "second.bias"}


class Odd(nn.Module):
    """Returns what it is told to."""

    def __init__(self, output: Any) -> None:
        super().__init__()
        self.inner, self.output = nn.Linear(WIDTH, WIDTH), output

    def forward(self, x: Tensor, **others: Any) -> Any:
        return self.output(self.inner(x), x, others)


class Around(nn.Module):
    def __init__(self, output: Any, take: Any, **others: Any) -> None:
        super().__init__()
        self.enter, self.odd = nn.Linear(WIDTH, WIDTH), Odd(output)
        self.take, self.others = take, others

    def forward(self, x: Tensor) -> Tensor:
        return self.take(self.odd(self.enter(x), **self.others))


def odd_call(output: Any, take: Any = lambda result: result[0], **others: Any) -> tuple[Any, Flow]:
    flow = follow(Around(output, take, **others), ["enter", "odd"], torch.randn(2, WIDTH))
    return flow.calls[1], flow


def test_outputs_of_many_kinds() -> None:
    call, flow = odd_call(lambda y, x, others: (y, None, {"number": 3, "word": "a", "more": [y * 2]}))
    tensor = TensorLeaf((2, WIDTH), torch.float32)
    assert sorted(map(str, call.leaves)) == sorted(
        map(str, (tensor, ConstantLeaf(None), tensor, ConstantLeaf(3), ConstantLeaf("a")))
    )
    assert flow.needs == {Value(1, 0)}
    whole = call.tree.unflatten(list(range(5)))
    assert set(whole[2]) == {"number", "word", "more"}


def test_an_input_that_is_handed_on() -> None:
    call, flow = odd_call(lambda y, x, others: (y, x, others["mask"]), mask=torch.ones(2))
    assert call.leaves == (TensorLeaf((2, WIDTH), torch.float32), InputLeaf(0), InputLeaf(1))
    assert flow.needs == {Value(1, 0)}
    _, flow = odd_call(lambda y, x, others: (y, x), take=lambda result: result[1])
    assert flow.needs == {Value(0, 0)}, "the output of the call that made it"


def test_one_tensor_in_two_places() -> None:
    """Whoever reads it may have taken it from either."""
    for take in (lambda result: result["a"], lambda result: result["b"]):
        _, flow = odd_call(lambda y, x, others: {"a": y, "b": y}, take)
        assert flow.needs == {Value(1, 0), Value(1, 1)}


def test_a_parameter_that_is_returned_as_it_is() -> None:
    """Whoever reads it may have read it off its module."""
    flow = traced(pipeline_jobs.handing)
    (call,) = (index for index, call in enumerate(flow.calls) if call.name == "own")
    assert {Value(call, 0), "own.weight"} <= flow.calls[-1].needs


def test_a_strange_output() -> None:
    call, _ = odd_call(lambda y, x, others: (y, slice(2)))
    assert call.leaves[1] == StrangeLeaf("slice")


class Caching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.cache: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.cache = self.inner(x)
        return self.cache * 2


class Reading(nn.Module):
    """Reads another's cache in its own call."""

    def __init__(self, other: Caching) -> None:
        super().__init__()
        self.inner, self.others = nn.Linear(WIDTH, WIDTH), [other]

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + self.others[0].cache


class Leaking(nn.Module):
    def __init__(self, *, inside: bool) -> None:
        super().__init__()
        self.made, self.inside = Caching(), inside
        self.reader = Reading(self.made) if inside else nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        self.made(x)
        return self.reader(x if self.inside else self.made.cache)


def test_what_a_call_keeps_to_itself() -> None:
    """Whether glue hands it over, or the reader finds it."""
    for inside in (False, True):
        flow = follow(Leaking(inside=inside), ["made", "reader"], torch.randn(2, WIDTH))
        assert Inside(0) in flow.calls[1].needs
        assert Value(0, 0) not in flow.calls[1].needs


def test_a_value_that_a_call_finds_on_a_shared_object() -> None:
    job = pipeline_jobs.sharing
    flow = traced(job)
    assert all(Value(0, 0) in call.needs for call in flow.calls[1:5])


def test_a_call_that_changes_its_input() -> None:
    class Relu(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.relu_())

    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Relu(WIDTH, WIDTH))
    flow = follow(model, ["0", "1"], torch.randn(2, WIDTH))
    assert [call.wrote for call in flow.calls] == [(), (0,)]
    assert len(flow.calls[1].leaves) == 2, "what it changed is an output, too"
    assert [call.changed for call in flow.calls] == [True, False]


def test_glue_that_changes_an_output() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        one = self.first(x)
        two = self.second(x)
        one[:, 0] = 0.0
        return self.third(one + two)

    flow = flow_of(forward)
    assert [call.changed for call in flow.calls] == [True, False, False]
    assert not any(call.wrote for call in flow.calls)
    assert not any(call.changed for call in traced(pipeline_jobs.tied).calls)
    assert [call.changed for call in traced(pipeline_jobs.changing_glue).calls] == [False, *[True] * 4, False]


def test_a_model_that_changes_its_batch() -> None:
    assert traced(pipeline_jobs.changing_batch).changes_batch
    assert not traced(pipeline_jobs.changing_first).changes_batch


def test_flops() -> None:
    flow = flow_of(Model.forward)
    assert [call.flops for call in flow.calls] == [2 * 2 * WIDTH * WIDTH] * 3


def traced(job: Any) -> Flow:
    """On fake tensors, as a job's model is."""
    flow, reason = trace(job, record(job.model, 0), Watcher([call.name for call in describe(job).calls]))
    assert flow is not None, reason
    return flow


def test_tied_parameters_have_one_name() -> None:
    flow = traced(pipeline_jobs.tied)
    assert flow.readers("token.weight") == [0, 6]
    assert flow.readers("head.weight") == []
    assert flow.calls[-1].name == "head"
    assert "places" in flow.calls[1].needs


def test_a_watched_module_inside_another_belongs_to_it() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()), nn.Linear(WIDTH, WIDTH))
    flow = follow(model, ["0", "0.0", "1"], torch.randn(2, WIDTH))
    assert [call.name for call in flow.calls] == ["0", "1"]
    assert flow.calls[0].reads == {"0.0.weight", "0.0.bias"}


def test_a_watcher_begins_anew() -> None:
    job = pipeline_jobs.trunk
    watcher = Watcher([call.name for call in describe(job).calls])
    blueprint = record(job.model, 0)
    assert trace(job, blueprint, watcher) == trace(job, blueprint, watcher)
    assert not any(module._forward_hooks for module in blueprint.model.modules())
