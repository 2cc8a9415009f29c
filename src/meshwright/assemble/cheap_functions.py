"""The torch functions that are cheap to run again: they move and combine numbers, always in the same way.

Not here: products, convolutions and attention, which are expensive; random functions; functions that add by atomics,
whose sums differ from run to run on a GPU; reductions, whose results are small; and functions that make a tensor to be
written to, such as `clone` and `zeros_like`: a kernel or a collective may write to it unseen.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.assemble.operator_dtypes import functions
from meshwright.torch_private.tensors import TensorBase

_ELEMENTWISE = (
    "abs absolute acos acosh add addcdiv addcmul arccos arccosh arcsin arcsinh arctan arctan2 arctanh asin asinh atan "
    "atan2 atanh bitwise_and bitwise_not bitwise_or bitwise_xor ceil celu clamp clamp_max clamp_min clip copysign cos "
    "cosh deg2rad digamma div divide elu eq erf erfc erfinv exp exp2 expm1 float_power floor floor_divide fmax fmin "
    "fmod frac ge gelu glu gt hardshrink hardsigmoid hardswish hardtanh heaviside hypot isfinite isinf isnan le "
    "leaky_relu lerp lgamma log log10 log1p log2 logaddexp logaddexp2 logical_and logical_not logical_or logical_xor "
    "logit logsigmoid lt masked_fill maximum minimum mish mul multiply nan_to_num ne neg negative pow prelu rad2deg "
    "reciprocal relu relu6 remainder round rsqrt rsub selu sigmoid sign silu sin sinc sinh softplus softshrink "
    "softsign sqrt square sub subtract tan tanh tanhshrink threshold true_divide trunc where xlogy "
    "__add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __truediv__ __rtruediv__ __div__ __rdiv__ __floordiv__ "
    "__rfloordiv__ __pow__ __rpow__ __mod__ __rmod__ __neg__ __pos__ __abs__ __eq__ __ne__ __lt__ __le__ __gt__ "
    "__ge__ __and__ __rand__ __or__ __ror__ __xor__ __rxor__ __invert__"
)
_CONVERSIONS = "to float half bfloat16 double type type_as int long bool"
_LAYOUT = (
    "__getitem__ cat concat concatenate contiguous dstack flatten flip fliplr flipud gather hstack index_select "
    "pad pixel_shuffle pixel_unshuffle ravel repeat repeat_interleave reshape reshape_as roll rot90 stack "
    "take_along_dim tile tril triu vstack"
)
_ALONG_DIMS = (
    "softmax log_softmax softmin normalize layer_norm rms_norm group_norm instance_norm batch_norm "
    "avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d "
    "max_pool1d max_pool2d max_pool3d interpolate upsample"
)
CHEAP = frozenset(functions(" ".join((_ELEMENTWISE, _CONVERSIONS, _LAYOUT, _ALONG_DIMS)))) - {torch.instance_norm}

CHEAP_IN_PLACE: dict[Any, Any] = {
    getattr(place, f"{name}_"): getattr(place, name)
    for place in (torch, Tensor, F)
    for name in _ELEMENTWISE.split()
    if not name.endswith("_") and hasattr(place, f"{name}_") and hasattr(place, name)
}
"""Functions that change their first argument, and those that return the result instead."""

SAVED_RESULTS = frozenset(
    functions(
        "softmax log_softmax softmin normalize sigmoid tanh relu exp exp2 expm1 sqrt rsqrt reciprocal tan erfinv "
        "elu celu selu logsigmoid softplus pow __pow__ __rpow__ __rtruediv__ __rdiv__ float_power __rsub__"
    )
)
"""Cheap functions whose result autograd may save. One that is missing here costs memory only."""

_VIEWS = (
    "view view_as expand expand_as transpose permute swapaxes swapdims movedim moveaxis t adjoint unsqueeze squeeze "
    "unflatten split chunk split_with_sizes tensor_split unbind select narrow diagonal unfold detach as_strided "
    "view_as_real view_as_complex"
)
_QUESTIONS = (
    "size dim ndimension numel nelement element_size stride is_contiguous is_floating_point is_complex get_device "
    "storage_offset __len__ __hash__ item tolist __bool__ __float__ __int__ __index__ untyped_storage data_ptr "
    "is_tensor is_same_size"
)
_PROPERTIES = [member for member in vars(TensorBase).values() if type(member).__name__ == "getset_descriptor"]
UNCHANGING = frozenset(functions(f"{_VIEWS} {_QUESTIONS}")) | {member.__get__ for member in _PROPERTIES}
"""Functions that make no values: views, and reads of a tensor's properties."""

_ORDER = {
    F.batch_norm: ("input", "running_mean", "running_var", "weight", "bias", "training"),
    torch.batch_norm: ("input", "weight", "bias", "running_mean", "running_var", "training"),
    F.instance_norm: ("input", "running_mean", "running_var", "weight", "bias", "use_input_stats"),
}
_TRACKED = ("running_mean", "running_var")


def stateless(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with which a norm in training gives the same result and does not change running statistics."""
    order = _ORDER.get(func)
    if order is None:
        return args, kwargs
    given = {**dict(zip(order, args, strict=False)), **kwargs}
    if not given.get(order[-1], func is F.instance_norm):
        return args, kwargs
    untracked = [None if name in _TRACKED else arg for name, arg in zip(order, args, strict=False)]
    return (*untracked, *args[len(order) :]), {k: None if k in _TRACKED else v for k, v in kwargs.items()}
