"""Which dtype operators compute in under bf16: on real tensors, on tensors without values, compiled and recomputed."""

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partialmethod
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo.utils
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from meshwright.assemble import operator_dtypes
from meshwright.assemble.dry_run import check_precision
from meshwright.assemble.operator_dtypes import RULES, computing_in, functions
from meshwright.assemble.precision import apply_precision, follow_table
from meshwright.assemble.recompute import recompute_blocks
from meshwright.describe.model import describe
from meshwright.errors import Refused
from meshwright.facts.strategy import Strategy
from meshwright.jobs.decoder import Shape, decoder_job
from meshwright.tracing.costs import measure_costs
from minimal import WIDTH, make_job, make_trainer

BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64
VOCABULARY, LENGTH = 37, 6

Made = Callable[..., Tensor]

CALLS: dict[str, tuple[Callable[[Made], Tensor], torch.dtype]] = {
    "linear of mixed": (lambda t: F.linear(t(2, 4, dtype=FP32), t(3, 4), t(3)), BF16),
    "product of mixed": (lambda t: t(2, 4, dtype=FP32) @ t(4, 3), BF16),
    "product of fp32 alone": (lambda t: t(2, 4, dtype=FP32) @ t(4, 3, dtype=FP32), FP32),
    "einsum of mixed": (lambda t: torch.einsum("ab,bc->ac", t(2, 4, dtype=FP32), t(4, 3)), BF16),
    "convolution of mixed": (lambda t: F.conv1d(t(1, 2, 5, dtype=FP32), t(3, 2, 3)), BF16),
    "attention with an fp32 mask": (
        lambda t: F.scaled_dot_product_attention(t(1, 2, 4, 8), t(1, 2, 4, 8), t(1, 2, 4, 8), t(4, 4, dtype=FP32)),
        BF16,
    ),
    "cross entropy": (lambda t: F.cross_entropy(t(3, 5), torch.zeros(3, dtype=torch.long)), FP32),
    "mse of mixed": (lambda t: F.mse_loss(t(3), t(3, dtype=FP32)), FP32),
    "binary cross entropy": (lambda t: F.binary_cross_entropy_with_logits(t(3), t(3)), FP32),
    "softmax": (lambda t: t(3, 4).softmax(-1), FP32),
    "softmax as asked": (lambda t: F.softmax(t(3, 4), -1, dtype=BF16), BF16),
    "log softmax": (lambda t: F.log_softmax(t(3, 4), dim=-1), FP32),
    "sum": (lambda t: t(3, 4).sum(), FP32),
    "cumulated sum": (lambda t: torch.cumsum(t(3, 4), 0), FP32),
    "exponential": (lambda t: torch.exp(t(3)), FP32),
    "power": (lambda t: t(3) ** 2, FP32),
    "one through": (lambda t: 1 / t(3), FP32),
    "norm of a vector": (lambda t: t(3).norm(), FP32),
    "normalised": (lambda t: F.normalize(t(2, 3)), FP32),
    "Fourier transform": (lambda t: torch.fft.rfft(t(4)), torch.complex64),
    "determinant": (lambda t: torch.linalg.det(t(3, 3)), FP32),
    "layer norm": (lambda t: F.layer_norm(t(2, 4), (4,), t(4), t(4)), BF16),
    "layer norm of fp32": (lambda t: F.layer_norm(t(2, 4, dtype=FP32), (4,), t(4), t(4)), FP32),
    "group norm of mixed": (lambda t: F.group_norm(t(2, 4, 3), 2, t(4, dtype=FP32), t(4, dtype=FP32)), BF16),
    "lerp of mixed": (lambda t: torch.lerp(t(3), t(3, dtype=FP32), 0.5), FP32),
    "written to places": (lambda t: t(3, 4).index_add(0, torch.tensor([0]), t(1, 4, dtype=FP32)), BF16),
    "sum of mixed": (lambda t: t(3) + t(3, dtype=FP32), FP32),
    "gelu": (lambda t: F.gelu(t(3)), BF16),
    "mean": (lambda t: t(3).mean(), BF16),
    "loss in float64": (lambda t: F.mse_loss(t(3, dtype=FP64), t(3, dtype=FP64)), FP64),
    "product of float64": (lambda t: t(2, 4, dtype=FP64) @ t(4, 3, dtype=FP64), FP64),
    "sum of float64": (lambda t: t(3, dtype=FP64).sum(), FP64),
}


def made(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.rand(*shape, dtype=dtype)


@pytest.mark.parametrize("name", CALLS)
def test_dtypes(name: str) -> None:
    call, dtype = CALLS[name]
    with computing_in(BF16):
        assert call(made).dtype == dtype
        with torch.device("meta"):
            assert call(made).dtype == dtype
        with FakeTensorMode():
            assert call(made).dtype == dtype


def test_nothing_is_done_in_fp32_and_float64() -> None:
    for dtype in (FP32, FP64):
        with computing_in(dtype):
            assert made(3).sum().dtype == BF16


def test_regions_nest() -> None:
    with computing_in(BF16), computing_in(BF16):
        assert len(operator_dtypes.function_modes()) == 1


LISTS = {
    "AT_FORALL_LOWER_PRECISION_FP": (operator_dtypes.low,),
    "AT_FORALL_FP32": (operator_dtypes.in_fp32, operator_dtypes.norm),
    "AT_FORALL_FP32_SET_OPT_DTYPE": (operator_dtypes.fp32_result, operator_dtypes.in_fp32),
    "AT_FORALL_PROMOTE": (operator_dtypes.widest, operator_dtypes.into),
}
LEFT_OUT = re.compile(r"_.*|.*upsample.*")
"""Not called from Python; and interpolation, whose kernels compute in fp32 and round once."""


@pytest.mark.parametrize("name", LISTS)
def test_the_table_has_all_of_autocasts(name: str) -> None:
    """Fails when PyTorch adds an operator to CUDA's autocast."""
    header = Path(torch.__file__).parent / "include" / "ATen" / "autocast_mode.h"
    if not header.exists():
        pytest.skip("this build of PyTorch comes without headers")
    (body,) = re.findall(rf"#define {name}\(_\)(.*?)\n\n", header.read_text(), re.DOTALL)
    found = re.findall(r"_\((\w+)", body)
    assert len(found) > 8
    for operator in found:
        known = [RULES.get(func) for func in functions(operator.removeprefix("linalg_"))]
        if not LEFT_OUT.fullmatch(operator):
            assert known and set(known) <= set(LISTS[name]), operator


class OwnLoss(nn.Module):
    """Computes its loss itself; with `again`, it checkpoints parts of itself that are no blocks."""

    def __init__(self, again: bool = False) -> None:
        super().__init__()
        self.again = again
        self.token = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        z = self.token(x)
        for block in self.blocks:
            z = z + block(z)
        return checkpoint(self._loss, z, y, use_reentrant=False) if self.again else self._loss(z, y)

    def _loss(self, z: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.head(z).flatten(0, 1), y.flatten())


def own_loss_job(**options: Any) -> Any:
    tokens = torch.randint(VOCABULARY, (8, LENGTH + 1), generator=torch.Generator().manual_seed(0))
    return make_job(
        model=lambda: OwnLoss(**options),
        inputs=lambda batch: (batch["x"], batch["y"]),
        loss=lambda output, batch: (output * len(batch["x"]), len(batch["x"])),
        sample=lambda samples: {"x": tokens[:samples, :-1], "y": tokens[:samples, 1:]},
    )


def losses(strategy: str, steps: int = 2, **options: Any) -> list[float]:
    job = own_loss_job(**options)
    trainer = make_trainer(job, strategy)
    return [trainer.step(job.sample(8)).loss for _ in range(steps)]


def autocast_losses(steps: int = 2) -> list[float]:
    """A plain loop."""
    torch.manual_seed(0)
    job = own_loss_job()
    model, batch = OwnLoss(), job.sample(8)
    optimizer = job.optimizer(model.parameters())
    found = []
    for _ in range(steps):
        with torch.autocast("cpu", dtype=BF16):
            loss = model(batch["x"], batch["y"])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


@pytest.mark.parametrize("strategy", ["single,bf16", "single,fp16", "single,bf16:pure"])
def test_a_loss_inside_the_model_is_in_fp32(strategy: str) -> None:
    found, expected = losses(strategy, steps=1), autocast_losses(steps=1)
    assert torch.tensor(found[0], dtype=BF16).item() != found[0]
    assert found == pytest.approx(expected, rel=1e-3)


def test_a_llama_of_hugging_face_with_labels() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.LlamaConfig(vocab_size=VOCABULARY, num_key_value_heads=1, **sizes)
    job = replace(
        own_loss_job(),
        model=lambda: transformers.LlamaForCausalLM(config),
        inputs=lambda batch: {"input_ids": batch["x"], "labels": batch["x"]},
        loss=lambda output, batch: (output.loss * len(batch["x"]), len(batch["x"])),
    )
    check_precision(job, describe(job), Strategy.parse("single,bf16"))
    batch = job.sample(8)
    found, expected = (make_trainer(job, f"single,{text}").step(batch).loss for text in ("bf16", "bf16:autocast"))
    assert found == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("recompute", ["ac=full", "ac=selective"])
def test_recomputed_blocks_compute_the_same(recompute: str) -> None:
    assert losses(f"single,bf16,{recompute}") == losses("single,bf16")


def test_what_a_model_recomputes_itself_is_computed_the_same() -> None:
    """Fails when backward no longer goes through the function that `engine_wrapped` wraps."""
    assert losses("single,bf16", again=True) == losses("single,bf16")


def test_derivatives_are_not_cast() -> None:
    seen = []

    class Watched(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            seen.append(gradient.sum().dtype)
            return gradient

    x = made(3).requires_grad_()
    with computing_in(BF16):
        y = Watched.apply(x).mean()
    with operator_dtypes.recomputing(BF16):
        y.backward()
    assert seen == [BF16]


def test_ordinary_transformers_keep_what_they_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """LayerNorm or RMSNorm, fused attention and the loss in the job: nothing is raised to fp32."""
    sizes = {"layers": 2, "width": 32, "heads": 2, "kv_heads": 2, "feed_forward": 64, "vocabulary": 64, "length": 8}
    jobs = [decoder_job(Shape(**sizes, norm=norm, tied=True), global_batch=8) for norm in ("rms", "layer")]
    described = [(job, describe(job)) for job in jobs]
    with_table = [measure_costs(*known, "bf16") for known in described]
    monkeypatch.setattr(operator_dtypes, "_MODES", {})
    assert [measure_costs(*known, "bf16") for known in described] == with_table


def test_compiled_in_one_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    class Mixed(nn.Module):
        def forward(self, x: Tensor, buffer: Tensor, weight: Tensor) -> Tensor:
            with computing_in(BF16):
                y = F.linear(x + buffer, weight).softmax(-1)
                y = torch.cat(y.unflatten(0, (1, -1)).split(1, 1), 1)[0]  # methods that PyTorch writes in Python
                return y.sum() + F.mse_loss(y, buffer[..., :3])

    graphs = []

    def keep(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    given = made(2, 4), made(2, 4, dtype=FP32), made(3, 4)
    compiled = Mixed()
    monkeypatch.setattr(nn.Module, "compile", partialmethod(nn.Module.compile, backend=keep, fullgraph=True))
    operator_dtypes.compile_outside(compiled)
    assert torch.equal(compiled(*given), Mixed()(*given))
    assert len(graphs) == 1
    assert any(node.kwargs.get("dtype") == FP32 for node in graphs[0].graph.nodes)


@pytest.mark.parametrize("recompute", [None, "full", "selective"])
def test_compiled_blocks_are_one_graph_each(recompute: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model around them is in the mode and is not compiled, as under strategies that communicate in backward."""
    monkeypatch.setattr(nn.Module, "compile", partialmethod(nn.Module.compile, backend="aot_eager"))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    tokens = own_loss_job().sample(2)
    found = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = OwnLoss()
        blocks = list(model.blocks)
        apply_precision(model, blocks, BF16, pure=False)
        if recompute:
            recompute_blocks(blocks, recompute)
        if compiled:
            follow_table(blocks, BF16)
            for block in blocks:
                operator_dtypes.compile_outside(block)
        loss = model(tokens["x"], tokens["y"])
        loss.backward()
        found.append(loss.item())
    assert found[0] == pytest.approx(found[1], rel=1e-3)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] >= 1
    assert not torch._dynamo.utils.counters["graph_break"]


class Windows(nn.Module):
    """Attention by hand with an fp32 bias and mask, as in vision transformers with windows; fp32 anchors at its end."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.table = nn.Parameter(torch.zeros(9))
        self.register_buffer("index", torch.arange(4).view(2, 2))
        self.register_buffer("mask", torch.randn(2, 2))
        self.register_buffer("scale", torch.full((WIDTH,), 0.5))
        self.anchors = torch.arange(float(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x * self.scale)
        q, k, v = self.qkv(x).view(-1, 2, 3 * WIDTH // 2).chunk(3, -1)
        scores = q @ k.transpose(-2, -1) + self.table[self.index] + self.mask
        mixed = (scores.softmax(-1) @ v).reshape(x.shape)
        return self.out(mixed + self.scale) * self.anchors


def test_fp32_buffers_may_meet_activations() -> None:
    job = make_job(model=Windows)
    check_precision(job, describe(job), Strategy.parse("single,bf16"))
    found, expected = (make_trainer(job, f"single{precision}").step(job.sample(8)) for precision in (",bf16", ""))
    assert found.loss == pytest.approx(expected.loss, rel=2**-6)


class InPlace(Windows):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).addmm_(x, torch.eye(WIDTH))


class Wide(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH).double())


@pytest.mark.parametrize(("model", "says"), [(InPlace, "meet in a product"), (Wide, "1.weight is in float64")])
def test_what_is_left_is_refused(model: type[nn.Module], says: str) -> None:
    job = make_job(model=model)
    with pytest.raises(Refused, match=says):
        check_precision(job, describe(make_job(model=Windows)), Strategy.parse("single,bf16"))
