"""A DeepSpeed JSON as a typed value, for `plan --against` and `train --deepspeed-config`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from meshwright.exchange.axes import axis_fields, read_axes
from meshwright.exchange.errors import ExchangeError
from meshwright.exchange.fields import Fields
from meshwright.facts.model_axis import AxisTerm

OFFLOAD_TUNING = "pin_memory buffer_count buffer_size max_in_cpu pipeline_read pipeline_write fast_init"
LOSS_SCALE = (
    "auto_cast loss_scale initial_scale_power loss_scale_window hysteresis consecutive_hysteresis min_loss_scale"
)


@dataclass(frozen=True, kw_only=True)
class Zero:
    """ZeRO's stage and the devices that states are offloaded to: none, cpu or nvme."""

    stage: int
    optimizer: str = "none"
    parameters: str = "none"
    nvme_path: str = ""


@dataclass(frozen=True, kw_only=True)
class DeepSpeedConfig:
    """The settings of a DeepSpeed JSON that matter here. None: not set."""

    zero: Zero
    precision: str = "fp32"
    pure: bool = False
    axes: tuple[AxisTerm, ...] = ()
    micro_batch: int | None = None
    accumulation: int | None = None
    global_batch: int | None = None
    max_norm: float | None = None
    """0.0: no clipping."""
    gradient_dtypes: Mapping[str, str]
    """The dtypes of gradient sums, by setting."""
    optimizer: Mapping[str, Any] | None = None
    scheduler: Mapping[str, Any] | None = None


def read_config(fields: Fields) -> DeepSpeedConfig:
    """Read all known settings; `fields.unread()` lists the others."""
    precision, pure = _precision(fields)
    return DeepSpeedConfig(
        zero=_zero(fields.table("zero_optimization")),
        precision=precision,
        pure=pure,
        axes=_axes(fields.table("tensor_parallel")),
        micro_batch=fields.maybe("train_micro_batch_size_per_gpu"),
        accumulation=fields.maybe("gradient_accumulation_steps"),
        global_batch=fields.maybe("train_batch_size"),
        max_norm=fields.real("gradient_clipping"),
        gradient_dtypes={
            "data_types.grad_accum_dtype": fields.table("data_types").word("grad_accum_dtype", "fp32"),
            "communication_data_type": fields.word("communication_data_type", "fp32"),
        },
        optimizer=_job_section(fields, "optimizer"),
        scheduler=_job_section(fields, "scheduler"),
    )


def _axes(fields: Fields) -> tuple[AxisTerm, ...]:
    """The tensor axis; a size of 0 means none in DeepSpeed."""
    off = all(fields.number(field, 0) == 0 for field in axis_fields("deepspeed"))
    return () if off else read_axes("deepspeed", fields)


def _zero(fields: Fields) -> Zero:
    stage = fields.number("stage", 0)
    if stage not in range(4):
        raise fields.wrong("stage", "0, 1, 2 or 3")
    tables = [fields.table("offload_optimizer"), fields.table("offload_param")]
    optimizer, parameters = map(_device, tables)
    paths = [table.word("nvme_path", "") for table in tables]
    if fields.flag("cpu_offload"):  # as it was written before version 0.3.16
        optimizer = "cpu"
    return Zero(stage=stage, optimizer=optimizer, parameters=parameters, nvme_path=paths[0] or paths[1])


def _device(fields: Fields) -> str:
    fields.skip(*OFFLOAD_TUNING.split())
    device = fields.word("device", "none").lower()
    if device not in ("none", "cpu", "nvme"):
        raise fields.wrong("device", "none, cpu or nvme")
    return device


def _precision(fields: Fields) -> tuple[str, bool]:
    """The enabled precision, and whether it has no master weights."""
    found = []
    for word in ("bf16", "fp16"):
        table = fields.table(word)
        pure = table.flag(f"{word}_master_weights_and_grads")
        table.skip("bf16_optimizer_states", "check_grad_overflow", "immediate_grad_update", *LOSS_SCALE.split())
        if table.flag("enabled"):
            found.append((word, pure))
    if len(found) > 1:
        raise ExchangeError(f"{fields.file}: bf16 and fp16 are both enabled; enable one of them.")
    return found[0] if found else ("fp32", False)


def _job_section(fields: Fields, name: str) -> Mapping[str, Any] | None:
    value = fields.take(name)
    if value is not None and not isinstance(value, Mapping):
        raise fields.wrong(name, "a table of settings")
    return value
