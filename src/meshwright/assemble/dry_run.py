"""Run a model on fake tensors before any process starts, to find what only shows when it runs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from meshwright.assemble.float8 import layers_in_float8, multiply_in_float8
from meshwright.assemble.precision import apply_precision, loss_under
from meshwright.assemble.staging import check_stages
from meshwright.describe.dtypes import DTYPES
from meshwright.describe.flops import PRODUCTS
from meshwright.describe.observe import observe
from meshwright.errors import JobError, Refused, one_line
from meshwright.facts.job import Job
from meshwright.facts.model import ModelFacts
from meshwright.facts.strategy import Strategy
from meshwright.recording.blueprint import record
from meshwright.strategies.pipeline.sizes import is_pipelined
from meshwright.torch_private.modes import TorchDispatchMode
from meshwright.torch_private.trees import tree_leaves


class OneDtype(TorchDispatchMode):
    """Mode that raises on products of mixed dtypes, as real tensors do; fake tensors accept them."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__.removesuffix("_") in (*PRODUCTS, "convolution"):
            dtypes = {leaf.dtype for leaf in tree_leaves(args) if torch.is_tensor(leaf) and leaf.is_floating_point()}
            if len(dtypes) > 1:
                names = " and ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
                raise TypeError(f"{names} meet in a product ({func.overloadpacket.__name__})")
        return func(*args, **(kwargs or {}))


def dry_run(job: Job, facts: ModelFacts, strategy: Strategy) -> None:
    """Raise `Refused` if the model does not run under a resolved strategy."""
    check_precision(job, facts, strategy)
    if is_pipelined(strategy):
        check_stages(job, facts, strategy)


def check_precision(job: Job, facts: ModelFacts, strategy: Strategy) -> None:
    """Refuse a precision that the model does not run in, because tensors of two dtypes still meet."""
    dtype = DTYPES[strategy.precision]
    if dtype == torch.float32 or strategy.autocast:
        return
    blueprint = record(job.model, seed=0, values=False)
    _refuse_float64(blueprint.model, strategy)
    if facts.unseen:
        return
    blocks = [blueprint.model.get_submodule(name) for name in facts.blocks]
    multiply_in_float8(blueprint.model, layers_in_float8(blueprint.model, facts, strategy))
    apply_precision(blueprint.model, blocks, dtype, pure=strategy.pure)
    try:
        observe(replace(job, loss=loss_under(strategy.precision, job)), blueprint, OneDtype())
    except JobError as error:
        cause = error.__cause__ or error
        raise Refused(
            f"The model does not run in {strategy.precision}: {one_line(cause)} Buffers keep their dtype, and in-place "
            "operators and those with out= are not cast; cast their arguments to one dtype in the model."
        ) from error


def _refuse_float64(model: nn.Module, strategy: Strategy) -> None:
    """Refuse to lower a float64 parameter: its author chose that precision."""
    found = [name for name, parameter in model.named_parameters() if parameter.dtype == torch.float64]
    if found:
        raise Refused(
            f"{strategy} computes with parameters in {strategy.precision}, but {found[0]} is in float64"
            f"{f' and so are {len(found) - 1} more' if found[1:] else ''}; build the model in fp32, or use fp32 as its "
            "precision, which keeps each parameter's own dtype."
        )
