"""Write a strategy as torchtitan's TOML, for v0.2.2, the last release that reads TOML.

Later releases are configured in Python and take the same names as options: `--parallelism.tensor_parallel_degree 2`.
"""

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
    offloaded,
    one_rank,
    replicates,
    without_autocast,
    zero_alone,
)
from meshwright.exchange.export_request import Batches, Exported, ExportRequest, comments, cut, named
from meshwright.facts.strategy import Strategy

SCHEDULES = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved": "Interleaved1F1B",
    "zb": "InterleavedZeroBubble",
    "zbv": "ZBVZeroBubble",
    "dualpipev": "DualPipeV",
}
"""PyTorch's names of our schedules, which torchtitan uses."""
FLOAT8 = "quantize.linear.float8"
LOCAL_BATCH = 8
"""torchtitan's default local_batch_size."""
REMARK = (
    "For torchtitan up to v0.2.2: add [model], [training] seq_len and the rest of your run. Later releases are "
    "configured in Python, take these names as options, as in --parallelism.tensor_parallel_degree 2, and count "
    "batches in tokens."
)

_BY_AUTOCAST = "without FSDP torchtitan computes a tensor axis or a pipeline in fp32"
_ZERO = "torchtitan has no ZeRO-1 and ZeRO-2; FSDP that keeps parameters gathered till backward is nearest"
_RULES: tuple[Rule, ...] = (
    axes_missing_in("torchtitan"),
    drop("engine", "torch", "torchtitan runs on PyTorch's own engine"),
    drop("reduce", "fp32", "torchtitan reduces gradients in float32 alone"),
    *PLAIN_WORDS,
    as_data(zero_alone, "fsdp", _ZERO, variant="grad-op"),
    as_data(lambda s: replicates(s) and s.model_ranks > 1, "fsdp", "torchtitan's DDP goes with no other axis"),
    as_data(lambda s: one_rank(s) and s.model_ranks > 1, None, "there is one data rank"),
    as_data(one_rank, "single", "there is one rank"),
    without_autocast(
        lambda s: not s.traits.gathers, "torchtitan's word for it is mixed_precision_param: without FSDP, autocast"
    ),
    without_autocast(lambda s: True, "FSDP casts parameters under torchtitan's mixed_precision_param"),
    becomes_precision(lambda s: s.precision == "fp16", "bf16", "torchtitan has no fp16; it says bf16"),
    becomes_precision(lambda s: _unmixed(s) and s.precision == "bf16" and not s.pure, "fp32", _BY_AUTOCAST),
    becomes_precision(lambda s: _unmixed(s) and s.precision == "fp8" and not s.pure, "fp32", _BY_AUTOCAST),
    offloaded(lambda s: not s.traits.gathers, "", "torchtitan offloads with FSDP only"),
    offloaded(lambda s: True, "params", "FSDP takes parameters, gradients and optimizer to the host, or nothing"),
)


def _unmixed(strategy: Strategy) -> bool:
    """Whether torchtitan silently skips mixed precision."""
    return not strategy.traits.gathers and strategy.model_ranks > 1


def write_torchtitan(request: ExportRequest) -> Exported:
    """The file that `--job.config_file` names."""
    settled, losses = approximate(request, _RULES)
    batches = cut(request, settled, alone=1 if settled.stage_axis else LOCAL_BATCH)
    losses = (*losses, *named(settled, batches.micro))
    said = replace(settled, micro_batch=batches.micro)
    text = comments(request, losses, (REMARK,)) + _toml(_sections(request, said, batches))
    return Exported(to="torchtitan", text=text, request=request, strategy=said, without_equal=losses)


def _sections(request: ExportRequest, strategy: Strategy, batches: Batches) -> dict[str, dict[str, Any]]:
    sections: dict[str, dict[str, Any]] = {
        "training": _training(request, strategy, batches),
        "parallelism": _parallelism(strategy, batches),
        "activation_checkpoint": {"mode": strategy.recompute},
        "compile": {"enable": strategy.compile},
    }
    if strategy.recompute == "selective":
        sections["activation_checkpoint"]["selective_ac_option"] = "op"
    if strategy.precision == "fp8":
        sections["model"] = {"converters": [FLOAT8]}
    return sections


def _training(request: ExportRequest, strategy: Strategy, batches: Batches) -> dict[str, Any]:
    small = strategy.number_format.is_low
    section: dict[str, Any] = {
        "local_batch_size": _local_batch(request, strategy, batches),
        "dtype": "bfloat16" if strategy.pure else "float32",
        "mixed_precision_param": "bfloat16" if small else "float32",
        "enable_cpu_offload": strategy.offload == "params",
    }
    if request.global_batch is not None:
        # torchtitan clips to 1.0 by default.
        section |= {"global_batch_size": batches.total, "max_norm": request.max_norm or float("inf")}
    return section


def _local_batch(request: ExportRequest, strategy: Strategy, batches: Batches) -> int:
    """Samples per data rank and forward pass; with a pipeline, those of all its micro-batches."""
    if not strategy.stage_axis:
        return batches.micro
    if request.global_batch is not None:
        return batches.micro * batches.steps
    return batches.micro * 2 * strategy.stage_ranks  # enough to fill two stages a rank


def _parallelism(strategy: Strategy, batches: Batches) -> dict[str, Any]:
    section: dict[str, Any] = {
        "data_parallel_replicate_degree": strategy.replicas,
        "data_parallel_shard_degree": strategy.shards,
        "fsdp_reshard_after_forward": _reshard(strategy),
        **strategy.config_sizes("torchtitan"),
    }
    if strategy.stage_axis:
        section |= {
            "pipeline_parallel_schedule": SCHEDULES[strategy.schedule],
            "pipeline_parallel_microbatch_size": batches.micro,
        }
    return section


def _reshard(strategy: Strategy) -> str:
    """torchtitan's "default" keeps a pipeline's stage gathered, as our fsdp does there."""
    traits = strategy.traits
    if traits.gathers and not traits.reshards:
        return "never"
    return "always" if traits.reshards and not traits.hybrid and not strategy.stage_axis else "default"


def _toml(sections: dict[str, dict[str, Any]]) -> str:
    return "".join(
        f"\n[{name}]\n" + "".join(f"{key} = {_value(value)}\n" for key, value in section.items())
        for name, section in sections.items()
    )


def _value(value: object) -> str:
    # TOML writes strings, numbers, booleans and lists as JSON does, except infinity.
    return "inf" if value == float("inf") else json.dumps(value, ensure_ascii=False)
