"""Switch dropout off, so that random masks cause no differences."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from meshwright.torch_private.modules import Dropout


class NoDropout(TorchFunctionMode):
    """Makes dropout functions return their input, and attention drop nothing."""

    FUNCTIONS = frozenset(
        (
            *(F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout),
            *(torch.dropout, torch.alpha_dropout, torch.feature_dropout, torch.feature_alpha_dropout),
        )
    )

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in self.FUNCTIONS:
            return args[0] if args else kwargs["input"]
        if func is F.scaled_dot_product_attention:
            if len(args) > 4:
                args = (*args[:4], 0.0, *args[5:])
            elif "dropout_p" in kwargs:
                kwargs = {**kwargs, "dropout_p": 0.0}
        if func is F.multi_head_attention_forward:
            kwargs = {**kwargs, "training": False}  # it uses this only for dropout
        return func(*args, **kwargs)


def dropout_of(module: nn.Module) -> str | None:
    """The name of the attribute with a module's dropout probability."""
    if isinstance(module, Dropout):
        return "p"
    return "dropout" if isinstance(module, nn.MultiheadAttention | nn.RNNBase) else None


def switch_dropout_off(model: nn.Module) -> None:
    """Set the modules' probabilities to 0: backward may recompute in another thread, where `NoDropout` is off."""
    for module in model.modules():
        if name := dropout_of(module):
            setattr(module, name, 0.0)


@contextmanager
def without_dropout(model: nn.Module) -> Iterator[None]:
    """Switch dropout off inside this context: in functions, and in modules that backward may recompute."""
    kept = [(module, name, getattr(module, name)) for module in model.modules() if (name := dropout_of(module))]
    switch_dropout_off(model)
    try:
        with NoDropout():
            yield
    finally:
        for module, name, value in kept:
            setattr(module, name, value)
