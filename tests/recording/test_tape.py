"""The tape gives the weights of `torch.manual_seed(seed); build()`, bit by bit, without ever holding them all."""

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import orthogonal, spectral_norm, weight_norm

from meshwright.recording.blueprint import recording
from meshwright.recording.operation import TapeOperation
from meshwright.recording.tape import NotRecorded, Tape

SEED = 11
Build = Callable[[], nn.Module]


def tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters, buffers and plain tensor attributes."""
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)
    for name, module in model.named_modules():
        yield from ((f"{name}:{key}", value) for key, value in vars(module).items() if isinstance(value, Tensor))


def plain(build: Build) -> dict[str, Tensor]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        return {name: tensor.detach() for name, tensor in tensors(build())}


def replayed(build: Build) -> dict[str, Tensor]:
    with recording(SEED) as tape:
        model = build()
    found = dict(tensors(model))
    slots = {name: tape.slot(tensor) for name, tensor in found.items() if tensor.is_meta}
    storages: dict[int, torch.UntypedStorage] = {}
    tape.play(storages.__setitem__)
    return {name: slots[name].on(storages[slots[name].storage]) if name in slots else found[name] for name in found}


def assert_replays(build: Build) -> None:
    expected, got = plain(build), replayed(build)
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        assert got[name].dtype == value.dtype, name
        assert torch.equal(got[name], value), name


class Made(nn.Module):
    """A module whose content a function makes."""

    def __init__(self, fill: Callable[[Any], None]) -> None:
        super().__init__()
        fill(self)


def initialisers(module: Any) -> None:
    module.truncated = nn.Parameter(nn.init.trunc_normal_(torch.empty(5, 3), std=0.02))
    module.tall = nn.Parameter(nn.init.orthogonal_(torch.empty(5, 3)))
    module.wide = nn.Parameter(nn.init.orthogonal_(torch.empty(3, 5)))
    module.sparse = nn.Parameter(nn.init.sparse_(torch.empty(4, 4), 0.5))
    module.conv = nn.Conv2d(2, 2, 3)
    nn.init.dirac_(module.conv.weight)


def truncated(module: Any) -> None:
    """Normal distributions of which much is out of bounds, so that PyTorch draws again."""
    own = torch.Generator().manual_seed(5)
    module.table = nn.Parameter(nn.init.trunc_normal_(torch.empty(300, 7), std=1.0, a=-1.5, b=1.5))
    module.after = nn.Linear(2, 2)
    module.far = nn.Parameter(nn.init.trunc_normal_(torch.empty(50), mean=0.0, std=1.0, a=1.0, b=1.5))
    module.low = nn.Parameter(torch.zeros(4, 9, dtype=torch.bfloat16))
    nn.init.trunc_normal_(module.low[:, 3:], 0.0, 0.02, -0.02, 0.02)
    module.own = nn.Parameter(nn.init.trunc_normal_(torch.empty(40), a=-1.0, b=1.0, generator=own))
    module.last = nn.Parameter(torch.randn(3))


def tied(module: Any) -> None:
    module.token, module.head = nn.Embedding(7, 3), nn.Linear(3, 7, bias=False)
    module.head.weight = module.token.weight
    nn.init.normal_(module.head.weight, std=0.02)


def numbers_from_tensors(module: Any) -> None:
    module.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(3))
    for layer, rate in zip(module.layers, torch.linspace(0.1, 0.3, 3), strict=True):
        nn.init.normal_(layer.weight, std=rate.item())
    module.drawn = nn.Parameter(torch.full((2,), float(torch.randint(1000, ()))))
    module.after = nn.Linear(2, 2)


def rejection(module: Any) -> None:
    drawn = torch.randn(6)
    while (drawn.abs() > 1).any():
        drawn = torch.where(drawn.abs() > 1, torch.randn(6), drawn)
    module.drawn, module.after = nn.Parameter(drawn), nn.Linear(2, 2)


def buffers(module: Any) -> None:
    module.norm = nn.BatchNorm1d(3)
    module.register_buffer("mask", torch.tril(torch.ones(3, 3)).bool(), persistent=False)
    module.register_buffer("places", torch.arange(5).expand(1, -1), persistent=False)
    module.register_buffer("nothing", None)
    module.frequencies = 1.0 / 10000 ** (torch.arange(0, 4, 2).float() / 4)


def constants(module: Any) -> None:
    table = torch.tensor([1.0, 2.0, 3.0])
    module.register_buffer("table", table)
    module.scaled = nn.Parameter(torch.randn(3) * table)
    table.add_(1)
    module.shifted = nn.Parameter(torch.randn(3) + table)
    module.kept = torch.tensor([4, 5])
    module.numbers = nn.Parameter(torch.from_numpy(numpy.linspace(0, 1, 3)))
    module.loaded = nn.Linear(2, 2)
    module.loaded.load_state_dict({"weight": torch.tensor([[1.0, 2.0], [3.0, 4.0]]), "bias": torch.tensor([5.0, 6.0])})


def views_and_dtypes(module: Any) -> None:
    both = torch.randn(4, 2)
    module.first, module.second = nn.Parameter(both[:2]), nn.Parameter(both[2:])
    module.turned = nn.Parameter(torch.randn(3, 2).t())
    module.half = nn.Linear(3, 3).to(torch.bfloat16)
    module.replaced = nn.Linear(2, 2)
    module.replaced.weight.data = torch.randn(2, 2).double()


def changed_shape_in_place(module: Any) -> None:
    module.squeezed = nn.Parameter(torch.randn(3, 1).squeeze_(1))


def own_generator(module: Any) -> None:
    generator = torch.Generator().manual_seed(5)
    module.first = nn.Parameter(torch.randn(3, generator=generator))
    module.largest = module.first.max().item()
    module.second = nn.Parameter(torch.empty(3).normal_(generator=generator))


def encoder() -> nn.Module:
    """It copies one layer deeply."""
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), 2)


@pytest.mark.parametrize(
    "fill",
    [
        *(initialisers, truncated, tied, numbers_from_tensors, rejection, buffers, constants, views_and_dtypes),
        *(changed_shape_in_place, own_generator),
    ],
)
def test_made_by_hand(fill: Callable[[Any], None]) -> None:
    assert_replays(lambda: Made(fill))


def test_truncated_draws_are_not_read_while_they_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each look at what was drawn would play the tape: modules of a billion parameters would take minutes."""

    def read(tape: Tape, wanted: Any) -> torch.Tensor:
        raise AssertionError("a value was read")

    monkeypatch.setattr(Tape, "_real", read)
    with recording(seed=1) as tape:
        Made(truncated)
    assert not tape.doubt


def test_a_truncated_draw_of_wrong_bounds_fails_where_it_is_called() -> None:
    with pytest.raises(ZeroDivisionError), recording(seed=1):
        nn.init.trunc_normal_(torch.empty(3), std=0.0)


@pytest.mark.parametrize(
    "build",
    [
        encoder,
        lambda: nn.LSTM(3, 4, num_layers=2),
        lambda: weight_norm(nn.Linear(3, 4)),
        lambda: spectral_norm(nn.Linear(3, 4)),
        lambda: nn.Embedding(5, 3, padding_idx=1),
    ],
    ids=["encoder", "lstm", "weight_norm", "spectral_norm", "padded"],
)
def test_made_by_torch(build: Build) -> None:
    assert_replays(build)


def seeds_itself() -> nn.Module:
    torch.manual_seed(42)
    return nn.Linear(3, 3)


def forks() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        first = nn.Linear(2, 2)
    return nn.Sequential(first, nn.Linear(2, 2))


def goes_back() -> nn.Module:
    before = torch.get_rng_state()
    first = nn.Linear(2, 2)
    torch.set_rng_state(before)
    return nn.Sequential(first, nn.Linear(2, 2))


@pytest.mark.parametrize("build", [seeds_itself, forks, goes_back])
def test_a_builder_that_sets_the_generator(build: Build) -> None:
    assert_replays(build)


def test_an_operator_without_a_meta_kernel() -> None:
    """Its shapes are those that it gives on real values."""
    assert_replays(lambda: orthogonal(nn.Linear(4, 3)))


@pytest.mark.parametrize("kind", ["GPT2", "Llama", "ViT", "Bert"])
def test_made_by_hugging_face(kind: str) -> None:
    transformers = pytest.importorskip("transformers")
    size = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
    if kind == "ViT":
        config = transformers.ViTConfig(**size, image_size=8, patch_size=4)
    elif kind == "GPT2":
        config = transformers.GPT2Config(n_embd=8, n_layer=2, n_head=2, vocab_size=16, n_positions=8)
    else:
        config = getattr(transformers, f"{kind}Config")(**size, vocab_size=16, max_position_embeddings=8)
    heads = {"GPT2": "GPT2LMHeadModel", "Llama": "LlamaForCausalLM", "ViT": "ViTModel", "Bert": "BertForMaskedLM"}
    assert_replays(lambda: getattr(transformers, heads[kind])(config))


def test_storages_are_handed_over_once_and_when_final(monkeypatch: pytest.MonkeyPatch) -> None:
    with recording(SEED) as tape:
        model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(10)))
        for layer in model:
            nn.init.normal_(layer.weight)
    most: list[int] = []
    play = TapeOperation.play

    def watched(operation: TapeOperation, live: dict[int, torch.UntypedStorage]) -> None:
        play(operation, live)
        most.append(len(live))

    monkeypatch.setattr(TapeOperation, "play", watched)
    handed: dict[int, tuple[torch.UntypedStorage, list[int]]] = {}

    def hand_over(key: int, storage: torch.UntypedStorage) -> None:
        assert key not in handed
        handed[key] = storage, storage.tolist()

    tape.play(hand_over)
    assert {tape.slot(p).storage for p in model.parameters()} <= handed.keys()
    assert all(storage.tolist() == content for storage, content in handed.values())
    # Biases are final before any weight is: only the ten weights wait for their second filling.
    assert max(most) <= 12 < len(list(model.parameters()))


@pytest.mark.parametrize(
    "change", [lambda t: t.normal_(), lambda t: t.add_(torch.ones(2)), lambda t: t.copy_(torch.randn(2))]
)
def test_changing_data_with_what_is_not_there_yet_is_no_recording(change: Callable[[Tensor], Tensor]) -> None:
    """Also where the builder catches the error."""
    with recording(SEED) as tape, pytest.raises(NotRecorded, match="changes a tensor made from data"):
        change(torch.tensor([1.0, 2.0]))
    assert "changes a tensor made from data" in tape.doubt


def test_other_generators_are_seeded_and_put_back() -> None:
    def draw() -> tuple[float, float]:
        return random.random(), float(numpy.random.rand())

    random.seed(1)
    numpy.random.seed(1)
    undisturbed = draw(), draw()
    random.seed(1)
    numpy.random.seed(1)
    before = draw()
    with recording(SEED):
        inside = draw()
    assert (before, draw()) == undisturbed
    with recording(SEED):
        assert draw() == inside
    with recording(SEED + 1):
        assert draw() != inside


def test_torch_is_not_disturbed() -> None:
    before = torch.get_rng_state()
    replayed(lambda: Made(numbers_from_tensors))
    assert torch.equal(torch.get_rng_state(), before)
