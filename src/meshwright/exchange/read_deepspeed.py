"""Read DeepSpeed's JSON: as a typed value, for `train --deepspeed-config`, and as a strategy, for `plan --against`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from meshwright.errors import ExchangeError
from meshwright.exchange.fields import Fields, Imported, axis_fields, read_axes
from meshwright.facts.data_axis import find_traits, word_of_stage
from meshwright.facts.model_axis import AxisTerm
from meshwright.facts.strategy import Strategy

SIGNS = ("zero_optimization", "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
"""Keys that identify DeepSpeed's files."""
QUIET = (
    *("meshwright", "steps_per_print", "wall_clock_breakdown", "dump_state", "comms_logger"),
    *("zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer"),
)
"""Keys that do not affect the strategy."""
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
    accumulates_in: str = "fp32"
    """The dtype of sums over micro-batches."""
    reduces_in: str | None = None
    """The dtype of sums over ranks. None: DeepSpeed takes the compute dtype."""
    optimizer: Mapping[str, Any] | None = None
    scheduler: Mapping[str, Any] | None = None


def read_config(fields: Fields) -> DeepSpeedConfig:
    """Read all known settings; `fields.unread()` lists the others."""
    precision, pure = _precision(fields)
    reduced = fields.word("communication_data_type", "").lower()
    return DeepSpeedConfig(
        zero=_zero(fields.table("zero_optimization")),
        precision=precision,
        pure=pure,
        axes=_axes(fields.table("tensor_parallel")),
        micro_batch=fields.maybe("train_micro_batch_size_per_gpu"),
        accumulation=fields.maybe("gradient_accumulation_steps"),
        global_batch=fields.maybe("train_batch_size"),
        max_norm=fields.real("gradient_clipping"),
        accumulates_in=fields.table("data_types").word("grad_accum_dtype", "fp32"),
        reduces_in={"": None, "float32": "fp32", "bfloat16": "bf16"}.get(reduced, reduced),
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


def read_deepspeed(fields: Fields, *, ranks: int | None = None) -> Imported:
    """Read the strategy of a DeepSpeed config; `ranks` is the number of ranks, if known from elsewhere."""
    config = read_config(fields)
    fields.skip(*QUIET)
    size, tp = _data_ranks(fields, config), prod(term.size for term in config.axes)
    if size is not None and ranks is not None and size * tp != ranks:
        raise ExchangeError(
            f"{fields.file}: the batch sizes make {size} data ranks, but there are {ranks} processes; make "
            "train_batch_size the product of micro-batch, accumulation and data ranks, or leave it out."
        )
    terms = zero_terms(fields, config.zero, size if ranks is None else ranks // tp, alone=tp == 1)
    strategy = Strategy(
        **terms,
        precision=config.precision,
        pure=config.pure,
        **reduce_term(terms, config.reduces_in or config.precision, config.precision, pure=config.pure),
        axes=config.axes,
        micro_batch=config.micro_batch,
        engine="deepspeed",
    )
    return Imported(
        strategy=strategy,
        origin="deepspeed",
        file=str(fields.file),
        ignored=tuple(fields.unread()),
        global_batch=config.global_batch,
        max_norm=config.max_norm if config.max_norm and config.max_norm > 0 else None,
    )


def zero_terms(fields: Fields, zero: Zero, size: int | None, *, alone: bool = True) -> dict[str, Any]:
    """The fields of a strategy for ZeRO on `size` data ranks; an error if the stage cannot offload."""
    if zero.parameters != "none" and zero.stage != 3:
        raise ExchangeError(
            f"{fields.file}: parameters are offloaded under stage {zero.stage}, but only stage 3 divides them; "
            "set the stage to 3, or offload the optimizer alone."
        )
    if zero.optimizer != "none" and zero.stage == 0:
        raise ExchangeError(f"{fields.file}: the optimizer is offloaded under stage 0, which DeepSpeed cannot; set 1.")
    data: dict[str, Any] = {"data": word_of_stage(zero.stage), "data_size": size}
    if zero.stage == 0 and size == 1:
        data = {"data": "single"} if alone else {}
    if "nvme" in (zero.optimizer, zero.parameters):
        if not zero.nvme_path:
            raise ExchangeError(f"{fields.file}: state is offloaded to nvme, but nvme_path is missing; set it.")
        return {**data, "offload": "nvme", "nvme": zero.nvme_path}
    return {**data, "offload": "params" if zero.parameters == "cpu" else "optimizer" if zero.optimizer == "cpu" else ""}


def reduce_term(data: Mapping[str, Any], dtype: str, precision: str, *, pure: bool = False) -> dict[str, Any]:
    """The strategy's field for the dtype of sums over ranks, if its data axis has ranks and it is not the default."""
    traits = find_traits(data.get("data"), data.get("variant", ""))
    summed = traits.sized and data.get("data_size") != 1 and bool(traits.shards or not traits.gathers)
    return {"reduce": "bf16"} if summed and dtype == precision == "bf16" and not pure else {}


def _data_ranks(fields: Fields, config: DeepSpeedConfig) -> int | None:
    """The number of data ranks, if the file sets all batch sizes."""
    micro, total, steps = config.micro_batch, config.global_batch, config.accumulation
    if micro is None or total is None or steps is None:
        return None
    size, over = divmod(total, micro * steps)
    if over or not size:
        raise ExchangeError(
            f"{fields.file}: train_batch_size is {total}, which is not a multiple of train_micro_batch_size_per_gpu x "
            f"gradient_accumulation_steps = {micro * steps}; DeepSpeed refuses that."
        )
    return size
