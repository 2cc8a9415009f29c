"""Backward passes of user loops in which a model recomputes with the dtypes of its first run.

A model that checkpoints parts of itself (`torch.utils.checkpoint`) runs them again during backward. Under bf16 and fp16
our table of dtypes must be active then, but a user's `loss.backward()` does not enter it. So autograd's engine does.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from meshwright.assemble.operator_dtypes import recomputing
from meshwright.torch_private.autograd import wrap_engine

_dtypes: weakref.WeakKeyDictionary[Any, torch.dtype] = weakref.WeakKeyDictionary()


def recompute_in(dtype: torch.dtype, holder: object) -> None:
    """Make backward passes recompute in this dtype, as long as the holder lives and no other wants another dtype."""
    _dtypes[holder] = dtype
    _wrap_once()


@cache
def _wrap_once() -> None:
    wrap_engine(_in_table)


def _in_table(run: Callable[..., Any]) -> Callable[..., Any]:
    def run_in_table(*args: Any, **kwargs: Any) -> Any:
        dtypes = set(_dtypes.values())
        if len(dtypes) != 1:
            return run(*args, **kwargs)
        with recomputing(dtypes.pop()):
            return run(*args, **kwargs)

    return run_in_table
