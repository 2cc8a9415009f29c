"""Operator-wise parallelism on real ranks: models, and functions of (world, ...) that `RankPool` can send."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from meshwright.assemble.precision import cast_parameters
from meshwright.assemble.recompute import recompute_blocks
from meshwright.assemble.world import World
from meshwright.describe.blocks import find_blocks
from meshwright.strategies.cuts import Cuts
from meshwright.strategies.operator import rules
from meshwright.strategies.operator.split import plan_operators, split_operators
from meshwright.strategies.tensor.compiled import MADE
from meshwright.strategies.tensor.draft import compile_programs
from meshwright.strategies.tensor.replay import program_state

WORDS = 24


def cnn() -> nn.Module:
    convolutions = [nn.Conv2d(3, 8, 3), nn.ReLU(inplace=True), nn.Conv2d(8, 16, 3, stride=2), nn.ReLU(inplace=True)]
    return nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(16 * 9, 32), nn.ReLU(), nn.Linear(32, 10))


class Residual(nn.Module):
    """With all that convolutions can be asked for."""

    def __init__(self, channels: int = 8) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 3, padding="same", bias=False)
        self.first = nn.Conv2d(channels, channels, 3, padding=1, padding_mode="circular")
        self.norm = nn.GroupNorm(2, channels)
        self.second = nn.Conv2d(channels, 2 * channels, 3, padding=2, dilation=2, groups=4)
        self.side = nn.Conv2d(channels, 2 * channels, 1)
        self.head = nn.Linear(2 * channels, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        x = self.side(x) + self.second(F.relu(self.norm(self.first(x))))
        return self.head(x.mean((2, 3)))


class Signals(nn.Module):
    """One and three dims, transposed and in groups."""

    def __init__(self) -> None:
        super().__init__()
        self.narrow = nn.Conv1d(4, 8, 3, stride=2)
        self.widen = nn.ConvTranspose1d(8, 4, 3, stride=2)
        self.grouped = nn.ConvTranspose1d(4, 8, 3, groups=4, output_padding=1, stride=2)
        self.deep = nn.Conv3d(2, 4, 2)
        self.back = nn.ConvTranspose3d(4, 4, 2, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.grouped(self.widen(self.narrow(x), output_size=[x.shape[-1]]))
        return self.back(self.deep(y[:, :2, :8].reshape(-1, 2, 2, 2, 2))).sum() + self.narrow(x[0]).square().sum()


class Tied(nn.Module):
    """An embedding and a head of one weight. Its sizes say how that can be divided."""

    def __init__(self, words: int = WORDS, features: int = 8) -> None:
        super().__init__()
        self.token = nn.Embedding(words, features, padding_idx=words - 1)
        self.place = nn.Embedding(6, features)
        self.mix = nn.Linear(features, features)
        self.head = nn.Linear(features, words)
        self.head.weight = self.token.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.token(x) + self.place(torch.arange(x.shape[1]))
        return self.head(y + torch.tanh(self.mix(y)))


def tied_by_features() -> nn.Module:
    return Tied(words=23)


class Attention(nn.Module):
    """Self and cross attention, under masks of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.self_first = nn.MultiheadAttention(16, 4, batch_first=True)
        self.self_last = nn.MultiheadAttention(16, 4, bias=False)
        self.cross = nn.MultiheadAttention(16, 4, kdim=16, vdim=8, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        length = x.shape[1]
        causal = torch.triu(torch.ones(length, length, dtype=torch.bool), 1)
        padding = torch.zeros(x.shape[:2], dtype=torch.bool)
        padding[0, -2:] = True
        y, weights = self.self_first(x, x, x, attn_mask=causal, key_padding_mask=padding)
        y, _ = self.self_first(y, y, y, attn_mask=causal, need_weights=False, is_causal=True)
        by_head = torch.arange(len(x) * 4.0)[:, None, None] * torch.linspace(-1, 1, length) + torch.zeros(
            length, 1
        ).type_as(x)
        z, by_head_weights = self.self_last(*3 * [y.transpose(0, 1)], attn_mask=by_head, average_attn_weights=False)
        out, _ = self.cross(z.transpose(0, 1), x, x[..., :8], key_padding_mask=padding, need_weights=False)
        one, _ = self.cross(out[0], x[0], x[0, :, :8])
        return out.sum(-1) + one.sum() + weights.square().sum() + by_head_weights[:, ::2].square().sum()


class Encoder(nn.Module):
    """PyTorch's own; when it only infers, it would hand its layers' weights to one kernel."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)
        self.inner = nn.TransformerEncoder(layer, 2, enable_nested_tensor=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        padding = torch.zeros(x.shape[:2], dtype=torch.bool)
        padding[0, -2:] = True
        return self.inner(x, src_key_padding_mask=padding).masked_fill(padding[..., None], 0)


class Conv1D(nn.Module):
    """As Hugging Face's."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf = nf
        self.weight, self.bias = nn.Parameter(torch.randn(nx, nf)), nn.Parameter(torch.randn(nf))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(*x.shape[:-1], self.nf)


def transposed_linears() -> nn.Module:
    return nn.Sequential(Conv1D(12, 16), nn.Tanh(), Conv1D(5, 12))


def images() -> torch.Tensor:
    return torch.randn(4, 3, 9, 9)


INPUTS: dict[Callable[[], nn.Module], Callable[[], torch.Tensor]] = {
    cnn: images,
    Residual: images,
    Signals: lambda: torch.randn(2, 4, 17),
    Tied: lambda: torch.randint(WORDS - 1, (3, 6)).index_fill(1, torch.tensor([0]), WORDS - 1),
    tied_by_features: lambda: torch.randint(23, (3, 6)),
    Attention: lambda: torch.randn(3, 5, 16),
    Encoder: lambda: torch.randn(3, 5, 16),
    transposed_linears: lambda: torch.randn(2, 3, 16),
}


def divided(
    world: World, make: Callable[[], nn.Module], mesh: DeviceMesh | None = None, blocks: tuple[str, ...] = ()
) -> tuple[nn.Module, nn.Module, Cuts]:
    """A whole model, and its divided twin with the same weights, in float64: rounding hides nothing there."""
    mesh = mesh or init_device_mesh("cpu", (world.ranks,), mesh_dim_names=("op",))
    torch.manual_seed(0)
    whole = make().double()
    with torch.device("meta"):
        twin = make().double()
    cuts = split_operators(twin, plan_operators(twin, mesh.size()), mesh, blocks)
    _fill(twin, {name: value.detach() for name, value in whole.named_parameters(remove_duplicate=False)}, cuts)
    return whole, twin, cuts


def _fill(twin: nn.Module, values: dict[str, torch.Tensor], cuts: Cuts) -> None:
    filled: dict[nn.Parameter, nn.Parameter] = {}  # Module.to_empty would untie what is tied
    for path, meta in list(twin.named_parameters(remove_duplicate=False)):
        value = cuts[path].take(values[path]) if path in cuts else values[path].clone()
        assert value.shape == meta.shape
        owner, _, name = path.rpartition(".")
        filled.setdefault(meta, nn.Parameter(value))
        twin.get_submodule(owner)._parameters[name] = filled[meta]


def differences(world: World, make: Callable[[], nn.Module], change: str = "") -> dict[str, float]:
    """Largest differences from the whole model: of the output, the input's gradient, and every parameter's."""
    whole, twin, cuts = divided(world, make)
    if change:
        CHANGES[change](whole, twin)
    return _compare(make, whole, twin, cuts)


def program_differences(world: World, make: Callable[[], nn.Module], change: str = "") -> dict[str, float]:
    """The same for the recorded program of the whole model. "plainly" is 0 if the program ran."""
    whole, twin, cuts = divided(world, make, blocks=("",))
    if change == "compile":
        compile_programs([twin])
    elif change:
        CHANGES[change](whole, twin)
    x = INPUTS[make]()
    quick = partial(torch.compile, backend="aot_eager")
    with patch.object(torch, "compile", quick), patch.dict(MADE, clear=True):
        twin(x.double().requires_grad_() if x.is_floating_point() else x)
        found = _compare(make, whole, twin, cuts)
        (bound,) = program_state(twin).programs
        return found | {"plainly": float(not bound.calls), "uncompiled": float(change == "compile" and not MADE)}


def message_counts(world: World, programs: bool) -> list[int]:
    """Messages of forward and backward of attention whose query, key and value are layers of their own."""
    _, twin, _ = divided(world, Projections, blocks=("",) if programs else ())
    x = torch.randn(2, 32, 8, dtype=torch.float64, requires_grad=True)
    twin(x)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as forward:
        loss = twin(x).sum()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as backward:
        loss.backward()
    return [sum(event.name.startswith("gloo:") for event in part.events()) for part in (forward, backward)]


class Projections(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(self.query(x), self.key(x), self.value(x))


DEFECTS: dict[str, tuple[Callable[[], nn.Module], Callable[..., torch.Tensor]]] = {
    "copy_in": (cnn, lambda x, mesh: x),
    "add_up": (tied_by_features, lambda x, mesh: x),
    "slice_in": (tied_by_features, lambda x, dim, mesh: x.chunk(mesh.size(), dim)[mesh.get_local_rank()]),
    "gather": (cnn, lambda x, dim, mesh: torch.cat([x] * mesh.size(), dim)),
}
"""What is planted for a collective, and a model that uses it."""


def defective_differences(world: World, defect: str) -> dict[str, float]:
    make, planted = DEFECTS[defect]
    with patch.object(rules, defect, planted):
        return differences(world, make)


def sharded_differences(world: World, make: Callable[[], nn.Module]) -> dict[str, float]:
    """The same under FSDP2, which is laid over blocks and the root; all data ranks have the same batch."""
    mesh = init_device_mesh("cpu", (world.ranks // 2, 2), mesh_dim_names=("data", "op"))
    whole, twin, cuts = divided(world, make, mesh["op"])
    for block in find_blocks(twin):
        fully_shard(twin.get_submodule(block), mesh=mesh["data"])
    fully_shard(twin, mesh=mesh["data"])
    return _compare(make, whole, twin, cuts)


def _compare(make: Callable[[], nn.Module], whole: nn.Module, twin: nn.Module, cuts: Cuts) -> dict[str, float]:
    results = []
    for model in (whole, twin):
        torch.manual_seed(1)
        x = INPUTS[make]()
        if x.is_floating_point():
            x = x.double().requires_grad_()
        out = model(x).double()
        (out * torch.linspace(-1, 1, out.numel()).view_as(out)).sum().backward()
        results.append((out, x.grad, dict(model.named_parameters(remove_duplicate=False))))
    (out, grad, parameters), (own_out, own_grad, own) = results
    found = {"output": _difference(own_out, out)}
    if grad is not None:
        found["input"] = _difference(own_grad, grad)
    assert list(parameters) == list(own)
    for name, parameter in parameters.items():
        local = own[name].grad
        local = local.full_tensor() if isinstance(local, DTensor) else local
        joined = cuts[name].join(local) if name in cuts else local
        found[name] = _difference(joined, parameter.grad)
    return found


def _difference(a: torch.Tensor, b: torch.Tensor) -> float:
    assert a.shape == b.shape, (a.shape, b.shape)
    return (a - b).abs().max().item() / max(1.0, b.abs().max().item())


def parameter_share(world: World, make: Callable[[], nn.Module]) -> float:
    whole, twin, _ = divided(world, make)
    held = [sum(p.numel() * p.element_size() for p in model.parameters()) for model in (twin, whole)]
    return held[0] / held[1]


def tied_names(world: World) -> tuple[bool, list[str]]:
    _, twin, cuts = divided(world, Tied)
    return twin.get_parameter("token.weight") is twin.get_parameter("head.weight"), sorted(cuts)


def inference_difference(world: World) -> float:
    whole, twin, _ = divided(world, Encoder)
    x = INPUTS[Encoder]().double()
    with torch.no_grad():
        return _difference(twin.eval()(x), whole.eval()(x))


def out_of_range(world: World, entry: int) -> str:
    _, twin, _ = divided(world, Tied)
    try:
        twin(torch.tensor([[entry]]))
    except IndexError as error:
        return type(error).__name__
    return "none"


def dropout_draws(world: World) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention weights of all heads under dropout, and what the generator draws next."""
    _, twin, _ = divided(world, DroppingAttention)
    torch.manual_seed(5)
    weights = twin(torch.ones(1, 8, 16, dtype=torch.float64))
    return weights, torch.rand(4)


class DroppingAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 4, dropout=0.5, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.attention(x, x, x, average_attn_weights=False)[1].detach()


def output_is_channels_last(world: World) -> bool:
    _, twin, _ = divided(world, lambda: nn.Conv2d(4, 8, 3))
    x = torch.randn(2, 4, 6, 6).double().to(memory_format=torch.channels_last)
    out = twin.to(memory_format=torch.channels_last)(x)
    return out.is_contiguous(memory_format=torch.channels_last) and not out.is_contiguous()


def messages(world: World, needs_gradient: bool) -> tuple[int, int]:
    """How many collectives forward and backward of one linear take."""
    _, twin, _ = divided(world, lambda: nn.Linear(8, 8))
    x = torch.randn(2, 8, dtype=torch.float64, requires_grad=needs_gradient)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as forward:
        loss = twin(x).sum()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as backward:
        loss.backward()
    sent = [sum(event.name.startswith("gloo:") for event in part.events()) for part in (forward, backward)]
    return sent[0], sent[1]


def _cast(whole: nn.Module, twin: nn.Module) -> None:
    for model in (whole, twin):
        cast_parameters(model, torch.bfloat16)
        model.register_forward_pre_hook(lambda module, args: tuple(a.bfloat16() for a in args))


def _recompute(kind: str) -> Callable[[nn.Module, nn.Module], None]:
    return lambda whole, twin: recompute_blocks(list(twin.children()), kind)


def _channels_last(whole: nn.Module, twin: nn.Module) -> None:
    for model in (whole, twin):
        model.to(memory_format=torch.channels_last)


def _compile(whole: nn.Module, twin: nn.Module) -> None:
    twin.compile(backend="aot_eager")


CHANGES: dict[str, Callable[..., None]] = {
    "bf16": _cast,
    "ac=full": _recompute("full"),
    "ac=selective": _recompute("selective"),
    "channels_last": _channels_last,
    "compile": _compile,
}
