"""DeepSpeed's configuration of a strategy. Nothing that changes the training is left to a default."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshwright.exchange.deepspeed import zero_section
from meshwright.facts.model import ModelFacts
from meshwright.facts.strategy import Strategy

BUCKET = 500_000_000
"""DeepSpeed's own size of a bucket in elements; it takes the memory whether gradients fill it or not."""
PERSISTENT = 100_000
"""DeepSpeed's own bound on parameters that stage 3 keeps whole, in elements."""
PERSISTENT_SHARE = 1000
"""In small models no parameter reaches it: so it is also one part in so many of the model."""


def config_of(
    strategy: Strategy, facts: ModelFacts, *, max_norm: float | None, written: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """What `deepspeed.initialize` takes. `read_preset` is the user's own, which was checked to agree."""
    stage = strategy.traits.zero_stage
    assert stage is not None, f"{strategy} was refused"
    return merged(_tuning(stage, facts), merged(written or {}, _fixed(stage, strategy, max_norm)))


def _fixed(stage: int, strategy: Strategy, max_norm: float | None) -> dict[str, Any]:
    """What the strategy and the job say."""
    # Stage 0 and the pipeline add gradients up in the parameters' dtype: these stay fp32, and are cast where read.
    lowered = strategy.precision if stage and not strategy.stage_axis else "fp32"
    config: dict[str, Any] = {
        # Micro-batches, their number and the loss's weight are the trainer's: to DeepSpeed each is a batch by itself.
        "train_micro_batch_size_per_gpu": strategy.micro_batch or 1,
        "gradient_accumulation_steps": 1,
        "train_batch_size": (strategy.micro_batch or 1) * strategy.data_ranks,
        "gradient_clipping": max_norm if stage and max_norm is not None else 0.0,  # left out, it is 1.0
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": lowered == "bf16"},
        "fp16": {"enabled": lowered == "fp16", "loss_scale": 1.0},  # the scale is the trainer's
        "zero_optimization": zero_section(strategy),
    }
    if lowered != "fp32":
        config |= {"data_types": {"grad_accum_dtype": "fp32"}, "communication_data_type": "fp32"}
    return config


def _tuning(stage: int, facts: ModelFacts) -> dict[str, Any]:
    """What the user may choose otherwise."""
    elements = sum(parameter.count for parameter in facts.parameters)
    bucket = min(BUCKET, elements + elements % 2 + 2)  # DeepSpeed wants it even
    zero: dict[str, Any] = {"reduce_bucket_size": bucket, "allgather_bucket_size": bucket}
    if stage == 3:
        zero["stage3_param_persistence_threshold"] = min(PERSISTENT, elements // PERSISTENT_SHARE)
        # It would put a function of its own in the place of torch's linear, for all that runs in this process.
        zero["memory_efficient_linear"] = False
    return {"steps_per_print": None, "zero_optimization": zero}


def merged(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """Both, section by section; where both say something, the second does."""
    found = dict(first)
    for key, value in second.items():
        both = isinstance(value, Mapping) and isinstance(found.get(key), Mapping)
        found[key] = merged(found[key], value) if both else value
    return found
