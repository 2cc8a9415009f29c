"""What is put around a module's forward leaves the module what it was."""

import copy
import inspect
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshwright.recording.wrap_forward import wrap_call, wrap_forward
from minimal import WIDTH, Block, Blocks


def twice(module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    return 2 * forward(*args, **kwargs)


def plus_one(module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    return forward(*args, **kwargs) + 1


class Named(nn.Linear):
    """Takes a keyword that its parent does not."""

    def forward(self, x: Tensor, *, shift: float = 0.0) -> Tensor:
        return super().forward(x) + shift


@pytest.fixture
def x() -> Tensor:
    return torch.ones(1, WIDTH)


def test_the_wrapper_is_called(x: Tensor) -> None:
    layer = Named(WIDTH, 2)
    before = layer(x, shift=3.0)
    wrap_forward(layer, twice)
    assert torch.equal(layer(x, shift=3.0), 2 * before)


def test_wrappers_nest_with_the_last_outermost(x: Tensor) -> None:
    layer = Named(WIDTH, 2)
    before = layer(x)
    wrap_forward(layer, twice)
    wrap_forward(layer, plus_one)
    assert torch.equal(layer(x), 2 * before + 1)


def test_names_and_class_stay() -> None:
    model, plain = Blocks(), Blocks()
    names = [name for name, _ in model.named_parameters()]
    for block in model.blocks:
        wrap_forward(block, twice)
    wrap_forward(model, plus_one)
    assert [name for name, _ in model.named_parameters()] == names
    assert list(model.state_dict()) == list(plain.state_dict())
    assert isinstance(model, Blocks)
    assert isinstance(model.blocks[0], Block)
    assert repr(model) == repr(plain)


def test_signature_and_doc_stay() -> None:
    layer = Named(2, 2)
    wrap_forward(layer, twice)
    assert inspect.signature(layer.forward) == inspect.signature(Named(2, 2).forward)
    assert type(layer).__doc__ == Named.__doc__
    assert type(layer).__module__ == Named.__module__


def test_modules_that_are_wrapped_alike_share_a_class() -> None:
    model = Blocks()
    for block in model.blocks:
        wrap_forward(block, twice)
    assert type(model.blocks[0]) is type(model.blocks[1])
    assert type(model.blocks[0]) is not Block


def test_others_of_the_class_are_left_alone(x: Tensor) -> None:
    wrapped, other = Named(WIDTH, 2), Named(WIDTH, 2)
    before = other(x)
    wrap_forward(wrapped, twice)
    assert type(other) is Named
    assert torch.equal(other(x), before)


def test_a_forward_of_the_instance_is_kept(x: Tensor) -> None:
    layer = Named(WIDTH, WIDTH)
    layer.forward = lambda x: x + 5  # type: ignore[method-assign, assignment]
    wrap_forward(layer, twice)
    assert "forward" not in vars(layer)
    assert torch.equal(layer(x), 2 * (x + 5))


def test_hooks_still_run(x: Tensor) -> None:
    layer = Named(WIDTH, 2)
    seen: list[Tensor] = []
    layer.register_forward_hook(lambda module, args, output: seen.append(output))
    before = layer(x)
    wrap_forward(layer, twice)
    layer(x)
    assert torch.equal(seen[-1], 2 * before)


def test_a_copy_is_wrapped_too(x: Tensor) -> None:
    """DataParallel copies a module's attributes; the copy must not call the original."""
    layer = Named(WIDTH, 2)
    wrap_forward(layer, twice)
    twin = copy.deepcopy(layer)
    nn.init.ones_(twin.weight)
    nn.init.zeros_(twin.bias)
    assert torch.equal(twin(x), torch.full((1, 2), 2.0 * WIDTH))
    replica = layer._replicate_for_data_parallel()
    replica.weight, replica.bias = twin.weight.detach(), twin.bias.detach()
    assert torch.equal(replica(x), twin(x))


def test_weights_can_still_be_pickled() -> None:
    layer = Named(WIDTH, 2)
    wrap_forward(layer, twice)
    assert pickle.loads(pickle.dumps(layer.state_dict())).keys() == {"weight", "bias"}


def test_what_surrounds_a_call_is_not_compiled() -> None:
    """Alike modules are compiled once, although what surrounds each of them differs."""
    graphs: list[Any] = []
    calls: list[str] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    def around(name: str) -> Any:
        def call(module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
            calls.append(name)
            return args[0] if len(calls) == 4 else forward(*args, **kwargs)

        return call

    x, first, second = torch.randn(2, WIDTH, requires_grad=True), Block(), Block()
    expected = second(first(x))
    for name, module in (("first", first), ("second", second)):
        module.compile(backend=backend)
        wrap_call(module, around(name))
    assert torch.equal(second(first(x)), expected)
    assert torch.equal(second(first(x)), first(x)) and len(graphs) == 1
    assert calls == ["first", "second", "first", "second", "first"]
