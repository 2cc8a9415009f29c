"""Logits that wait: the same loss and gradients as real ones, whatever the model does with them."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.errors import JobError
from meshwright.facts.pieces import piece_rows
from meshwright.pieced_loss.head import HeadCalls, Output
from meshwright.pieced_loss.logits import Logits
from meshwright.torch_private.modes import TorchDispatchMode
from meshwright.torch_private.trees import tree_leaves

CLASSES, WIDTH, SAMPLES, LENGTH = 37, 8, 3, 5
Loss = Callable[[Tensor, Tensor], Tensor]


def rows(logits: Tensor) -> Tensor:
    return logits.view(-1, CLASSES)


def entropy(logits: Tensor, target: Tensor, **options: Any) -> Tensor:
    return F.cross_entropy(rows(logits), target.reshape(-1), **options)


def shifted(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits[..., :-1, :].contiguous().view(-1, CLASSES), target[:, 1:].reshape(-1))


def weighted(logits: Tensor, target: Tensor) -> Tensor:
    each = F.cross_entropy(logits.transpose(1, 2), target, reduction="none")
    return (each * torch.arange(15).view(3, 5)).sum()


def masked(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits[target != -100], target[target != -100])


def accurate(logits: Tensor, target: Tensor) -> Tensor:
    return entropy(logits, target) + 0 * (logits.detach().argmax(-1) == target).sum()


def z_loss(logits: Tensor, target: Tensor) -> Tensor:
    return entropy(logits, target) + 0.1 * torch.logsumexp(logits, -1).square().mean()


WITHOUT_LOGITS: dict[str, Loss] = {
    "sum": lambda x, y: entropy(x, y, reduction="sum"),
    "mean": entropy,
    "module": lambda x, y: nn.CrossEntropyLoss()(x.flatten(0, 1), y.flatten()),
    "shifted": shifted,
    "weighted": weighted,
    "permuted": lambda x, y: F.cross_entropy(x.permute(0, 2, 1), y),
    "smoothed": lambda x, y: entropy(x, y, label_smoothing=0.1),
    "class weights": lambda x, y: entropy(x, y, weight=torch.arange(1.0, CLASSES + 1, dtype=x.dtype)),
    "scaled": lambda x, y: entropy(2 * (x / 2.5 + 1), y),
    "softcap": lambda x, y: entropy(torch.tanh(x / 3.0) * 3.0, y),
    "nll": lambda x, y: F.nll_loss(rows(F.log_softmax(x, -1)), y.view(-1)),
    "masked": masked,
    "nothing": lambda x, y: F.cross_entropy(x[y > 99], y[y > 99], reduction="sum") + entropy(x, y),
    "selected": lambda x, y: F.cross_entropy(x[:, torch.tensor([0, 2, 2])].flatten(0, 1), y[:, [0, 2, 2]].flatten()),
    "accuracy": accurate,
    "z-loss": z_loss,
    "two losses": lambda x, y: entropy(x, y) + 0.1 * entropy(x * 2, y, reduction="sum"),
}


class Squares(torch.autograd.Function):
    """A loss that PyTorch's functions do not announce."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        ctx.save_for_backward(logits)
        return (logits * logits).sum()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return 2 * ctx.saved_tensors[0] * gradients[0]


def changed(logits: Tensor, target: Tensor) -> Tensor:
    """A copy keeps the old values, a view gets the new ones."""
    copy, view = logits * 1.0, rows(logits)
    logits.mul_(2)
    return F.cross_entropy(view, target.view(-1)) + 3 * entropy(copy, target)


def one_view_twice(logits: Tensor, target: Tensor) -> Tensor:
    """A loss and an own function of the same scaled part."""
    part = (logits[:, 1:] * 3).reshape(-1, CLASSES)
    return F.cross_entropy(part, target[:, 1:].reshape(-1)) + Squares.apply(part)


def masked_classes(logits: Tensor, target: Tensor) -> Tensor:
    logits[..., 35:] = -1e4
    return entropy(logits, target)


def under_no_grad(logits: Tensor, target: Tensor) -> Tensor:
    with torch.no_grad():
        assert (logits.softmax(-1) <= 1).all()
    return (logits**2).mean() + entropy(logits, target)


WITH_LOGITS: dict[str, Loss] = {
    "squares too": lambda x, y: entropy(x, y) + (x**2).sum(),
    "trimmed": lambda x, y: F.cross_entropy(x[..., :30].reshape(-1, 30), y.clamp(-100, 29).view(-1)),
    "changed in place": changed,
    "own function": lambda x, y: Squares.apply(x),
    "own function of a view": lambda x, y: Squares.apply(x[:, 1:].reshape(-1, CLASSES)) + entropy(x, y),
    "one view twice": one_view_twice,
    "masked classes": masked_classes,
    "probabilities": lambda x, y: F.cross_entropy(rows(x), torch.full((15, CLASSES), 1 / CLASSES, dtype=x.dtype)),
    "first under no_grad": under_no_grad,
    "class dim is time": lambda x, y: F.cross_entropy(x, torch.zeros(SAMPLES, CLASSES, dtype=torch.long)),
}


def pieced(layer: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def call(hidden: Tensor) -> Tensor:
        with HeadCalls(Output(shape=(CLASSES, WIDTH)), lambda product, args, kwargs: product(*args, **kwargs)):
            found = layer(hidden)
        assert isinstance(found, Logits)
        return found

    return call


def step(layer: nn.Linear, loss: Loss, run: Callable[[Tensor], Tensor], hidden: Tensor) -> list[Tensor]:
    """The loss and all gradients, and what needed real logits."""
    target = torch.arange(15).view(3, 5) * 2
    target[0, 1] = -100
    leaf = hidden.detach().requires_grad_()
    layer.zero_grad()
    total = loss(run(leaf * 1.0), target)
    (total * 0.3).backward()
    gradients = [leaf.grad, layer.weight.grad, *([] if layer.bias is None else [layer.bias.grad])]
    return [total.detach(), *(gradient.clone() for gradient in gradients if gradient is not None)]


def apart(first: list[Tensor], second: list[Tensor]) -> float:
    assert len(first) == len(second)
    pairs = zip(first, second, strict=True)
    return max(float((a.double() - b.double()).norm() / (a.double().norm() + 1e-30)) for a, b in pairs)


def layer_of(dtype: torch.dtype = torch.float64, bias: bool = True) -> tuple[nn.Linear, Tensor]:
    torch.manual_seed(0)
    return nn.Linear(WIDTH, CLASSES, bias=bias).to(dtype), torch.randn(SAMPLES, LENGTH, WIDTH, dtype=dtype)


class LargestMade(TorchDispatchMode):
    """The most rows of logits that any tensor held."""

    rows = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(found):
            if type(leaf) is Tensor and CLASSES in leaf.shape and WIDTH not in leaf.shape:
                self.rows = max(self.rows, leaf.numel() // CLASSES)
        return found


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("name", WITHOUT_LOGITS)
def test_same_gradients_without_logits(name: str, bias: bool) -> None:
    layer, hidden = layer_of(bias=bias)
    exact = step(layer, WITHOUT_LOGITS[name], layer, hidden)
    with LargestMade() as made:
        found = step(layer, WITHOUT_LOGITS[name], pieced(layer), hidden)
    assert apart(exact, found) < 1e-14
    assert made.rows <= -(-SAMPLES * LENGTH // 4)


@pytest.mark.parametrize("name", WITH_LOGITS)
def test_other_functions_get_real_logits(name: str) -> None:
    layer, hidden = layer_of()
    exact = step(layer, WITH_LOGITS[name], layer, hidden)
    assert apart(exact, step(layer, WITH_LOGITS[name], pieced(layer), hidden)) < 1e-14


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["sum", "weighted", "shifted", "smoothed"])
def test_low_precision_is_as_accurate(name: str, dtype: torch.dtype) -> None:
    """Against float64 from the same rounded operands, pieces are not further off than a whole loss."""
    layer, hidden = layer_of(dtype)

    def raised(logits: Tensor, target: Tensor) -> Tensor:
        return WITHOUT_LOGITS[name](logits.float(), target)

    whole, parts = step(layer, raised, layer, hidden), step(layer, raised, pieced(layer), hidden)
    exact = step(layer.double(), WITHOUT_LOGITS[name], layer, hidden.double())
    assert apart(exact, parts) < 1.5 * apart(exact, whole) + 1e-3


def test_products_with_a_transposed_weight() -> None:
    layer, hidden = layer_of(bias=False)
    exact = step(layer, entropy, layer, hidden)
    assert apart(exact, step(layer, entropy, pieced(lambda x: x @ layer.weight.t()), hidden)) < 1e-14


def test_frozen_weight_gets_no_gradient() -> None:
    layer, hidden = layer_of()
    layer.weight.requires_grad_(False)
    exact = step(layer, entropy, layer, hidden)
    assert apart(exact, step(layer, entropy, pieced(layer), hidden)) < 1e-14
    assert layer.weight.grad is None


@pytest.mark.parametrize("without", [torch.no_grad, torch.inference_mode])
def test_evaluation_holds_no_logits(without: Callable[[], Any]) -> None:
    layer, hidden = layer_of()
    target = torch.zeros(3, 5, dtype=torch.long)
    with without(), LargestMade() as made:
        found = entropy(pieced(layer)(hidden), target)
    torch.testing.assert_close(found, entropy(layer(hidden), target).detach())
    assert made.rows <= 4


def test_backward_twice() -> None:
    layer, hidden = layer_of()
    total = entropy(pieced(layer)(hidden), torch.zeros(3, 5, dtype=torch.long))
    total.backward(retain_graph=True)
    first = layer.weight.grad.clone()
    total.backward()
    torch.testing.assert_close(layer.weight.grad, 2 * first)


def test_hooks_on_logits_run() -> None:
    layer, hidden = layer_of()
    logits, seen = pieced(layer)(hidden), []
    logits.register_hook(lambda gradient: seen.append(tuple(gradient.shape)))
    entropy(logits, torch.zeros(3, 5, dtype=torch.long)).backward()
    assert seen == [(SAMPLES, LENGTH, CLASSES)]


def test_hook_that_reads_the_gradient_is_refused() -> None:
    layer, hidden = layer_of()
    logits = pieced(layer)(hidden)
    logits.register_hook(lambda gradient: gradient * 2)
    with pytest.raises(JobError, match="drop loss=pieced"):
        entropy(logits, torch.zeros(3, 5, dtype=torch.long)).backward()


def test_change_through_an_unfollowed_view_is_refused() -> None:
    layer, hidden = layer_of()
    logits = pieced(layer)(hidden)
    logits[..., 30:].fill_(-1e4)
    with pytest.raises(JobError, match="in place"):
        entropy(logits, torch.zeros(3, 5, dtype=torch.long))


def test_changed_input_is_refused() -> None:
    layer, hidden = layer_of()
    logits = pieced(layer)(hidden)
    hidden.add_(1)
    with pytest.raises(JobError, match="changed the input"):
        entropy(logits, torch.zeros(3, 5, dtype=torch.long))


def test_an_unread_output_is_never_computed() -> None:
    layer, hidden = layer_of()
    with LargestMade() as made:
        logits = pieced(layer)(hidden)
        assert logits.shape == (SAMPLES, LENGTH, CLASSES) and logits.dtype == torch.float64 and logits.requires_grad
    assert made.rows == 0


def test_logits_are_freed_without_a_search_for_cycles() -> None:
    layer, hidden = layer_of()
    gc.disable()
    try:
        logits = pieced(layer)(hidden)
        last = weakref.ref(rows(logits.float()))
        entropy(logits, torch.zeros(3, 5, dtype=torch.long)).backward()
        first = weakref.ref(logits)
        del logits
        assert first() is None and last() is None
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("count", "classes"), [(1, 10), (15, 37), (8192, 128256), (16384, 50304), (100_000, 1_000_000)]
)
def test_sizes_of_pieces(count: int, classes: int) -> None:
    size = piece_rows(count, classes)
    assert 1 <= size <= max(128, count)
    assert size * classes <= max(1 << 28, 128 * classes)
    assert count < 4 or -(-count // size) >= 3
