"""What a host takes to launch operators, in launches of a sum of two small tensors.

An operator may check and plan more than a sum, allocate several results, or launch several kernels. Timed on an H200's
host for the operators of 36 steps, many calls in a row (docs/data/launch_gpu.json): the median of an operator's shapes
and dtypes. The host slowed down by half on the way, and later operators are divided by a sum that was timed then.
"""

from __future__ import annotations

from collections.abc import Iterable

from meshwright.facts.costs import Kernel

USUAL = 1.1
"""Elementwise operators, of which 60 took 0.9 to 1.3."""
_ATTENTION = {"flash": 6.6, "cudnn": 4.3, "efficient": 8.5}
LAUNCHES = {
    **{f"_scaled_dot_product_{kind}_attention": work for kind, work in _ATTENTION.items()},
    # Timed through autograd, whose own part is counted elsewhere; so as in forward.
    **{f"_scaled_dot_product_{kind}_attention_backward": work for kind, work in _ATTENTION.items()},
    **{"mm": 1.7, "bmm": 1.7, "addmm": 2.5, "baddbmm": 2.5, "_grouped_mm": 3.3},
    **{"convolution": 5.1, "convolution_backward": 6.6},
    **{"native_layer_norm": 1.9, "native_layer_norm_backward": 2.6},
    **{"native_batch_norm": 3.5, "native_batch_norm_backward": 2.3},
    **{"native_group_norm": 3.2, "native_group_norm_backward": 6.4},
    **{"_softmax": 1.6, "_softmax_backward_data": 3.1, "native_dropout": 1.6, "native_dropout_backward": 1.3},
    **{"embedding": 1.7, "embedding_dense_backward": 10.3, "index": 3.9, "index_put": 17.0, "scatter_add": 2.1},
    **{"slice_backward": 2.3, "select_backward": 2.4, "constant_pad_nd": 2.0, "masked_fill": 3.0, "repeat": 3.2},
    **{"_to_copy": 1.9, "clone": 1.5, "cat": 1.4, "stack": 1.4, "flip": 1.6, "where": 1.3, "zeros": 1.5, "arange": 2.1},
    **{"mean": 1.4, "amax": 2.4, "max": 2.0, "cumsum": 2.7, "sort": 8.0, "topk": 2.3, "any": 1.7, "all": 1.6},
    **{"max_pool2d_with_indices": 2.4, "max_pool2d_with_indices_backward": 3.4, "avg_pool2d": 1.8},
    **{"avg_pool2d_backward": 3.7, "upsample_bilinear2d": 1.5, "upsample_bilinear2d_backward": 3.3},
    **{"upsample_nearest2d_backward": 2.9, "upsample_bicubic2d": 2.1, "upsample_bicubic2d_backward": 3.0},
    **{"grid_sampler_2d_backward": 2.4, "_thnn_fused_gru_cell": 2.5, "_thnn_fused_gru_cell_backward": 5.9},
    **{"_thnn_fused_lstm_cell": 2.5, "_thnn_fused_lstm_cell_backward_impl": 5.9},
    **{"binary_cross_entropy_with_logits": 6.7, "mse_loss": 2.4, "mse_loss_backward": 2.3, "pow": 1.5},
}
"""Of an LSTM's cell no time is known; it counts as a GRU's."""


def launching(kernels: Iterable[Kernel]) -> float:
    """What launching all of them takes."""
    return sum(LAUNCHES.get(kernel.name, USUAL) for kernel in kernels)
