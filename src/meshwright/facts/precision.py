"""Number formats that a strategy can compute in."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class NumberFormat:
    """Properties of one precision."""

    word: str
    """The term in a strategy's text."""
    bytes: int
    torch_name: str
    """The name in PyTorch of the compute dtype: that of parameters as they are read, and of activations."""
    rounding: float
    """The largest relative error of rounding a number to it."""
    is_low: bool = True
    """Whether it has fewer bits than fp32, the format of master weights and gradient sums."""
    scales_loss: bool = False
    """Whether gradients underflow in it unless the loss is scaled up."""
    autocasts: bool = False
    """Whether `torch.autocast` lowers operators to it."""
    factors: tuple[str, ...] = ()
    """The names in PyTorch of the dtypes to which factors of large matrix products are rounded, if they are others."""


FULL = NumberFormat(word="fp32", bytes=4, torch_name="float32", rounding=2.0**-24, is_low=False)
FORMATS = {
    one.word: one
    for one in (
        FULL,
        NumberFormat(word="bf16", bytes=2, torch_name="bfloat16", rounding=2.0**-8, autocasts=True),
        NumberFormat(word="fp16", bytes=2, torch_name="float16", rounding=2.0**-11, autocasts=True, scales_loss=True),
        NumberFormat(
            word="fp8", bytes=2, torch_name="bfloat16", rounding=2.0**-8, factors=("float8_e4m3fn", "float8_e5m2")
        ),
    )
}
