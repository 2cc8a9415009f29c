"""Write a strategy as DeepSpeed's JSON, for DeepSpeed 0.19."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from meshwright.exchange.approximate import (
    PLAIN_WORDS,
    Rule,
    approximate,
    as_data,
    axes_missing_in,
    becomes_precision,
    drop,
    impure,
    offloaded,
    replicates,
    without_autocast,
)
from meshwright.exchange.export_request import Exported, ExportRequest, cut, named
from meshwright.facts.strategy import Strategy

ZERO: tuple[Rule, ...] = (
    *PLAIN_WORDS,
    as_data(lambda s: s.traits.hybrid, "fsdp", "DeepSpeed shards over all ranks; it is stage 3"),
    as_data(
        lambda s: s.traits.gathers and not s.traits.reshards,
        "zero2",
        "whole parameters between forward and backward are stage 2",
    ),
    as_data(lambda s: replicates(s) and s.data_size == 1, "single", "there is one rank"),
    becomes_precision(lambda s: s.precision == "fp8", "bf16", "DeepSpeed's config has no fp8; it says bf16"),
    without_autocast(lambda s: True, "DeepSpeed casts parameters where it says bf16 or fp16"),
    offloaded(lambda s: stage(s) == 0, "", "DeepSpeed offloads from ZeRO's stage 1 on; nothing leaves the device"),
    offloaded(lambda s: stage(s) < 3, "optimizer", "below stage 3 DeepSpeed offloads the optimizer alone, to the host"),
)
"""Limits of DeepSpeed's engine, however it is configured."""
NOT_IN_CODE: tuple[Rule, ...] = (
    impure(lambda s: stage(s) == 0, "DeepSpeed leaves out fp32 masters from stage 1 on only"),
    drop("recompute", "none", "DeepSpeed has no switch for it; the model calls its checkpoint function", head="ac"),
    drop("compile", False, "it is no part of the config; call engine.compile() after deepspeed.initialize"),
)


def stage(strategy: Strategy) -> int:
    """The stage of ZeRO; 0 without a data axis."""
    return strategy.traits.zero_stage or 0


def write_deepspeed(request: ExportRequest) -> Exported:
    """The config that `deepspeed.initialize(config=...)` takes."""
    settled, losses = approximate(request, (axes_missing_in("deepspeed"), *ZERO, *NOT_IN_CODE))
    batches = cut(request, settled, alone=1)
    losses = (*losses, *named(settled, batches.micro))
    said = replace(settled, micro_batch=batches.micro, engine="deepspeed")
    config: dict[str, Any] = {
        "train_batch_size": batches.total,
        "train_micro_batch_size_per_gpu": batches.micro,
        "gradient_accumulation_steps": batches.steps,
        # DeepSpeed 0.19 clips to 1.0 by default.
        "gradient_clipping": request.max_norm or 0.0,
        "zero_optimization": zero_section(said),
        # Keep the script's optimizer, also if it runs on the host.
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        **_precision(said),
        # JSON has no comments, and DeepSpeed ignores unknown top-level keys.
        "meshwright": {
            "strategy": str(request.strategy),
            "ranks": request.ranks,
            "without_equal": [str(loss) for loss in losses],
        },
    }
    text = json.dumps(config, indent=2) + "\n"
    return Exported(to="deepspeed", text=text, request=request, strategy=said, without_equal=losses)


def zero_section(strategy: Strategy) -> dict[str, Any]:
    """`zero_optimization`: the stage and what is offloaded."""
    section: dict[str, Any] = {"stage": stage(strategy)}
    place = {"device": "nvme", "nvme_path": strategy.nvme} if strategy.offload == "nvme" else {"device": "cpu"}
    if strategy.offload:
        section["offload_optimizer"] = place
    if strategy.offload in ("params", "nvme"):
        section["offload_param"] = dict(place)
    return section


def _precision(strategy: Strategy) -> dict[str, Any]:
    if not strategy.number_format.is_low:
        return {}
    word = strategy.precision
    section: dict[str, Any] = {"enabled": True}
    if not strategy.pure:
        # Our bf16 and fp16 sum gradients of micro-batches in fp32.
        sums = {"data_types": {"grad_accum_dtype": "fp32"}, "communication_data_type": strategy.reduce}
        return {word: section, **sums}
    section[f"{word}_master_weights_and_grads"] = True
    if word == "bf16":
        section["bf16_optimizer_states"] = True
    return {word: section}
