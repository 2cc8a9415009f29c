"""DeepSpeed's configuration for a strategy. No option that changes the training is left to a default."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshwright.exchange.deepspeed import zero_section
from meshwright.facts.model import ModelFacts
from meshwright.facts.strategy import Strategy

BUCKET = 500_000_000
"""DeepSpeed's default bucket size in elements. It allocates the bucket whether gradients fill it or not."""
PERSISTENT = 100_000
"""DeepSpeed's default bound on parameters that stage 3 keeps whole, in elements."""
PERSISTENT_SHARE = 1000
"""The bound is at most the model's elements divided by this, because small models never reach the default."""


def config_of(
    strategy: Strategy, facts: ModelFacts, *, max_norm: float | None, written: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The configuration for `deepspeed.initialize`. `written` is the user's, already checked to agree."""
    stage = strategy.traits.zero_stage
    assert stage is not None, f"{strategy} was refused"
    return merged(_tuning(stage, facts), merged(written or {}, _fixed(stage, strategy, max_norm)))


def _fixed(stage: int, strategy: Strategy, max_norm: float | None) -> dict[str, Any]:
    """The options that the strategy and the job determine."""
    # Stage 0 and the pipeline sum gradients in the parameters' dtype, so these stay fp32 and are cast where read.
    lowered = strategy.precision if stage and not strategy.stage_axis else "fp32"
    config: dict[str, Any] = {
        # The trainer handles micro-batches and the loss's weight: to DeepSpeed each micro-batch is a batch.
        "train_micro_batch_size_per_gpu": strategy.micro_batch or 1,
        "gradient_accumulation_steps": 1,
        "train_batch_size": (strategy.micro_batch or 1) * strategy.data_ranks,
        "gradient_clipping": max_norm if stage and max_norm is not None else 0.0,  # the default is 1.0
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": lowered == "bf16"},
        "fp16": {"enabled": lowered == "fp16", "loss_scale": 1.0},  # the trainer scales the loss
        "zero_optimization": zero_section(strategy),
    }
    if lowered != "fp32":
        config |= {"data_types": {"grad_accum_dtype": "fp32"}, "communication_data_type": strategy.reduce}
    return config


def _tuning(stage: int, facts: ModelFacts) -> dict[str, Any]:
    """Defaults that the user may override."""
    elements = sum(parameter.count for parameter in facts.parameters)
    bucket = min(BUCKET, elements + elements % 2 + 2)  # DeepSpeed needs an even number
    zero: dict[str, Any] = {"reduce_bucket_size": bucket, "allgather_bucket_size": bucket}
    if stage == 3:
        zero["stage3_param_persistence_threshold"] = min(PERSISTENT, elements // PERSISTENT_SHARE)
        # It would replace torch's linear in the whole process.
        zero["memory_efficient_linear"] = False
    return {"steps_per_print": None, "zero_optimization": zero}


def merged(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """Merge two configurations section by section; the second wins."""
    found = dict(first)
    for key, value in second.items():
        both = isinstance(value, Mapping) and isinstance(found.get(key), Mapping)
        found[key] = merged(found[key], value) if both else value
    return found
