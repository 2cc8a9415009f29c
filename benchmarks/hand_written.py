"""Llamas as an expert writes them for one strategy, to measure ours against: no code of the library is used.

`TensorLlama` is in Megatron's style: column and row layers, the sequence divided between them, query, key and value in
one product, gate and up in one, and a loss over a divided vocabulary. `Llama` is the plain model for FSDP2 and for one
process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from same_start import Sizes, fill, rotary, text_for
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.optim import AdamW

COLLECTIVES = torch.ops._c10d_functional


def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def attend(qkv: Tensor, heads: int, kv_heads: int, head: int, cos: Tensor, sin: Tensor) -> Tensor:
    """Attention of [tokens, samples, width], the sequence first."""
    q, k, v = qkv.split([heads * head, kv_heads * head, kv_heads * head], dim=-1)
    q, k, v = (x.unflatten(-1, (-1, head)).permute(1, 2, 0, 3) for x in (q, k, v))
    mixed = F.scaled_dot_product_attention(
        turn(q, cos, sin), turn(k, cos, sin), v, is_causal=True, enable_gqa=heads != kv_heads
    )
    return mixed.permute(2, 0, 1, 3).flatten(2)


class Gather(torch.autograd.Function):
    """Gathers the sequence, which is the first dim; the gradient is summed and scattered."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str, ranks: int) -> Tensor:
        ctx.group, ctx.ranks = group, ranks
        return COLLECTIVES.wait_tensor(COLLECTIVES.all_gather_into_tensor(x.contiguous(), ranks, group))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        summed = COLLECTIVES.reduce_scatter_tensor(gradients[0].contiguous(), "sum", ctx.ranks, ctx.group)
        return COLLECTIVES.wait_tensor(summed), None, None


class Scatter(torch.autograd.Function):
    """Sums parts of products and scatters the sequence; the gradient is gathered."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str, ranks: int) -> Tensor:
        ctx.group, ctx.ranks = group, ranks
        return COLLECTIVES.wait_tensor(COLLECTIVES.reduce_scatter_tensor(x.contiguous(), "sum", ranks, group))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        gathered = COLLECTIVES.all_gather_into_tensor(gradients[0].contiguous(), ctx.ranks, ctx.group)
        return COLLECTIVES.wait_tensor(gathered), None, None


class Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str) -> Tensor:
        return COLLECTIVES.wait_tensor(COLLECTIVES.all_reduce(x, "sum", group))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        return gradients[0], None


class TensorBlock(nn.Module):
    def __init__(self, sizes: Sizes, ranks: int, group: str) -> None:
        super().__init__()
        self.ranks, self.group = ranks, group
        self.head = sizes.width // sizes.heads
        self.heads, self.kv_heads = sizes.heads // ranks, sizes.kv_heads // ranks
        self.first_norm, self.second_norm = nn.RMSNorm(sizes.width, eps=1e-5), nn.RMSNorm(sizes.width, eps=1e-5)
        inner = sizes.feed_forward // ranks
        self.qkv = nn.Linear(sizes.width, (self.heads + 2 * self.kv_heads) * self.head, bias=False)
        self.out = nn.Linear(self.heads * self.head, sizes.width, bias=False)
        self.gate_up = nn.Linear(sizes.width, 2 * inner, bias=False)
        self.down = nn.Linear(inner, sizes.width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        y = self.qkv(Gather.apply(self.first_norm(x), self.group, self.ranks))
        y = self.out(attend(y, self.heads, self.kv_heads, self.head, cos, sin))
        x = x + Scatter.apply(y, self.group, self.ranks)
        gate, up = self.gate_up(Gather.apply(self.second_norm(x), self.group, self.ranks)).chunk(2, dim=-1)
        return x + Scatter.apply(self.down(F.silu(gate) * up), self.group, self.ranks)


class TensorLlama(nn.Module):
    """One rank's part of a Llama, with the loss."""

    def __init__(self, sizes: Sizes, ranks: int) -> None:
        super().__init__()
        self.ranks, self.group = ranks, dist.group.WORLD.group_name  # type: ignore[union-attr]
        self.own = sizes.vocabulary // ranks
        self.token = nn.Embedding(self.own, sizes.width)
        self.blocks = nn.ModuleList(TensorBlock(sizes, ranks, self.group) for _ in range(sizes.layers))
        self.norm = nn.RMSNorm(sizes.width, eps=1e-5)
        self.head = nn.Linear(sizes.width, self.own, bias=False)

    def forward(self, x: Tensor, y: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        mine = x - dist.get_rank() * self.own
        inside = (mine >= 0) & (mine < self.own)
        found = self.token(mine.clamp(0, self.own - 1)) * inside[..., None]
        h = Scatter.apply(found.transpose(0, 1), self.group, self.ranks)
        for block in self.blocks:
            h = block(h, cos, sin)
        logits = self.head(Gather.apply(self.norm(h), self.group, self.ranks)).float()
        return self._loss(logits.flatten(0, 1), y.t().flatten())

    def _loss(self, logits: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            largest = COLLECTIVES.wait_tensor(COLLECTIVES.all_reduce(logits.amax(-1), "max", self.group))
        shifted = logits - largest[:, None]
        total = Sum.apply(shifted.exp().sum(-1), self.group)
        mine = y - dist.get_rank() * self.own
        inside = (mine >= 0) & (mine < self.own)
        picked = shifted.gather(1, mine.clamp(0, self.own - 1)[:, None])[:, 0] * inside
        return (total.log() - Sum.apply(picked, self.group)).mean()


class Masters:
    """Turns an fp32 model's parameters to bf16 and keeps fp32 masters of them, with clipping and AdamW."""

    def __init__(self, model: nn.Module) -> None:
        self.high = [nn.Parameter(p.detach().clone()) for p in model.parameters()]
        self.low = list(model.bfloat16().parameters())
        self.optimizer = adamw(self.high)

    def step(self) -> None:
        for high, low in zip(self.high, self.low, strict=True):
            high.grad = low.grad.float()  # type: ignore[union-attr]
            low.grad = None
        nn.utils.clip_grad_norm_(self.high, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        with torch.no_grad():
            torch._foreach_copy_(self.low, self.high)


def adamw(parameters: Iterable[nn.Parameter]) -> AdamW:
    return AdamW(parameters, lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)


def parts_of(model: TensorLlama, sizes: Sizes) -> Iterator[tuple[str, Tensor]]:
    """The parameters by name, joint ones in their parts."""
    query, key = sizes.width // model.ranks, sizes.kv_heads * sizes.head_width // model.ranks
    joint = {"qkv": {"q": query, "k": key, "v": key}}
    joint["gate_up"] = dict.fromkeys(("gate", "up"), sizes.feed_forward // model.ranks)
    for name, parameter in model.named_parameters():
        block, _, layer = name.removesuffix(".weight").rpartition(".")
        rows = joint.get(layer)
        if rows is None:
            yield name, parameter
            continue
        pieces = parameter.detach().split(list(rows.values()))
        yield from ((f"{block}.{part}.weight", piece) for part, piece in zip(rows, pieces, strict=True))


def tensor_step(sizes: Sizes, ranks: int, device: torch.device, *, compiled: bool) -> Callable[[], Tensor]:
    with device:
        model = TensorLlama(sizes, ranks)
    fill(parts_of(model, sizes))
    for block in model.blocks if compiled else ():
        block.compile()
    masters = Masters(model)
    cos, sin = (table.bfloat16() for table in rotary(sizes, device))
    text = text_for(sizes, sizes.samples, device, tensor_ranks=ranks)

    def step() -> Tensor:
        loss: Tensor = model(text[:, :-1], text[:, 1:], cos, sin)
        loss.backward()
        masters.step()
        return loss.detach()

    return step


class Block(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.head = sizes.width // sizes.heads
        self.heads, self.kv_heads = sizes.heads, sizes.kv_heads
        self.first_norm, self.second_norm = nn.RMSNorm(sizes.width, eps=1e-5), nn.RMSNorm(sizes.width, eps=1e-5)
        self.q = nn.Linear(sizes.width, sizes.width, bias=False)
        self.k, self.v = (nn.Linear(sizes.width, sizes.kv_heads * self.head, bias=False) for _ in range(2))
        self.out = nn.Linear(sizes.width, sizes.width, bias=False)
        self.gate, self.up = (nn.Linear(sizes.width, sizes.feed_forward, bias=False) for _ in range(2))
        self.down = nn.Linear(sizes.feed_forward, sizes.width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        y = self.first_norm(x)
        q, k, v = (layer(y).unflatten(-1, (-1, self.head)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        q, k = turn(q, cos, sin), turn(k, cos, sin)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.heads != self.kv_heads)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        y = self.second_norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.token = nn.Embedding(sizes.vocabulary, sizes.width)
        self.blocks = nn.ModuleList(Block(sizes) for _ in range(sizes.layers))
        self.norm = nn.RMSNorm(sizes.width, eps=1e-5)
        self.head = nn.Linear(sizes.width, sizes.vocabulary, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        h = self.token(x)
        for block in self.blocks:
            h = block(h, cos, sin)
        return self.head(self.norm(h))  # type: ignore[no-any-return]


def loss_of(logits: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), y.flatten())


def shard(model: Llama, *, compiled: bool, mesh: DeviceMesh | None = None) -> None:
    """Apply FSDP2 as its documentation does, after compiling the blocks."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        if compiled:
            block.compile()
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)


def sharded_step(sizes: Sizes, device: torch.device, *, compiled: bool) -> Callable[[], Tensor]:
    """FSDP2, with the loss compiled too where blocks are."""
    with torch.device("meta"):
        model = Llama(sizes)
    shard(model, compiled=compiled)
    model.to_empty(device=device)
    fill(model.named_parameters())
    optimizer = adamw(model.parameters())
    loss_function = torch.compile(loss_of) if compiled else loss_of
    cos, sin = (table.bfloat16() for table in rotary(sizes, device))
    text = text_for(sizes, sizes.samples, device)

    def step() -> Tensor:
        loss: Tensor = loss_function(model(text[:, :-1], cos, sin), text[:, 1:])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def one_graph_step(
    model: nn.Module, inputs: tuple[Tensor, ...], y: Tensor, optimizer: AdamW, *, compiled: bool = True
) -> Callable[[], Tensor]:
    """Autocast, with model and loss compiled as one graph."""

    def forward(*inputs: Tensor) -> Tensor:
        with torch.autocast(y.device.type, torch.bfloat16):
            return loss_of(model(*inputs), y)

    run = torch.compile(forward) if compiled else forward

    def step() -> Tensor:
        loss: Tensor = run(*inputs)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def single_step(sizes: Sizes, device: torch.device) -> Callable[[], Tensor]:
    with device:
        model = Llama(sizes)
    fill(model.named_parameters())
    text = text_for(sizes, sizes.samples, device)
    cos, sin = (table.bfloat16() for table in rotary(sizes, device))
    return one_graph_step(model, (text[:, :-1], cos, sin), text[:, 1:], adamw(model.parameters()))
