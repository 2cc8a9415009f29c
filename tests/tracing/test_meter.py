"""Bytes that operators read and write: of tables, only what is looked up or changed."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.describe.as_on_cuda import as_on_cuda
from meshwright.tracing.meter import Meter

ROWS, CLASSES = 64, 4096
TABLE = ROWS * CLASSES * 4
"""Bytes of the logits."""


def touched(name: str, run: Callable[[Tensor, Tensor], object]) -> float:
    """Bytes of an operator in a function of logits and labels."""
    logits, labels = torch.zeros(ROWS, CLASSES, requires_grad=True), torch.zeros(ROWS, dtype=torch.int64)
    found: dict[str, float] = {}
    with Meter(lambda run: found.__setitem__(run.name, run.bytes)):
        run(logits, labels)
    return found[name]


@pytest.mark.parametrize(
    ("name", "run"),
    [
        ("gather", lambda logits, labels: logits.gather(-1, labels[:, None])),
        ("index_select", lambda logits, labels: logits.index_select(1, labels[:2])),
        ("scatter_add_", lambda logits, labels: logits.detach().scatter_add_(-1, labels[:, None], torch.ones(ROWS, 1))),
        ("nll_loss_forward", lambda logits, labels: F.nll_loss(logits, labels)),
    ],
)
def test_a_look_up_touches_few_elements(name: str, run: Callable[[Tensor, Tensor], object]) -> None:
    assert 0 < touched(name, run) < TABLE / 100


def test_a_gradient_of_a_look_up_is_written_whole_and_nothing_else_is_read() -> None:
    size = touched("nll_loss_backward", lambda logits, labels: F.nll_loss(logits, labels).backward())
    assert TABLE <= size < 1.01 * TABLE


def test_other_operators_read_and_write_all() -> None:
    assert touched("exp", lambda logits, labels: logits.exp()) == 2 * TABLE


def test_attention_has_the_same_shape_in_forward_and_in_backward() -> None:
    shapes: dict[str, tuple[int, ...]] = {}
    with as_on_cuda(), Meter(lambda run: shapes.__setitem__(run.name, run.shape)):
        queries, keys = (torch.empty(2, 4, n, 64, dtype=torch.bfloat16, device="meta") for n in (128, 256))
        attended = F.scaled_dot_product_attention(queries.requires_grad_(), keys, keys)
        attended.backward(torch.empty_like(attended))
    found = {name: shape for name, shape in shapes.items() if "attention" in name}
    assert len(found) == 2 and set(found.values()) == {(8, 128, 256, 64)}
