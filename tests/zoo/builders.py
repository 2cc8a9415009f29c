"""Habits of builders: where weights come from, and where else they are kept."""

from __future__ import annotations

import copy
import random
import tempfile
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

from meshwright import Job
from zoo.jobs import CLASSES, VOCABULARY, WIDTH, Trunk, entry, make_job, token_loss, tokens

_FOLDER = tempfile.TemporaryDirectory(prefix="meshwright-zoo-")


@cache
def saved(kind: str) -> Path:
    """A file of trained weights, as somebody would have left it."""
    path = Path(_FOLDER.name) / kind
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(77)
        trunk = Trunk()
    if kind == "weights.pt":
        torch.save(trunk.state_dict(), path)
    elif kind == "model.pt":
        torch.save(trunk, path)
    elif kind == "weights.safetensors":
        from safetensors.torch import save_file

        save_file(trunk.state_dict(), path)
    else:
        numpy.savez(path, **{name: t.numpy() for name, t in trunk.state_dict().items()})
    return path


@entry()
def torch_load() -> Job:
    """The builder loads a state dict that torch.save wrote."""
    path = saved("weights.pt")

    def build() -> nn.Module:
        model = Trunk()
        model.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
        return model

    return make_job(build)


@entry()
def torch_load_whole() -> Job:
    """The builder loads a whole module, and replaces its head by a fresh one."""
    path = saved("model.pt")

    def build() -> nn.Module:
        model = torch.load(path, weights_only=False)
        model.leave = nn.Linear(WIDTH, CLASSES)
        return model

    return make_job(build)


@entry()
def safetensors_load() -> Job:
    """The builder loads a safetensors file, all but the head, with assign=True."""
    path = saved("weights.safetensors")

    def build() -> nn.Module:
        from safetensors.torch import load_file

        model = Trunk()
        weights = {k: v for k, v in load_file(path).items() if not k.startswith("leave")}
        model.load_state_dict(weights, strict=False, assign=True)
        return model

    return make_job(build)


@entry()
def numpy_arrays() -> Job:
    """The builder copies numpy arrays into the weights, one of them through `.data`."""
    path = saved("weights.npz")

    def build() -> nn.Module:
        model, arrays = Trunk(), numpy.load(path)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(torch.from_numpy(arrays[name]))
        model.enter.weight.data = torch.tensor(arrays["enter.weight"] * 2)
        return model

    return make_job(build)


@entry()
def random_from_anywhere() -> Job:
    """Weights from random, numpy.random, a numpy generator, a torch generator of the builder's own."""

    def build() -> nn.Module:
        model = Trunk()
        own = torch.Generator().manual_seed(5)
        numbers = numpy.random.default_rng(9)
        with torch.no_grad():
            model.enter.weight.copy_(torch.from_numpy(numpy.random.randn(WIDTH, WIDTH)))
            model.enter.bias.fill_(random.random())
            model.leave.weight.normal_(0, 0.3, generator=own)
            model.leave.bias.copy_(torch.from_numpy(numbers.standard_normal(CLASSES)))
            model.blocks[1].up.weight.uniform_(-0.5, 0.5)
        return model

    return make_job(build)


@entry()
def initialised_by_values() -> Job:
    """The builder scales weights by what it reads of them: .item(), a norm, an SVD, a branch."""

    def build() -> nn.Module:
        model = Trunk()
        with torch.no_grad():
            model.enter.weight /= model.enter.weight.norm().item()
            u, s, v = torch.linalg.svd(model.leave.weight, full_matrices=False)
            model.leave.weight.copy_(u @ torch.diag(s.clamp(max=0.5)) @ v)
            for block in model.blocks:
                if block.up.weight.mean() > 0:
                    block.up.weight.neg_()
            nn.init.orthogonal_(model.blocks[0].down.weight)
            nn.init.sparse_(model.blocks[1].down.weight, 0.3)
        return model

    return make_job(build)


@entry()
def fitted_in_builder() -> Job:
    """The builder runs the model on data of its own and takes a step."""

    def build() -> nn.Module:
        model = Trunk()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(torch.ones(2, WIDTH)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        return model

    return make_job(build)


class Normed(nn.Module):
    """Four linear layers, each wrapped by `wrap`."""

    def __init__(self, wrap: Any) -> None:
        super().__init__()
        self.enter = wrap(nn.Linear(WIDTH, 8))
        self.middle = nn.Sequential(*(nn.Sequential(wrap(nn.Linear(8, 8)), nn.Tanh()) for _ in range(4)))
        self.leave = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(self.middle(self.enter(x)))


def quietly(wrap: Any) -> Any:
    def wrapped(module: nn.Module) -> nn.Module:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return wrap(module)

    return wrapped


@entry()
def weight_norm() -> Job:
    """The parametrization weight_norm."""
    return make_job(lambda: Normed(parametrizations.weight_norm))


@entry()
def weight_norm_old() -> Job:
    """nn.utils.weight_norm: a hook computes the weight before each forward."""
    return make_job(lambda: Normed(quietly(nn.utils.weight_norm)))


@entry()
def spectral_norm() -> Job:
    """The parametrization spectral_norm: its vectors move in each forward."""
    return make_job(lambda: Normed(parametrizations.spectral_norm))


@entry()
def spectral_norm_old() -> Job:
    """nn.utils.spectral_norm: a hook, and buffers that move in each forward."""
    return make_job(lambda: Normed(quietly(nn.utils.spectral_norm)))


@entry()
def orthogonal() -> Job:
    """The parametrization orthogonal."""
    return make_job(lambda: Normed(parametrizations.orthogonal))


class Symmetric(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.triu() + x.triu(1).transpose(-1, -2)


@entry()
def own_parametrization() -> Job:
    """A parametrization of the author's own on every second layer."""

    def build() -> nn.Module:
        model = Trunk(leave=nn.Linear(WIDTH, CLASSES))
        parametrize.register_parametrization(model.enter, "weight", Symmetric())
        return model

    return make_job(build)


class Aliases(nn.Module):
    """Parameters stand in a list, a dict and a tuple as well; the forward uses those."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.third = nn.Linear(WIDTH, CLASSES)
        self.weights = [self.first.weight, self.second.weight]
        self.biases = {"first": self.first.bias, "second": self.second.bias}
        self.head = (self.third.weight, {"bias": [self.third.bias]})

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(F.linear(x, self.weights[0], self.biases["first"]))
        x = torch.tanh(F.linear(x, self.weights[1], self.biases["second"]))
        return F.linear(x, self.head[0], self.head[1]["bias"][0])


@entry()
def aliases() -> Job:
    """Parameters used through a plain list, a dict and a tuple."""
    return make_job(Aliases)


class PlainLists(nn.Module):
    """Modules in a plain list: PyTorch neither trains nor saves them, but the forward uses them."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(WIDTH, WIDTH)
        self.hidden = [nn.Linear(WIDTH, WIDTH) for _ in range(2)]
        self.leave = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for layer in self.hidden:
            x = torch.tanh(F.linear(x, layer.weight.to(x.dtype), layer.bias.to(x.dtype)))
        return self.leave(x)


@entry()
def modules_in_plain_list() -> Job:
    """Layers in a plain list, which no optimizer sees and every forward uses."""
    return make_job(PlainLists)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, WIDTH)
        self.trunk = Trunk(leave=nn.Identity())
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.token.weight
        self.trunk.blocks[3].up.weight = self.trunk.blocks[0].up.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.trunk(self.token(x)))


@entry()
def tied_far() -> Job:
    """Head tied to the embedding, the last block tied to the first."""
    return make_job(Tied, tokens)


class Autoencoder(nn.Module):
    """The decoder is the encoder's weight transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(WIDTH, 8)
        self.bias = nn.Parameter(torch.zeros(WIDTH))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.linear(torch.tanh(self.encoder(x)), self.encoder.weight.t(), self.bias))


@entry()
def tied_transposed() -> Job:
    """A decoder that reads the encoder's weight, transposed."""
    return make_job(Autoencoder)


class SharedModule(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(WIDTH, WIDTH)
        shared = nn.Linear(WIDTH, WIDTH)
        self.left, self.right = shared, shared
        self.leave = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(torch.tanh(self.right(torch.tanh(self.left(self.enter(x))))))


@entry()
def shared_module() -> Job:
    """One module under two names, called under both."""
    return make_job(SharedModule)


class Attributes(nn.Module):
    """Tensors kept in every other way than as parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = Trunk()
        self.shift = torch.linspace(-1, 1, WIDTH)
        self.register_buffer("scale", torch.rand(WIDTH) + 0.5, persistent=False)
        self.register_buffer("total", self.trunk.enter.weight.detach().sum(0))
        self.register_buffer("phase", torch.polar(torch.ones(WIDTH), torch.arange(WIDTH) * 1.0), persistent=False)
        self.register_buffer("order", torch.randperm(WIDTH))
        self.frequencies = 1.0 / (10000 ** (torch.arange(WIDTH) / WIDTH))
        self.kept = {"mean": self.trunk.leave.weight.detach().mean(0), "list": [torch.rand(WIDTH)]}

    def forward(self, x: Tensor) -> Tensor:
        y = x[:, self.order] * self.scale + self.shift.to(x) + self.total + self.frequencies.to(x)
        y = y * self.phase.real.to(x) + self.kept["mean"].to(x) + self.kept["list"][0].to(x)
        return self.trunk(y)


@entry()
def attributes_and_buffers() -> Job:
    """Plain tensor attributes, buffers that are not saved, complex and integer ones, and some derived from weights."""
    return make_job(Attributes)


class Target(nn.Module):
    """A frozen copy beside the network, as in BYOL; it does not move here."""

    def __init__(self) -> None:
        super().__init__()
        self.online = Trunk()
        self.target = copy.deepcopy(self.online).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            aim = self.target(x)
        return self.online(x) + 0.1 * aim


@entry()
def deepcopied_target() -> Job:
    """A deepcopy of a part as a frozen target."""
    return make_job(Target)


@cache
def real_model() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return Trunk()


@entry()
def deepcopy_of_real() -> Job:
    """The builder returns a deepcopy of a model that exists already."""
    existing = real_model()
    return make_job(lambda: copy.deepcopy(existing))


@cache
def pretrained(kind: str) -> str:
    """A folder as save_pretrained leaves it."""
    import transformers

    sizes: dict[str, Any] = {
        "hidden_size": 8,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "vocab_size": VOCABULARY,
    }
    sizes |= {"intermediate_size": 16, "max_position_embeddings": 16, "pad_token_id": 0}
    made = getattr(transformers, kind)
    path = str(Path(_FOLDER.name) / kind)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        leave_folder(made(made.config_class(**sizes)), path)
    return path


def leave_folder(model: Any, path: str) -> None:
    """As `save_pretrained` leaves it, which writes nothing on ranks behind the first."""
    from safetensors.torch import save_model

    model.config.save_pretrained(path)
    save_model(model, str(Path(path) / "model.safetensors"), metadata={"format": "pt"})


def from_pretrained(kind: str, folder: str, **rest: Any) -> nn.Module:
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    return getattr(transformers, kind).from_pretrained(folder, dtype=torch.float32, **rest)


def hugging_loss(output: Any, batch: Any) -> tuple[Tensor, int]:
    return token_loss(output.logits, batch)


@entry()
def llama_from_pretrained() -> Job:
    """transformers' from_pretrained: rotary tables are buffers that no file holds."""
    folder = pretrained("LlamaForCausalLM")
    return make_job(
        lambda: from_pretrained("LlamaForCausalLM", folder),
        tokens,
        inputs=lambda batch: {"input_ids": batch["x"], "use_cache": False},
        loss=hugging_loss,
    )


@entry()
def bert_from_pretrained() -> Job:
    """from_pretrained of a BERT with dropout off: position ids are a buffer that no file holds."""
    folder = pretrained("BertForMaskedLM")
    off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return make_job(
        lambda: from_pretrained("BertForMaskedLM", folder, **off),
        tokens,
        inputs=lambda batch: {"input_ids": batch["x"]},
        loss=hugging_loss,
    )


class UnderContexts(nn.Module):
    """Built under torch.device, no_grad and inference of shapes, with factory arguments."""

    def __init__(self) -> None:
        super().__init__()
        with torch.device("cpu"):
            self.enter = nn.Linear(WIDTH, WIDTH)
        with torch.no_grad():
            self.weight = nn.Parameter(torch.stack([torch.full((WIDTH,), float(i)) for i in range(CLASSES)]).t() / 10)
        self.norm = nn.LayerNorm(WIDTH, device="cpu", dtype=torch.float32)
        torch.nn.utils.vector_to_parameters(torch.arange(42.0) / 42, self.enter.parameters())

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.enter(x)) @ self.weight


@entry()
def built_under_contexts() -> Job:
    """torch.device(...), no_grad, factory arguments, vector_to_parameters."""
    return make_job(UnderContexts)


class Ascetic(nn.Module):
    """Made by a class method that fills what __init__ leaves empty."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.utils.skip_init(nn.Linear, WIDTH, WIDTH)
        self.leave = nn.Linear(WIDTH, CLASSES, device="meta")

    @classmethod
    def make(cls) -> Ascetic:
        model = cls()
        model.leave.to_empty(device="cpu")
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.3)
        return model

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(torch.tanh(self.enter(x)))


@entry()
def meta_then_empty() -> Job:
    """skip_init, a meta layer, to_empty and a fill by hand."""
    return make_job(Ascetic.make)
