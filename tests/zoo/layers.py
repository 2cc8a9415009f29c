"""Every layer of torch.nn that has parameters, at least once."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright import Job
from zoo.jobs import CLASSES, LENGTH, VOCABULARY, WIDTH, entry, images, make_job, sequences, tokens


class LinearLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 8)
        self.lazy = nn.LazyLinear(8)
        self.act = nn.PReLU(8)
        self.both = nn.Bilinear(8, 8, WIDTH)
        self.norms = nn.Sequential(nn.LayerNorm(WIDTH), nn.RMSNorm(WIDTH), nn.Identity())
        self.last = nn.Linear(WIDTH, CLASSES, bias=False)
        self(torch.zeros(2, WIDTH))  # gives the lazy layer its shape

    def forward(self, x: Tensor) -> Tensor:
        y = self.act(self.lazy(self.first(x)))
        return self.last(self.norms(self.both(y, torch.tanh(y))))


@entry()
def linear_layers() -> Job:
    """Linear, LazyLinear (run once in the builder), Bilinear, PReLU, LayerNorm, RMSNorm."""
    return make_job(LinearLayers)


def one_dim() -> nn.Module:
    return nn.Sequential(
        nn.Conv1d(LENGTH, 8, 3, padding=1),
        nn.BatchNorm1d(8),
        nn.GELU(),
        nn.ConvTranspose1d(8, 4, 2, stride=2),
        nn.InstanceNorm1d(4, affine=True),
        nn.GroupNorm(2, 4),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(4 * 2 * WIDTH, CLASSES),
    )


@entry()
def layers_1d() -> Job:
    """Conv1d, ConvTranspose1d, BatchNorm1d, InstanceNorm1d, GroupNorm."""
    return make_job(one_dim, sequences)


class TwoDim(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1, padding_mode="circular")
        self.grouped = nn.Conv2d(8, 8, 3, padding=1, groups=2)
        self.depthwise = nn.Conv2d(8, 8, 3, padding=1, groups=8, bias=False)
        self.norm = nn.BatchNorm2d(8, momentum=None)
        self.up = nn.ConvTranspose2d(8, 4, 2, stride=2, groups=2)
        self.instance = nn.InstanceNorm2d(4, affine=True)
        self.head = nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.depthwise(torch.tanh(self.grouped(self.stem(x)))))
        return self.head(self.instance(self.up(y)).square().mean((2, 3)))


@entry()
def layers_2d() -> Job:
    """Grouped and depthwise Conv2d, ConvTranspose2d, cumulative BatchNorm2d, InstanceNorm2d."""
    return make_job(TwoDim, images)


class InstanceStatistics(TwoDim):
    def __init__(self) -> None:
        super().__init__()
        self.instance = nn.InstanceNorm2d(4, affine=True, track_running_stats=True)


@entry(refused={("ddp", "zero1", "zero2", "fsdp", "fsdp:grad-op", "hsdp=2x2"): "changes instance.running_mean"})
def instance_statistics() -> Job:
    """Running statistics of an InstanceNorm behind a BatchNorm, which hides from them what the samples are."""
    return make_job(InstanceStatistics, images)


def three_dim() -> nn.Module:
    return nn.Sequential(
        nn.Conv3d(1, 4, 3, padding=1),
        nn.BatchNorm3d(4),
        nn.SiLU(),
        nn.ConvTranspose3d(4, 2, 2, stride=2),
        nn.InstanceNorm3d(2, affine=True),
        nn.AdaptiveAvgPool3d(2),
        nn.Flatten(),
        nn.Linear(16, CLASSES),
    )


@entry()
def layers_3d() -> Job:
    """Conv3d, ConvTranspose3d, BatchNorm3d, InstanceNorm3d."""
    return make_job(three_dim, images, inputs=lambda batch: (batch["x"][:, :1, None, :4, :4].repeat(1, 1, 4, 1, 1),))


class Lazy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Sequential(nn.LazyConv1d(4, 3), nn.LazyBatchNorm1d(), nn.LazyConvTranspose1d(4, 3))
        self.one.append(nn.LazyInstanceNorm1d(affine=True, track_running_stats=False))
        self.two = nn.Sequential(nn.LazyConv2d(4, 3), nn.LazyBatchNorm2d(), nn.LazyConvTranspose2d(4, 3))
        self.two.append(nn.LazyInstanceNorm2d(affine=True, track_running_stats=False))
        self.three = nn.Sequential(nn.LazyConv3d(4, 3), nn.LazyBatchNorm3d(), nn.LazyConvTranspose3d(4, 3))
        self.three.append(nn.LazyInstanceNorm3d(affine=True, track_running_stats=False))
        self.head = nn.LazyLinear(CLASSES)
        with torch.no_grad():
            self.eval()(torch.zeros(2, 3, 8, 8))
        self.train()

    def forward(self, x: Tensor) -> Tensor:
        whole = self.three(x[:, :1, None].expand(-1, -1, 4, -1, -1)).flatten(1)
        rows = self.one(x.flatten(2)).flatten(1)
        return self.head(torch.cat([rows, self.two(x).flatten(1), whole], 1).tanh())


@entry()
def lazy_layers() -> Job:
    """Every lazy layer, given its shape by a pass in the builder."""
    return make_job(Lazy, images)


class Embeddings(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, WIDTH, padding_idx=0)
        self.bag = nn.EmbeddingBag(VOCABULARY, WIDTH, mode="sum")
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.token(x) + self.bag(x).unsqueeze(1))


@entry()
def embeddings() -> Job:
    """Embedding with a padding index, EmbeddingBag."""
    return make_job(Embeddings, tokens)


class Bounded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, WIDTH, max_norm=1.0)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.token(x))


@entry()
def bounded_embedding() -> Job:
    """Embedding(max_norm=...): the forward pass moves the weight."""
    return make_job(Bounded, tokens)


class Cells(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.plain = nn.RNNCell(WIDTH, WIDTH)
        self.gated = nn.GRUCell(WIDTH, WIDTH)
        self.long = nn.LSTMCell(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        a = b = x.new_zeros(len(x), WIDTH)
        state = (a, b)
        for step in x.unbind(1):
            a = self.plain(step, a)
            b = self.gated(a, b)
            state = self.long(b, state)
        return self.head(state[0])


@entry()
def cells() -> Job:
    """RNNCell, GRUCell and LSTMCell in a loop over time."""
    return make_job(Cells, sequences)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(WIDTH, 8)
        self.mix = nn.MultiheadAttention(8, 2, kdim=WIDTH, vdim=WIDTH, add_bias_kv=True, batch_first=True)
        self.again = nn.MultiheadAttention(8, 4, batch_first=True, add_zero_attn=True)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        y, weights = self.mix(self.query(x), x, x)
        y = self.again(y, y, y, need_weights=False)[0]
        return self.head(y.mean(1)) * (1 + weights.std())


@entry()
def attention() -> Job:
    """MultiheadAttention with its own key and value widths, bias_kv and returned weights."""
    return make_job(Attention, sequences)


class WholeTransformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, 8)
        self.body = nn.Transformer(8, 2, 1, 1, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, VOCABULARY)

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=self.head.weight.dtype)
        y = self.token(x)
        return self.head(self.body(y, y, tgt_mask=mask, tgt_is_causal=True))


@entry()
def transformer() -> Job:
    """nn.Transformer with a causal mask."""
    return make_job(WholeTransformer, tokens)


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, norm_first=True)
        self.body = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.head = nn.Linear(8, VOCABULARY)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(self.token(x), src_key_padding_mask=x == 1))


@entry()
def transformer_encoder() -> Job:
    """nn.TransformerEncoder of layers copied from one, with a padding mask."""
    return make_job(Encoder, tokens)


class Adaptive(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, WIDTH)
        self.softmax = nn.AdaptiveLogSoftmaxWithLoss(WIDTH, VOCABULARY, [4, 8], div_value=2.0)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.softmax(self.token(x).flatten(0, 1), y.flatten()).output


@entry()
def adaptive_softmax() -> Job:
    """AdaptiveLogSoftmaxWithLoss: which parameters are used depends on the targets."""
    return make_job(
        Adaptive,
        tokens,
        inputs=lambda batch: (batch["x"], batch["y"]),
        loss=lambda output, batch: (-output.sum(), batch["y"].numel()),
    )


class Containers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.list = nn.ParameterList([torch.randn(WIDTH, WIDTH) * 0.3 for _ in range(3)])
        self.dict = nn.ParameterDict({"gain": torch.ones(WIDTH), "shift": torch.zeros(WIDTH)})
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.list:
            x = torch.tanh(x @ weight)
        return self.head(x * self.dict["gain"] + self.dict["shift"])


@entry()
def parameter_containers() -> Job:
    """ParameterList and ParameterDict."""
    return make_job(Containers)


def synchronised() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 8), nn.SyncBatchNorm(8), nn.ReLU(), nn.Linear(8, CLASSES))


@entry()
def sync_batch_norm() -> Job:
    """A model that its author has converted to SyncBatchNorm."""
    return make_job(synchronised)


class NoAffine(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, stride=2)
        self.norm = nn.BatchNorm2d(4, affine=False)
        self.still = nn.BatchNorm2d(4, track_running_stats=False)
        self.local = nn.LocalResponseNorm(2)
        self.head = nn.Linear(4 * 9, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.elu(self.local(self.still(self.norm(self.stem(x))))).flatten(1))


@entry()
def norms_without() -> Job:
    """BatchNorm without weights, without running statistics, and LocalResponseNorm."""
    return make_job(NoAffine, images)
