"""Computing in a small dtype with fp32 masters: what a module sees, and where its gradients land."""

import pytest
import torch
from torch import Tensor, nn

from meshwright.assemble.precision import (
    LossScale,
    batch_norm_in_fp32,
    cast,
    cast_borders,
    cast_parameters,
    loss_under,
)
from minimal import WIDTH, Block, Blocks, make_job

BF16 = torch.bfloat16


class Watched(nn.Module):
    """Remembers the dtypes that its forward saw."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("table", torch.ones(WIDTH))
        self.seen: dict[str, torch.dtype] = {}

    def forward(self, x: Tensor, number: int = 0) -> dict[str, Tensor]:
        self.seen = {"input": x.dtype, "weight": self.layer.weight.dtype, "buffer": self.table.dtype}
        return {"y": self.layer(x), "class": torch.tensor([number])}


def gradients_by_hand(model: nn.Module, x: Tensor) -> list[Tensor]:
    """What backward gives for a copy of the model that is in bf16 altogether."""
    low = model.to(BF16)
    low(x.to(BF16)).float().square().sum().backward()
    return [p.grad.float() for p in low.parameters()]


def test_forward_sees_copies() -> None:
    model = Watched()
    cast_parameters(model, BF16)
    output = model(torch.randn(2, WIDTH).to(BF16))
    assert model.seen == {"input": BF16, "weight": BF16, "buffer": torch.float32}
    assert output["y"].dtype == BF16
    assert dict(model.named_parameters())["layer.weight"].dtype == torch.float32


def test_gradients_land_in_fp32_on_the_originals() -> None:
    x = torch.randn(3, WIDTH)
    torch.manual_seed(0)
    expected = gradients_by_hand(Blocks(), x)
    torch.manual_seed(0)
    model = Blocks()
    blocks = list(model.blocks)
    cast_parameters(model, BF16)
    cast_borders(model, blocks, BF16)
    model(x).square().sum().backward()
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        assert parameter.grad.dtype == torch.float32
        assert torch.equal(parameter.grad, gradient)


def test_gradients_add_up_in_fp32() -> None:
    """1 + 2^-9 is 1 in bf16, so a sum over micro-batches must not be kept there."""
    layer = nn.Linear(1, 1, bias=False)
    cast_parameters(layer, BF16)
    for value in (1.0, 2.0**-9):
        layer(torch.tensor([[value]], dtype=BF16)).sum().backward()
    (weight,) = layer.parameters()
    assert weight.grad.item() == 1.0 + 2.0**-9


class Tied(nn.Module):
    """The head's weight is the embedding's."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(WIDTH, WIDTH, bias=False)
        self.block = Block()
        self.leave = nn.Linear(WIDTH, WIDTH, bias=False)
        self.leave.weight = self.enter.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(self.block(self.enter(x)))


def test_tied_weights() -> None:
    x = torch.randn(3, WIDTH).to(BF16)
    torch.manual_seed(0)
    expected = gradients_by_hand(Tied(), x)
    torch.manual_seed(0)
    model = Tied()
    cast_parameters(model, BF16)
    model(x).float().square().sum().backward()
    tied = dict(model.named_parameters())["enter.weight"]
    # The two uses of a tied weight are summed once in bf16 and once in fp32, hence not bit by bit.
    torch.testing.assert_close(tied.grad, expected[0], rtol=2**-6, atol=2**-6)


def test_recurrent_layers() -> None:
    layer = nn.LSTM(WIDTH, WIDTH, batch_first=True)
    cast_parameters(layer, BF16)
    output, _ = layer(torch.randn(2, 3, WIDTH).to(BF16))
    output.float().sum().backward()
    assert output.dtype == BF16
    assert all(p.grad.dtype == torch.float32 for p in layer.parameters())


def test_names_and_state_stay_the_users() -> None:
    model, cast_model = Blocks(), Blocks()
    cast_model.load_state_dict(model.state_dict())
    cast_parameters(cast_model, BF16)
    assert [name for name, _ in cast_model.named_parameters()] == [name for name, _ in model.named_parameters()]
    for name, value in cast_model.state_dict().items():
        assert torch.equal(value, model.state_dict()[name])
    assert [type(module).__name__ for module in cast_model.modules()] == [type(m).__name__ for m in model.modules()]


def test_parameters_that_are_no_floats_are_left() -> None:
    layer = nn.Linear(WIDTH, 2)
    layer.counts = nn.Parameter(torch.arange(3), requires_grad=False)
    cast_parameters(layer, BF16)
    assert layer(torch.ones(1, WIDTH).to(BF16)).dtype == BF16
    assert layer.counts.dtype == torch.int64


def test_borders() -> None:
    model = Watched()
    cast_parameters(model, BF16)
    cast_borders(model, [], BF16)
    output = model(torch.randn(2, WIDTH), number=3)
    assert model.seen["input"] == BF16
    assert output["y"].dtype == BF16
    assert output["class"].dtype == torch.int64


def test_what_enters_a_block_is_cast() -> None:
    model = nn.Sequential(nn.LayerNorm(WIDTH), Watched())
    cast_borders(model, [model[1]], torch.float64)
    model[1].double()
    model[0].double()
    assert model(torch.randn(2, WIDTH))["y"].dtype == torch.float64
    assert model[1].seen["input"] == torch.float64


class Listening(nn.Module):
    """A block that keeps what it got."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        self.seen.append(positions)
        return x + positions


class Positioned(nn.Module):
    """Blocks that all get the same positions, which a model may change between them, or train."""

    def __init__(self, *, change: bool, train: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Listening() for _ in range(3))
        self.positions, self.change = torch.arange(4.0, requires_grad=train), change

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, self.positions)
            if self.change:
                self.positions += 1
        return x


@pytest.mark.parametrize(("change", "train"), [(False, False), (True, False), (False, True)])
def test_what_all_blocks_get_is_cast_once_while_it_stays_the_same(change: bool, train: bool) -> None:
    model = Positioned(change=change, train=train)
    cast_borders(model, list(model.blocks), BF16)
    for call in range(2):
        model(torch.zeros(4))
        first, *others = [block.seen[call] for block in model.blocks]
        assert all((other is first) is not (change or train) for other in others)
        expected = torch.arange(4.0) + (3 * call if change else 0)
        for place, got in enumerate((first, *others)):
            assert got.dtype == BF16 and torch.equal(got.float(), expected + (place if change else 0))
    assert model.blocks[0].seen[0] is not model.blocks[0].seen[1], "another call casts again"


def test_a_cast_that_a_block_changes_is_made_again() -> None:
    model = Positioned(change=False, train=False)
    cast_borders(model, list(model.blocks), BF16)
    first = model.blocks[0]
    first.register_forward_hook(lambda *_: first.seen[-1].zero_())
    model(torch.zeros(4))
    assert torch.equal(model.blocks[1].seen[0].float(), torch.arange(4.0))


@pytest.mark.parametrize("compiled", [False, True])
def test_the_loss_sees_fp32(compiled: bool) -> None:
    seen: list[torch.dtype] = []

    def loss(output: Tensor, batch: Tensor) -> tuple[Tensor, int]:
        seen.append(output.dtype)
        return (output - batch).square().sum(), len(batch)

    output, batch = torch.randn(4, 2).to(BF16), torch.randn(4, 2)
    total, weight = loss_under("bf16", make_job(loss=loss), compiled=compiled)(output, batch)
    assert seen[0] == torch.float32
    assert weight == 4
    torch.testing.assert_close(total, (output.float() - batch).square().sum())


def test_cast_keeps_what_is_not_floating() -> None:
    tree = cast(
        {"x": torch.ones(1), "ids": torch.ones(1, dtype=torch.long), "mask": torch.ones(1).bool(), "n": 1}, BF16
    )
    assert [tree[key].dtype for key in ("x", "ids", "mask")] == [BF16, torch.int64, torch.bool]
    assert tree["n"] == 1


@pytest.mark.parametrize("training", [True, False])
def test_batch_norm_runs_with_fp32_weights(training: bool) -> None:
    torch.manual_seed(0)
    x = torch.randn(6, WIDTH).to(BF16)
    expected = nn.BatchNorm1d(WIDTH).train(training)(x)
    norm = nn.BatchNorm1d(WIDTH).train(training)
    model = nn.Sequential(norm)
    cast_parameters(model, BF16)
    batch_norm_in_fp32(model, BF16)
    assert torch.equal(model(x), expected)
    assert norm.running_mean.dtype == torch.float32


def test_loss_scale_follows_grad_scaler() -> None:
    scale = LossScale(value=8.0, interval=3)
    history = []
    for finite in [True, True, True, False, True, True, False, True, True, True]:
        scale.after(finite)
        history.append(scale.value)
    assert history == [8, 8, 16, 8, 8, 8, 4, 4, 4, 8]
    reference = torch.amp.GradScaler("cpu")
    assert (LossScale().value, LossScale().growth, LossScale().interval) == (
        reference.get_scale(),
        reference.get_growth_factor(),
        reference.get_growth_interval(),
    )
    assert reference.get_backoff_factor() == 1 / LossScale().growth
