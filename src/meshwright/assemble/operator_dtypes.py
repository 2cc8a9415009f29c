"""The dtype that each operator computes in under bf16 and fp16: one table for every device and strategy.

The classes are those of CUDA's autocast (`ATen/autocast_mode.h`), with three differences that docs/policies.md
explains: products are lowered only if their arguments have several dtypes, norms return their input's dtype, and
interpolation is left alone. `torch.autocast` does not work here: its lists for CPU and CUDA differ, it skips meta
tensors, and it does not handle tensors that tensor parallelism divides.

A mode over torch functions sees the same calls on every device and on fake tensors. Arguments are cast before the
function runs, so autograd, fake tensors and torch.compile see plain casts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import reduce
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from meshwright.describe.dtypes import LOW
from meshwright.torch_private.autograd import engine_inside
from meshwright.torch_private.modes import function_modes, without_innermost_mode
from meshwright.torch_private.modules import wrap_compiled_call
from meshwright.torch_private.operators import FUNCTIONS

FP32 = torch.float32
CASTABLE = (FP32, *LOW)
"""The dtypes that rules may cast. float64 is never cast: the author chose it."""

Rule = Callable[[Any, torch.dtype, tuple[Any, ...], dict[str, Any]], Any]
"""(function, compute dtype, args, kwargs) -> the function's result."""


class OperatorDtypes(TorchFunctionMode):
    """While active, torch functions compute in the dtype that the table gives them."""

    off_in_compiled = True
    """Whether a compiled module runs without the mode, because it needs none or enters it itself."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        self.recorded_as = dtype  # what it does to a function depends on nothing else
        """Tells the tensor axis that it may record programs under this mode."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        rule = RULES.get(func)
        if rule is None:
            return func(*args, **kwargs) if kwargs else func(*args)
        return rule(func, self.dtype, args, kwargs or {})


class Recomputing(OperatorDtypes):
    """The mode for backward: active where the model's checkpointing recomputes, but not in hooks and derivatives."""

    off_in_compiled = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in BACKWARD:
            with engine_inside(self):
                return func(*args, **(kwargs or {}))
        rule = RULES.get(func) if torch.is_grad_enabled() else None
        if rule is None:  # PyTorch 2.11 compiles no super() of a mode
            return func(*args, **kwargs) if kwargs else func(*args)
        return rule(func, self.dtype, args, kwargs or {})


BACKWARD = (Tensor.backward, torch.autograd.backward, torch.autograd.grad)


def low(func: Any, dtype: torch.dtype, args: Any, kwargs: Any) -> Any:
    """Products: in the compute dtype if arguments have several dtypes. Products of fp32 tensors alone stay in fp32."""
    found = _dtypes(args, kwargs)
    if len(found) > 1 and all(one in CASTABLE for one in found):
        args, kwargs = cast_arguments(args, CASTABLE, dtype), cast_arguments(kwargs, CASTABLE, dtype)
    return func(*args, **kwargs)


def in_fp32(func: Any, dtype: torch.dtype, args: Any, kwargs: Any) -> Any:
    """Losses, distances, exponentials and logarithms: inputs in fp32."""
    if kwargs.get("out") is None and any(one in LOW for one in _dtypes(args, kwargs)):
        args, kwargs = cast_arguments(args, LOW, FP32), cast_arguments(kwargs, LOW, FP32)
    return func(*args, **kwargs)


def fp32_result(func: Any, dtype: torch.dtype, args: Any, kwargs: Any) -> Any:
    """Sums and softmax: the kernel accumulates in fp32 and returns fp32, so no fp32 copy of the input is needed."""
    chosen = kwargs.get("out") is not None or kwargs.get("dtype") is not None
    chosen = chosen or any(isinstance(one, torch.dtype) for one in args)
    if not chosen and any(one in LOW for one in _dtypes(args, kwargs)):
        kwargs = {**kwargs, "dtype": FP32}
    return func(*args, **kwargs)


def widest(func: Any, dtype: torch.dtype, args: Any, kwargs: Any) -> Any:
    """Functions whose tensors must have one dtype: the widest among the arguments."""
    found = _dtypes(args, kwargs)
    if len(found) > 1:
        wide = reduce(torch.promote_types, found)
        args, kwargs = cast_arguments(args, CASTABLE, wide), cast_arguments(kwargs, CASTABLE, wide)
    return func(*args, **kwargs)


def norm(func: Any, dtype: torch.dtype, args: Any, kwargs: Any) -> Any:
    """Norms: their kernels always compute in fp32; the result has the input's dtype."""
    if len(_dtypes(args, kwargs)) < 2:
        return func(*args, **kwargs)
    given = (args[0] if args else kwargs["input"]).dtype
    return widest(func, dtype, args, kwargs).to(given)


def into(func: Any, dtype: torch.dtype, args: Any, kwargs: Any) -> Any:
    """Writes into a tensor: the written values take the tensor's dtype."""
    if args and args[0].dtype in CASTABLE and len(_dtypes(args, kwargs)) > 1:
        target = args[0].dtype
        args, kwargs = (args[0], *cast_arguments(args[1:], CASTABLE, target)), cast_arguments(kwargs, CASTABLE, target)
    return func(*args, **kwargs)


def _dtypes(args: Any, kwargs: Any) -> list[torch.dtype]:
    """Floating dtypes among the arguments, each once."""
    found: list[torch.dtype] = []
    _collect(args, found)
    if kwargs:
        _collect(tuple(kwargs.values()), found)
    return found


def _collect(values: Any, found: list[torch.dtype]) -> None:
    for value in values:
        if value is None or value is True or value is False:
            continue
        if isinstance(value, Tensor):
            dtype = value.dtype
            if dtype.is_floating_point and dtype not in found:
                found.append(dtype)
        elif isinstance(value, (list, tuple)):
            _collect(value, found)


def cast_arguments(value: Any, sources: tuple[torch.dtype, ...], dtype: torch.dtype) -> Any:
    """Cast all tensors of the `sources` dtypes among a function's arguments."""
    if isinstance(value, Tensor):
        return value.to(dtype) if value.dtype in sources else value
    if isinstance(value, tuple):
        return tuple([cast_arguments(item, sources, dtype) for item in value])
    if isinstance(value, list):
        return [cast_arguments(item, sources, dtype) for item in value]
    if isinstance(value, dict):
        return {key: cast_arguments(item, sources, dtype) for key, item in value.items()}
    return value


_TABLE: list[tuple[Rule, str]] = [
    (
        low,
        "conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d conv_transpose3d convolution prelu "
        "addmm addmv addr matmul __matmul__ __rmatmul__ einsum mm mv vecdot linear addbmm baddbmm bmm chain_matmul "
        "multi_dot inner lstm gru rnn_tanh rnn_relu lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell "
        "scaled_dot_product_attention multi_head_attention_forward",
    ),
    (
        in_fp32,
        "acos arccos asin arcsin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow float_power "
        "__pow__ __rpow__ __rdiv__ __rtruediv__ softplus logsumexp "
        "frobenius_norm nuclear_norm norm vector_norm matrix_norm normalize renorm dist pdist cdist "
        "pairwise_distance cosine_similarity local_response_norm gumbel_softmax lp_pool1d lp_pool2d lp_pool3d "
        "cross_entropy cross_entropy_loss nll_loss nll_loss2d nll_loss_nd poisson_nll_loss gaussian_nll_loss "
        "binary_cross_entropy binary_cross_entropy_with_logits cosine_embedding_loss hinge_embedding_loss kl_div "
        "l1_loss smooth_l1_loss huber_loss mse_loss margin_ranking_loss multilabel_margin_loss "
        "multilabel_soft_margin_loss multi_margin_loss soft_margin_loss triplet_margin_loss "
        "triplet_margin_with_distance_loss ctc_loss",
    ),
    # These have no kernels for 16-bit dtypes. Autocast can skip them, because it leaves a model's stream in fp32.
    (
        in_fp32,
        "fft ifft fft2 ifft2 fftn ifftn rfft irfft rfft2 irfft2 rfftn irfftn hfft ihfft stft istft polar complex "
        "view_as_complex quantile nanquantile histc cholesky cholesky_ex cholesky_solve cholesky_inverse inv inv_ex "
        "inverse pinv pinverse svd svdvals qr eig eigvals eigh eigvalsh solve solve_ex solve_triangular lstsq lu "
        "lu_factor lu_solve det logdet slogdet matrix_exp",
    ),
    (fp32_result, "softmax softmin log_softmax prod cumprod cumsum sum"),
    (norm, "layer_norm native_layer_norm rms_norm group_norm instance_norm"),
    (widest, "addcdiv addcmul atan2 arctan2 bilinear cross dot vdot grid_sample grid_sampler tensordot lerp"),
    (
        into,
        "__setitem__ index_put index_put_ index_add index_add_ index_copy index_copy_ scatter scatter_ scatter_add "
        "scatter_add_ scatter_reduce scatter_reduce_ masked_scatter masked_scatter_ put_ put",
    ),
]
_PLACES = (torch, Tensor, F, torch.linalg, torch.special, torch.fft, FUNCTIONS)


def functions(names: str) -> Iterator[Any]:
    """PyTorch's functions of these names, in all of its namespaces."""
    for name in names.split():
        for place in _PLACES:
            func = getattr(place, name, None)
            if callable(func):
                yield func


RULES: dict[Any, Rule] = {func: rule for rule, names in _TABLE for func in functions(names)}


_MODES = {dtype: OperatorDtypes(dtype) for dtype in LOW}


def recomputing(dtype: torch.dtype) -> AbstractContextManager[Any]:
    """Context for backward, for models that checkpoint parts other than blocks themselves."""
    return Recomputing(dtype) if dtype in LOW else nullcontext()


def computing_in(dtype: torch.dtype) -> AbstractContextManager[Any]:
    """Region in which functions follow the table. Regions may nest, because recomputed blocks enter it again."""
    mode = _MODES.get(dtype)
    return nullcontext() if mode is None or any(one is mode for one in function_modes()) else mode


def compile_outside(module: nn.Module) -> None:
    """Compile a module that enters the mode itself, and switch the caller's mode off during its calls.

    torch.compile can trace a mode that the code enters. A mode that is already active breaks the graph at checkpoints.
    """
    torch.compiler.allow_in_graph(Tensor.unflatten)  # inside a mode, its `super()` would break the graph
    module.compile()

    def without_callers_mode(compiled: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            with ExitStack() as stack:
                while (modes := function_modes()) and getattr(modes[-1], "off_in_compiled", False):
                    stack.enter_context(without_innermost_mode())
                return compiled(*args, **kwargs)

        return call

    wrap_compiled_call(module, without_callers_mode)  # does nothing if a step is traced and torch.compile imitated
