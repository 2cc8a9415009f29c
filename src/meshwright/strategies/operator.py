"""Operator-wise parallelism: each large operator by itself is divided over the ranks and combined right after.

It asks for no structure between operators, so it serves models in which no column and row pairs are found, CNNs for
one. Between operators every rank of the axis holds the same activations, in plain tensors under plain autograd. The
user's modules and names stay; each divided module gets a subclass of its own class, and parameters of the local size.

| operator | divided over | what is sent forward; backward |
| --- | --- | --- |
| linear | outputs | outputs gathered; input's gradient summed |
| linear whose outputs do not divide | inputs | outputs summed; input's gradient gathered |
| convolution, transposed or not | output channels, or groups | as linear over outputs; for groups, gradient gathered |
| embedding | entries, or features where entries do not divide | outputs summed, or gathered; nothing |
| attention | heads | outputs summed; inputs' gradients summed |

Cross-entropy sees gathered logits and stays whole: divided, it would send the logits' gradient, their size again, only
for the gather to drop all but a part of it.

What is large: convolutions always, because their work does not go with their parameters. The smallest of the other
operators that hold less than 1 % of the parameters together stay whole: a message costs more than they do.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, wraps
from itertools import accumulate, product
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.utils.parametrize import ParametrizationList, is_parametrized

from meshwright.errors import Refused
from meshwright.strategies.collectives import add_up, copy_in, gather, slice_in
from meshwright.strategies.cuts import Cut, Cuts, narrow

SMALL = 0.01

Forward = Callable[..., Any]
"""What a divided module computes: a function of (module, mesh) and what the module is called with. It reads parameters
off the module, because only then are they what this call computes with: gathered, or cast."""


@dataclass(frozen=True, kw_only=True)
class Operator:
    """One operator of a model and what becomes of it."""

    name: str
    """Its module's."""
    kind: str
    along: str = ""
    """What is divided: "outputs", "heads"; empty where nothing of it could be."""
    size: int = 0
    """How many of them the whole operator has."""
    parts: int = 1
    why: str = ""
    """Why it stays whole; empty for one that is divided."""

    def __str__(self) -> str:
        what = f"{self.name or 'the model'}: {self.kind}"
        return f"{what}, whole: {self.why}" if self.why else f"{what}, {self.size} {self.along} in {self.parts} parts"


@dataclass(frozen=True, kw_only=True)
class OperatorPlan:
    """Which operators are divided, and why the others are not; in the order of the model's modules."""

    ranks: int
    operators: tuple[Operator, ...]

    @property
    def divided(self) -> tuple[Operator, ...]:
        return tuple(operator for operator in self.operators if not operator.why)

    @property
    def whole(self) -> tuple[Operator, ...]:
        return tuple(operator for operator in self.operators if operator.why)

    def __str__(self) -> str:
        return "\n".join(map(str, self.operators))


def plan_operators(model: nn.Module, ranks: int, read_elsewhere: frozenset[str] = frozenset()) -> OperatorPlan:
    """Which of the model's operators to divide over `ranks`. Pure: looks at structure and sizes only.

    `read_elsewhere` names parameters that the model reads outside of their module's `forward`, as
    `F.linear(x, self.token.weight)` does: who reads them there must find them whole.
    """
    found = _find(model, read_elsewhere)
    rows: dict[str, Operator] = {}
    for group in _tied(found):
        rows |= _choose(group, ranks)
    plan = OperatorPlan(ranks=ranks, operators=tuple(rows[name] for name, one in found.items() if one.is_operator))
    if not plan.divided:
        raise Refused(_nothing(plan, found))
    return plan


def split_operators(model: nn.Module, plan: OperatorPlan, mesh: DeviceMesh) -> Cuts:
    """Divide a model on the meta device as planned; says how each of its divided parameters is cut."""
    names: dict[int, list[str]] = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names[id(parameter)].append(name)
    cuts: Cuts = {}
    narrowed: dict[int, nn.Parameter] = {}
    # narrow() knows a parameter by its id, so all whole ones live until the last is replaced.
    whole = list(model.parameters())
    classes: dict[tuple[type, Forward], type[nn.Module]] = {}
    for row in plan.divided:
        module = model.get_submodule(row.name)
        way = next(way for way in _recognise(module).ways(module) if way.along == row.along)  # type: ignore[union-attr]
        for path, (dim, pieces) in way.cuts.items():
            cut = Cut(dim=dim, mesh=mesh, pieces=pieces)
            owner_path, _, name = path.rpartition(".")
            owner = module.get_submodule(owner_path)
            if owner._parameters.get(name) is None:  # another stage of a pipeline holds it
                continue
            cuts |= {known: cut for known in names[id(owner._parameters[name])]}
            narrow(owner, name, cut, narrowed)
        _swap_forward(module, way.forward, mesh, classes)
    del whole
    _close_fast_paths(model)
    return cuts


@dataclass(frozen=True)
class _Way:
    """One way to divide an operator."""

    along: str
    size: int
    cuts: dict[str, tuple[int, int]]
    """Dim and pieces by the parameter's name in the module. Parameters that are not named stay whole."""
    forward: Forward


@dataclass(frozen=True)
class _Kind:
    """Modules that one rule divides."""

    name: str
    classes: tuple[type[nn.Module], ...]
    ways: Callable[[Any], list[_Way]]
    """What could be divided in a module, best first."""
    objection: Callable[[Any], str] = lambda module: ""
    """Why it cannot be divided however its sizes are; empty if it can."""


@dataclass(frozen=True, eq=False)
class _Found:
    """A module that holds parameters: an operator, or one that nothing divides but that may share with operators."""

    name: str
    module: nn.Module
    kind: str
    ways: list[_Way]
    objection: str

    @cached_property
    def parameters(self) -> dict[str, nn.Parameter]:
        inner = isinstance(self.module, nn.MultiheadAttention)
        return dict(self.module.named_parameters(recurse=inner, remove_duplicate=False))

    @property
    def is_operator(self) -> bool:
        """Worth a row in the plan: norms, which hold vectors, and what is behind a parametrization are not."""
        if isinstance(self.module, ParametrizationList):
            return False
        return _recognise(self.module) is not None or any(p.dim() > 1 for p in self.parameters.values())

    @property
    def elements(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters.values())


def _find(model: nn.Module, read_elsewhere: frozenset[str]) -> dict[str, _Found]:
    """Every module with parameters of its own that an operator could be, by name."""
    read = {id(p) for n, p in model.named_parameters(remove_duplicate=False) if n in read_elsewhere}
    inner = {id(m.out_proj) for m in model.modules() if isinstance(m, nn.MultiheadAttention)}
    found: dict[str, _Found] = {}
    for name, module in model.named_modules():
        # Attention reads its out_proj's weight and never calls it: the two are one operator.
        if id(module) not in inner and (one := _look(name, module, read)):
            found[name] = one
    small = _small(list(found.values()), sum(p.numel() for p in model.parameters()))
    return {
        name: replace(one, objection=_TOO_SMALL) if name in small and not one.objection else one
        for name, one in found.items()
    }


_TOO_SMALL = f"it is one of the smallest operators, which together hold less than {SMALL:.0%} of the parameters"


def _look(name: str, module: nn.Module, read: set[int]) -> _Found | None:
    kind = _recognise(module)
    if kind is None:
        if not any(True for _ in module.parameters(recurse=False)):
            return None
        return _Found(name, module, type(module).__name__, [], "no rule divides what it holds")
    objection = _objection(module, kind)
    one = _Found(name, module, kind.name, [] if objection else kind.ways(module), objection)
    return one if objection else replace(one, objection=_hidden_use(one, read))


def _objection(module: nn.Module, kind: _Kind) -> str:
    base = next((cls for cls in kind.classes if isinstance(module, cls)), None)
    if base is not None and (type(module).forward is not base.forward or "forward" in module.__dict__):
        return f"its forward is not nn.{base.__name__}'s"
    if any(is_parametrized(inner) for inner in module.modules()):
        return "its parameters are parametrized"
    return kind.objection(module)


def _hidden_use(one: _Found, read: set[int]) -> str:
    for name in {name: None for way in one.ways for name in way.cuts}:
        if name not in one.parameters:  # PyTorch's older weight_norm, spectral_norm and pruning
            return f"its {name} is computed from other parameters"
        if id(one.parameters[name]) in read:
            return f"its {name} is also read outside of its forward"
    return ""


def _small(found: list[_Found], total: int) -> set[str]:
    """Names of the operators too small to be worth a message; those of one size fare alike."""
    held: Counter[int] = Counter()
    for one in found:
        held[one.elements] += one.elements
    up_to = dict(zip(sorted(held), accumulate(held[size] for size in sorted(held)), strict=True))
    return {one.name for one in found if up_to[one.elements] < SMALL * total and "convolution" not in one.kind}


def _tied(found: dict[str, _Found]) -> list[list[_Found]]:
    """Operators in groups that share parameters; most are alone."""
    group_of: dict[int, list[_Found]] = {}
    for one in found.values():
        group = [one]
        for parameter in one.parameters.values():
            group = [*(other for other in group_of.get(id(parameter), []) if other not in group), *group]
        group_of |= {id(parameter): group for member in group for parameter in member.parameters.values()}
    return list({id(group): group for group in group_of.values()}.values())


def _choose(group: list[_Found], ranks: int) -> dict[str, Operator]:
    """One way for each operator of a group, such that parameters they share are cut alike; or all of them whole."""
    reasons = {one.name: one.objection or _misfit(one, ranks) for one in group}
    if not any(reasons.values()):
        fitting = [[way for way in one.ways if way.size % ranks == 0] for one in group]
        for ways in product(*fitting):
            if _alike(group, ways):
                return {one.name: _row(one, way, parts=ranks) for one, way in zip(group, ways, strict=True)}
    end = "which stays whole" if any(reasons.values()) else "which divides otherwise"
    for one in group:
        others = " and ".join(other.name or "the model" for other in group if other is not one)
        reasons[one.name] = reasons[one.name] or f"it shares a parameter with {others}, {end}"
    return {one.name: _row(one, one.ways[0] if one.ways else None, why=reasons[one.name]) for one in group}


def _row(one: _Found, way: _Way | None, parts: int = 1, why: str = "") -> Operator:
    along, size = (way.along, way.size) if way else ("", 0)
    return Operator(name=one.name, kind=one.kind, along=along, size=size, parts=parts, why=why)


def _misfit(one: _Found, ranks: int) -> str:
    if any(way.size % ranks == 0 for way in one.ways):
        return ""
    return f"its {' and '.join(f'{way.size} {way.along}' for way in one.ways)} do not divide by {ranks}"


def _alike(group: list[_Found], ways: tuple[_Way, ...]) -> bool:
    seen: dict[int, tuple[int, int] | None] = {}
    for one, way in zip(group, ways, strict=True):
        for name, parameter in one.parameters.items():
            if seen.setdefault(id(parameter), way.cuts.get(name)) != way.cuts.get(name):
                return False
    return True


def _nothing(plan: OperatorPlan, found: dict[str, _Found]) -> str:
    sizes = sorted({way.size for one in found.values() if not one.objection for way in one.ways})
    divide = [n for n in range(2, 65) if n != plan.ranks and any(size % n == 0 for size in sizes)]
    first = "; ".join(map(str, plan.operators[:4])) or "the model has none"
    more = f"; and {len(plan.operators) - 4} more" if len(plan.operators) > 4 else ""
    advice = f"op={' or op='.join(map(str, divide[:4]))} would divide some" if divide else "choose another strategy"
    return (
        f"op={plan.ranks} divides linear, convolution, embedding and attention operators over {plan.ranks} ranks, "
        f"but can divide none here ({first}{more}); {advice}."
    )


def _swap_forward(
    module: nn.Module, forward: Forward, mesh: DeviceMesh, classes: dict[tuple[type, Forward], type[nn.Module]]
) -> None:
    """Give a module a subclass of its own class; one for all alike, so that torch.compile compiles them once."""
    cls = type(module)
    if (cls, forward) not in classes:

        @wraps(cls.forward)
        def divided(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return forward(self, mesh, *args, **kwargs)

        names = {"forward": divided, "__module__": cls.__module__, "__qualname__": cls.__qualname__}
        classes[cls, forward] = type(cls.__name__, (cls,), names | {"__doc__": cls.__doc__})
    module.__class__ = classes[cls, forward]


def _close_fast_paths(model: nn.Module) -> None:
    """PyTorch's encoders, when they only infer, hand their layers' weights to one kernel; it would find parts."""
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoderLayer):
            module.activation_relu_or_gelu = 0
        if isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = False


def _with_bias(module: nn.Module, dim: int) -> dict[str, tuple[int, int]]:
    bias = {"bias": (0, 1)} if module.bias is not None else {}
    return {"weight": (dim, 1), **bias}


def _linear_ways(module: nn.Linear) -> list[_Way]:
    return [
        _Way("outputs", module.out_features, _with_bias(module, 0), _linear_over_outputs),
        _Way("inputs", module.in_features, {"weight": (1, 1)}, _linear_over_inputs),
    ]


def _linear_over_outputs(module: Any, mesh: DeviceMesh, input: torch.Tensor) -> torch.Tensor:
    return gather(F.linear(copy_in(input, mesh), module.weight, module.bias), -1, mesh)


def _linear_over_inputs(module: Any, mesh: DeviceMesh, input: torch.Tensor) -> torch.Tensor:
    out = add_up(F.linear(slice_in(input, -1, mesh), module.weight), mesh)
    return out if module.bias is None else out + module.bias


def _is_transposed_linear(module: Any) -> bool:
    """Hugging Face's Conv1D, of GPT-2: a linear whose weight is (inputs, outputs)."""
    weight, bias = module._parameters.get("weight"), module._parameters.get("bias")
    if type(module).__name__ != "Conv1D" or weight is None or bias is None or weight.dim() != 2:
        return False
    return bool(bias.shape == weight.shape[1:] and getattr(module, "nf", None) == weight.shape[1])


def _transposed_linear_ways(module: Any) -> list[_Way]:
    inputs, outputs = module.weight.shape
    return [
        _Way("outputs", outputs, _with_bias(module, 1), _transposed_over_outputs),
        _Way("inputs", inputs, {"weight": (0, 1)}, _transposed_over_inputs),
    ]


def _transposed_over_outputs(module: Any, mesh: DeviceMesh, x: torch.Tensor) -> torch.Tensor:
    return gather(F.linear(copy_in(x, mesh), module.weight.t(), module.bias), -1, mesh)


def _transposed_over_inputs(module: Any, mesh: DeviceMesh, x: torch.Tensor) -> torch.Tensor:
    out = add_up(F.linear(slice_in(x, -1, mesh), module.weight.t()), mesh)
    return out.add(module.bias)


def _convolution_ways(module: Any) -> list[_Way]:
    if module.groups > 1:
        return [_Way("groups", module.groups, _with_bias(module, 0), _convolve)]
    return [_Way("output channels", module.out_channels, _with_bias(module, int(module.transposed)), _convolve)]


def _convolution_objection(module: Any) -> str:
    if module.transposed:
        return ""
    base = next(cls for cls in _CONVOLUTIONS if isinstance(module, cls))
    own = type(module)._conv_forward is not base._conv_forward
    return f"its _conv_forward is not nn.{base.__name__}'s" if own else ""


def _convolve(module: Any, mesh: DeviceMesh, input: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    channels = input.dim() - len(module.kernel_size) - 1
    if module.groups > 1:
        x, groups = slice_in(input, channels, mesh), module.groups // mesh.size()
    else:
        x, groups = copy_in(input, mesh), 1
    out = (_transposed if module.transposed else _plain)(module, x, groups, *args, **kwargs)
    return _gather_channels(out, channels, mesh)


def _plain(module: Any, x: torch.Tensor, groups: int) -> torch.Tensor:
    padding = module.padding
    if module.padding_mode != "zeros":
        x, padding = F.pad(x, module._reversed_padding_repeated_twice, mode=module.padding_mode), 0
    convolve: Any = (F.conv1d, F.conv2d, F.conv3d)[len(module.kernel_size) - 1]
    out: torch.Tensor = convolve(x, module.weight, module.bias, module.stride, padding, module.dilation, groups)
    return out


def _transposed(module: Any, x: torch.Tensor, groups: int, output_size: list[int] | None = None) -> torch.Tensor:
    space, stride, padding, dilation = len(module.kernel_size), module.stride, module.padding, module.dilation
    extra = module._output_padding(x, output_size, stride, padding, module.kernel_size, space, dilation)
    convolve: Any = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[space - 1]
    out: torch.Tensor = convolve(x, module.weight, module.bias, stride, padding, extra, groups, dilation)
    return out


def _gather_channels(x: torch.Tensor, dim: int, mesh: DeviceMesh) -> torch.Tensor:
    """In the memory format that it has."""
    last = x.movedim(dim, -1)
    if not x.is_contiguous() and last.is_contiguous():
        return gather(last, -1, mesh).movedim(-1, dim)
    return gather(x, dim, mesh)


def _embedding_ways(module: nn.Embedding) -> list[_Way]:
    return [
        _Way("entries", module.num_embeddings, {"weight": (0, 1)}, _embed_over_entries),
        _Way("features", module.embedding_dim, {"weight": (1, 1)}, _embed_over_features),
    ]


def _embedding_objection(module: nn.Embedding) -> str:
    if module.max_norm is not None:
        return "its max_norm changes the weight while it is read"
    if module.scale_grad_by_freq:
        return "its scale_grad_by_freq counts entries over all ranks"
    return "its gradient is sparse" if module.sparse else ""


def _embed_over_entries(module: Any, mesh: DeviceMesh, input: torch.Tensor) -> torch.Tensor:
    rows = module.num_embeddings // mesh.size()
    start = rows * mesh.get_local_rank()
    foreign = (input < start) | (input >= start + rows)
    # An entry that the whole table lacks stays out of range here too, and fails on every rank as it does on one.
    elsewhere = foreign & (input >= 0) & (input < module.num_embeddings)
    padding = None if module.padding_idx is None else module.padding_idx - start
    padding = padding if padding is not None and 0 <= padding < rows else None
    out = F.embedding((input - start).masked_fill(elsewhere, 0), module.weight, padding)
    return add_up(out.masked_fill(foreign.unsqueeze(-1), 0), mesh)


def _embed_over_features(module: Any, mesh: DeviceMesh, input: torch.Tensor) -> torch.Tensor:
    return gather(F.embedding(input, module.weight, module.padding_idx), -1, mesh)


def _attention_ways(module: nn.MultiheadAttention) -> list[_Way]:
    packed = {"in_proj_weight": (0, 3), "in_proj_bias": (0, 3)}
    apart = {"q_proj_weight": (0, 1), "k_proj_weight": (0, 1), "v_proj_weight": (0, 1)}
    there = {name: cut for name, cut in (packed | apart).items() if getattr(module, name) is not None}
    return [_Way("heads", module.num_heads, there | {"out_proj.weight": (1, 1)}, _attend)]


def _attention_objection(module: nn.MultiheadAttention) -> str:
    if type(module.out_proj).forward is not nn.Linear.forward or "forward" in module.out_proj.__dict__:
        return "its out_proj's forward is not nn.Linear's"
    return "it adds keys and values of its own" if module.bias_k is not None or module.add_zero_attn else ""


def _attend(
    module: Any,
    mesh: DeviceMesh,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    key_padding_mask: torch.Tensor | None = None,
    need_weights: bool = True,
    attn_mask: torch.Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`nn.MultiheadAttention.forward` for this rank's heads; their shares of the output are summed."""
    if is_causal and attn_mask is None:
        raise RuntimeError("is_causal is a hint that attn_mask is causal; give attn_mask, too.")
    hint = is_causal and key_padding_mask is None and not need_weights
    q, k, v = _heads(module, mesh, query, key, value)
    mask = None if hint else _mask(module, mesh, attn_mask, key_padding_mask, q)
    dropout = module.dropout if module.training else 0.0
    weights = None
    with _own_draws(mesh, q, dropout):
        if need_weights:
            scores = q @ k.transpose(-2, -1) * module.head_dim**-0.5
            weights = F.dropout(F.softmax(scores if mask is None else scores + mask, -1), dropout)
            out = weights @ v
        else:
            out = F.scaled_dot_product_attention(q, k, v, mask, dropout, hint)
    out = add_up(F.linear(out.transpose(1, 2).flatten(2), module.out_proj.weight), mesh)
    out = out if module.out_proj.bias is None else out + module.out_proj.bias
    if weights is not None:
        weights = add_up(weights.mean(1) / mesh.size(), mesh) if average_attn_weights else gather(weights, 1, mesh)
    if query.dim() == 2:
        return out.squeeze(0), None if weights is None else weights.squeeze(0)
    return out if module.batch_first else out.transpose(0, 1), weights


def _heads(module: Any, mesh: DeviceMesh, *inputs: torch.Tensor) -> Iterator[torch.Tensor]:
    """Queries, keys and values of this rank's heads, as (batch, heads, length, features)."""
    weights = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
    if module._qkv_same_embed_dim:
        weights = module.in_proj_weight.chunk(3)
    biases = (None, None, None) if module.in_proj_bias is None else module.in_proj_bias.chunk(3)
    # Self-attention gives the same tensor three times; copied in once, its gradient is sent once.
    copied = {id(x): copy_in(x, mesh) for x in inputs}
    for x, weight, bias in zip(inputs, weights, biases, strict=True):
        projected = F.linear(copied[id(x)], weight, bias).unflatten(-1, (-1, module.head_dim))
        if x.dim() == 2:
            projected = projected.unsqueeze(0)
        elif not module.batch_first:
            projected = projected.transpose(0, 1)
        yield projected.transpose(1, 2)


def _mask(
    module: Any,
    mesh: DeviceMesh,
    attention: torch.Tensor | None,
    padding: torch.Tensor | None,
    q: torch.Tensor,
) -> torch.Tensor | None:
    """What is added to the scores of this rank's heads."""
    if attention is not None:
        attention = _additive(attention, q)
        if attention.dim() == 3:
            by_head = attention.unflatten(0, (-1, module.num_heads))
            attention = by_head.chunk(mesh.size(), 1)[mesh.get_local_rank()]
    if padding is None:
        return attention
    padding = _additive(padding, q).view(-1, 1, 1, padding.shape[-1])
    return padding if attention is None else attention + padding


def _additive(mask: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A boolean mask, in which True is hidden, as numbers to add."""
    if mask.dtype != torch.bool:
        return mask.to(like.dtype)
    return torch.zeros_like(mask, dtype=like.dtype).masked_fill(mask, float("-inf"))


@contextmanager
def _own_draws(mesh: DeviceMesh, x: torch.Tensor, dropout: float) -> Iterator[None]:
    """Inside, each rank draws for itself: its heads are not the others'. After it, all ranks go on drawing alike."""
    if not dropout or isinstance(x, FakeTensor):
        yield
        return
    seed = int(torch.randint(2**31, ()))
    with torch.random.fork_rng([x.device] if x.is_cuda else []):
        torch.manual_seed(seed + mesh.get_local_rank())
        yield


_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_KINDS = (
    _Kind("linear", (nn.Linear,), _linear_ways),
    _Kind("convolution", _CONVOLUTIONS, _convolution_ways, _convolution_objection),
    _Kind("transposed convolution", _TRANSPOSED, _convolution_ways),
    _Kind("embedding", (nn.Embedding,), _embedding_ways, _embedding_objection),
    _Kind("attention", (nn.MultiheadAttention,), _attention_ways, _attention_objection),
)
_TRANSPOSED_LINEAR = _Kind("linear", (), _transposed_linear_ways)


def _recognise(module: nn.Module) -> _Kind | None:
    if _is_transposed_linear(module):
        return _TRANSPOSED_LINEAR
    return next((kind for kind in _KINDS if isinstance(module, kind.classes)), None)
