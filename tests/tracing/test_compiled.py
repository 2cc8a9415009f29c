"""What torch.compile would make of a step: what is kept, written, taken over and launched."""

from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

from meshwright.describe.model import describe
from meshwright.facts.strategy import Strategy
from meshwright.facts.trace import Trace
from meshwright.tracing import trace_step
from meshwright.tracing.fusion import CompiledKernel, Program, fuse
from meshwright.tracing.layouts import aligned_strides, find_padding
from meshwright.tracing.record_step import record_step
from traced_decoders import CUBLAS, LAYERS, LENGTH, SAMPLES, VOCABULARY, WIDTH, Decoder, job_for

HEADS = 4
ROWS = SAMPLES * LENGTH


class GatedBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.second = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.gate, self.up = (nn.Linear(WIDTH, 4 * WIDTH, bias=False) for _ in range(2))
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        y = self.second(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


@cache
def decoder(layers: int):
    job = job_for(partial(Decoder, layers, GatedBlock))
    return job, describe(job)


@cache
def trace(strategy: str, ranks: int = 1, layers: int = LAYERS, whole: bool = False) -> Trace:
    job, facts = decoder(layers)
    return trace_step(job, facts, Strategy.parse(strategy), ranks=ranks, whole=whole)


def flops(trace: Trace, phase: str) -> float:
    return sum(op.flops * op.count for op in trace.operations if (op.kind, op.phase) == ("matmul", phase))


def launches(trace: Trace, phase: str) -> int:
    """Kernels other than products and attention, which compiling cannot fuse."""
    return sum(op.count for op in trace.operations if op.phase == phase and op.kind == "other")


def test_a_compiled_model_keeps_what_the_cut_chose() -> None:
    # Per block in bf16: both sums and both norms of them; q, k, v in one and the mixed; gate, up and their product.
    block = 2 * ROWS * WIDTH * (4 + 3 + 1 + 12)
    statistics = 4 * ROWS * 2 + 4 * SAMPLES * HEADS * LENGTH
    weights = 2 * 16 * WIDTH * WIDTH  # in bf16, as they were read
    ends = 2 * WIDTH * (ROWS + VOCABULARY) + 8 * ROWS
    expected = LAYERS * (block + statistics + weights) + ends
    found = trace("single,bf16,compile")
    assert found.memory["activations"] == pytest.approx(expected, rel=0.03)
    assert found.memory["activations"] < 0.9 * trace("single,bf16").memory["activations"]
    assert found.unseen == ""


def test_a_compiled_loss_writes_the_gradient_and_nothing_else() -> None:
    logits = 2 * ROWS * VOCABULARY
    assert trace("single,bf16,compile").memory["logits"] == pytest.approx(2 * logits, rel=0.01)
    assert trace("single,bf16").memory["logits"] > 4 * logits


def test_the_same_products_in_fewer_kernels() -> None:
    plain, compiled = trace("single,bf16"), trace("single,bf16,compile")
    for phase in ("forward", "backward"):
        assert flops(compiled, phase) == flops(plain, phase) > 0
        assert launches(compiled, phase) < 0.8 * launches(plain, phase)


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "fsdp"])
def test_compiled_blocks_send_what_plain_ones_do(strategy: str) -> None:
    plain, compiled = (trace(f"{strategy},bf16{policy}", 4) for policy in ("", ",compile"))
    assert set(compiled.messages) == set(plain.messages)
    assert compiled.peak < plain.peak
    assert compiled.unseen == ""


def test_recomputing_is_compiled_too() -> None:
    compiled, full, selective = (trace(f"single,bf16,compile{policy}") for policy in ("", ",ac=full", ",ac=selective"))
    kept = [found.memory["activations"] for found in (full, selective, compiled)]
    assert kept[0] < 0.5 * kept[2]
    assert kept[0] < kept[1] < kept[2]
    assert flops(full, "backward") > 1.2 * flops(compiled, "backward")
    assert flops(selective, "backward") == flops(compiled, "backward")
    assert full.unseen == selective.unseen == ""


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy",
    [pytest.param(text, marks=pytest.mark.thorough) for text in ("single,bf16,compile", "single,compile,ac=full")],
)
def test_a_long_compiled_model_is_known_from_shorter_ones(strategy: str) -> None:
    short, whole = (trace(strategy, layers=12, whole=whole) for whole in (False, True))
    assert short.peak - CUBLAS == pytest.approx(whole.peak - CUBLAS, rel=0.01)
    assert flops(short, "backward") == pytest.approx(flops(whole, "backward"), rel=1e-6)
    assert launches(short, "backward") == launches(whole, "backward")


def test_separately_compiled_blocks_name_the_same_moments_as_plain_ones() -> None:
    """Parameters have the same names in all blocks, so a moment named by one would be that of any block."""
    job, facts = decoder(LAYERS)
    plain, compiled = (
        set(record_step(job, facts, Strategy.parse(f"ddp,bf16{policy}").resolve(4), 4, 0).peaks)
        for policy in ("", ",compile,ac=selective")
    )
    assert compiled - {"loss"} <= plain


def test_what_cannot_be_drawn_runs_as_it_is_and_is_told() -> None:
    def build() -> nn.Module:
        model = Decoder(1, GatedBlock)
        model.blocks[0].second.register_forward_hook(lambda module, args, output: output * output.sum().item())
        return model

    job = job_for(build)
    found = trace_step(job, describe(job), Strategy.parse("single,bf16,compile"), ranks=1)
    assert "traced as eager" in found.unseen
    assert found.peak > CUBLAS


class Dropping(Decoder):
    """LayerDrop: whether a block runs is read from a tensor, in a loop."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.token(x)
        for block in self.blocks:
            if torch.rand([]) < 0.0:
                continue
            x = block(x)
        return self.head(x)


def test_a_graph_that_breaks_in_a_loop_leaves_compiled_blocks() -> None:
    job = job_for(partial(Dropping, LAYERS, GatedBlock))
    found = trace_step(job, describe(job), Strategy.parse("single,bf16,compile"), ranks=1)
    assert found.memory["activations"] == pytest.approx(trace("single,bf16,compile").memory["activations"], rel=0.03)
    assert found.memory["activations"] < 0.9 * trace("single,bf16").memory["activations"]
    assert "compiled one by one: it reads a value" in found.unseen


class Asking(Decoder):
    def forward(self, x: Tensor) -> Tensor:
        if not torch.compiler.is_compiling() and bool((x < 0).any()):
            raise ValueError("Tokens are not negative.")
        return super().forward(x)


def test_a_model_that_asks_whether_it_is_compiled() -> None:
    job = job_for(partial(Asking, 1, GatedBlock))
    asked = trace_step(job, describe(job), Strategy.parse("single,bf16,compile"), ranks=1)
    plain, facts = decoder(1)
    assert asked.peak == trace_step(plain, facts, Strategy.parse("single,bf16,compile"), ranks=1).peak
    assert "eager" not in asked.unseen


class Scaling(Decoder):
    """A forward pass that makes a tensor from numbers."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * torch.tensor([0.5, 2.0]).repeat(VOCABULARY // 2)


class Choosing(Decoder):
    """A tensor made from numbers that backward reads again."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return torch.where(y > torch.tensor(0.0), y, torch.tensor([0.0]))


class Table(Decoder):
    """A table that is neither a parameter nor a buffer."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.scale = torch.ones(VOCABULARY)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale


class Caching(Decoder):
    """A table for each length, which the first call makes."""

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "tables"):
            self.tables: dict[int, Any] = {}
        if x.shape[1] not in self.tables:
            self.tables[x.shape[1]] = torch.arange(x.shape[1])[:, None] / x.shape[1], None
        return super().forward(x) * self.tables[x.shape[1]][0]


class Telling(Decoder):
    """A result that is left on the module, with its graph."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.spread = y.std()
        return y / self.spread


@pytest.mark.parametrize(("kind", "kept"), [(Scaling, 0), (Choosing, 1), (Table, 0), (Caching, 0), (Telling, 2)])
def test_tensors_that_are_neither_arguments_nor_parameters_leave_one_graph(kind: type[Decoder], kept: int) -> None:
    """`kept` are bytes for each logit: a mask, or the logits themselves in bf16."""
    job = job_for(partial(kind, LAYERS, GatedBlock))
    found = trace_step(job, describe(job), Strategy.parse("single,bf16,compile"), ranks=1)
    assert found.unseen == ""
    expected = trace("single,bf16,compile").memory["activations"] + kept * ROWS * VOCABULARY
    assert found.memory["activations"] == pytest.approx(expected, rel=0.01)


class Checkpointed(Decoder):
    reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.token(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.head(x)


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_a_model_checkpoints_itself_is_recomputed(reentrant: bool) -> None:
    job = job_for(partial(type("Own", (Checkpointed,), {"reentrant": reentrant}), LAYERS, GatedBlock))
    found = trace_step(job, describe(job), Strategy.parse("single,bf16,compile"), ranks=1)
    assert found.unseen == ""
    assert found.memory["activations"] < 0.7 * trace("single,bf16,compile").memory["activations"]


def drawn(function, *shapes: tuple[int, ...], mine: tuple[str, ...] = ()) -> Program:
    with FakeTensorMode():
        graph = make_fx(lambda *args: (function(*args),))(*(torch.empty(shape) for shape in shapes))
    return fuse(graph.graph, frozenset(mine))


def written(program: Program) -> list[tuple[int, ...]]:
    """Shapes that get memory of their own, in order."""
    keys = [key for kernel in program.kernels for key in kernel.writes if key not in kernel.takes]
    return [program.buffers[key].shape for key in keys]


def fused(program: Program) -> list[CompiledKernel]:
    return [kernel for kernel in program.kernels if kernel.node is None]


@pytest.mark.parametrize("strategy", ["single,bf16,compile", "ddp,bf16,compile"])
def test_models_that_are_compiled_after_a_trace_have_their_gradients(strategy: str) -> None:
    def gradients(run: nn.Module, model: nn.Module, x: Tensor) -> list[Tensor]:
        return list(torch.autograd.grad(run(x).square().sum(), list(model.parameters())))

    class Attends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.norm, self.drop = nn.Linear(16, 48), nn.RMSNorm(16), nn.Dropout(0.0)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
            return self.drop(F.scaled_dot_product_attention(q, k, v))

    trace(strategy, ranks=2 if "ddp" in strategy else 1)
    torch.manual_seed(0)
    model, x = Attends(), torch.randn(2, 4, 16)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for found, expected in zip(gradients(compiled, model, x), gradients(model, model, x), strict=True):
        torch.testing.assert_close(found, expected)


def test_a_chain_before_a_product_is_written_once() -> None:
    program = drawn(lambda x, w: (x.exp() * 2 + 1).sin() @ w, (8, 4), (4, 2))
    assert written(program) == [(8, 4), (8, 2)]
    assert len(program.kernels) == 2


def test_a_chain_after_a_product_takes_its_memory() -> None:
    program = drawn(lambda x, w: (x @ w).exp().sin(), (8, 4), (4, 2))
    assert written(program) == [(8, 2)]
    assert [next(iter(kernel.takes.values()))[0].name for kernel in fused(program)] == ["mm"]


def test_an_argument_is_written_over_only_if_it_may_be() -> None:
    assert written(drawn(lambda x: x.exp(), (8, 4))) == [(8, 4)]
    assert written(drawn(lambda x: x.exp(), (8, 4), mine=("arg0_1", "x_1"))) == []


def test_a_norm_is_one_kernel_that_writes_its_result() -> None:
    program = drawn(lambda x: x * (x.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt(), (8, 16))
    assert len(program.kernels) == 1
    assert written(program) == [(8, 16)]


def test_sums_over_other_dims_are_other_kernels() -> None:
    program = drawn(lambda x: (x.exp().sum(0), x.exp().sum(1))[0] + x.exp().sum(), (8, 16))
    assert len(fused(program)) >= 2
    assert (8, 16) not in written(program)  # both compute it


def test_a_sum_over_layers_keeps_all_its_parts_until_the_end() -> None:
    """As Inductor fuses it: the sums of eight parts each are read by the next sum only, so all are one kernel."""
    layers = 20

    def skips(x: Tensor, weight: Tensor) -> Tensor:
        total: Tensor | float = 0.0
        for _ in range(layers):
            x = x @ weight
            total = total + x @ weight
        return torch.relu(total) @ weight  # type: ignore[arg-type]

    program = drawn(skips, (8, 8), (8, 8))
    (final,) = fused(program)
    assert len(final.reads) == layers
    assert program.kernels.index(final) == len(program.kernels) - 2


def test_a_value_that_others_read_is_not_delayed() -> None:
    def reads_between(x: Tensor, weight: Tensor) -> Tensor:
        mixed = torch.sin(x).cos()
        return torch.relu(mixed + mixed @ weight @ weight) @ weight

    program = drawn(reads_between, (8, 8), (8, 8))
    assert [kernel.node is None for kernel in program.kernels] == [True, False, False, True, False]


def test_two_products_that_pad_one_matrix_alike_share_its_copy() -> None:
    def function(x: Tensor, left: Tensor, right: Tensor) -> Tensor:
        wide = torch.relu(x)
        return (left @ wide).sum() + (wide @ right).sum()

    with FakeTensorMode():
        sizes = ((8192, 30522), (512, 8192), (30522, 512))
        graph = make_fx(lambda *args: (function(*args),))(*(torch.empty(size).bfloat16() for size in sizes))
    padded = [shape for shape in written(fuse(graph.graph)) if shape == (8192, 30528)]
    assert len(padded) == 1


def test_scattering_changes_what_was_made_for_it() -> None:
    def spread(x: Tensor, rows: Tensor) -> Tensor:
        return torch.ops.aten.index_put(torch.zeros(32, 4), [rows], x * 2, True)

    with FakeTensorMode():
        graph = make_fx(lambda x, rows: (spread(x, rows),))(torch.empty(8, 4), torch.empty(8, dtype=torch.long))
    assert written(fuse(graph.graph)) == [(32, 4)]


def test_matrices_of_an_odd_width_are_padded() -> None:
    """Sizes as they were found on an H200: logits, and a head's weight, of GPT-2 XL and of BERT."""
    with FakeTensorMode():
        hidden, weight = torch.empty(4096, 1600).bfloat16(), torch.empty(50257, 1600).bfloat16()
        found = find_padding(hidden, weight.t())
        gradient = find_padding(torch.empty(4096, 50257).bfloat16().t(), hidden)
        bert = find_padding(torch.empty(8192, 1024).bfloat16(), torch.empty(30522, 1024).bfloat16().t())
        narrow = find_padding(torch.empty(8192, 30522).bfloat16().t(), torch.empty(8192, 1024).bfloat16())
        even = find_padding(hidden, torch.empty(1600, 6400).bfloat16())
    assert found is not None and gradient is not None and bert is not None
    assert (found.result.bytes, found.copies[0]) == (412090288, None)
    assert found.copies[1] is not None and found.copies[1].bytes == 160844800
    assert gradient.copies[0] is not None and gradient.copies[0].bytes == 412090288
    assert bert.result.bytes == 500170752
    assert narrow is even is None


def test_long_rows_begin_at_round_addresses() -> None:
    assert aligned_strides((4, 50264), torch.bfloat16) == (50304, 1)
    assert aligned_strides((4, 1000), torch.bfloat16) == (1000, 1)
