"""DeepSpeed's JSON as a strategy."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

from meshwright.exchange.axes import axis_fields, read_axes
from meshwright.exchange.errors import ExchangeError
from meshwright.exchange.fields import Fields
from meshwright.exchange.imported import Imported
from meshwright.facts.data_axis import word_of_stage
from meshwright.facts.model_axis import AxisTerm
from meshwright.facts.strategy import Strategy

SIGNS = ("zero_optimization", "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
"""By one of these keys a file is DeepSpeed's."""
QUIET = (
    *("meshwright", "optimizer", "scheduler", "steps_per_print", "wall_clock_breakdown", "dump_state", "comms_logger"),
    *("zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer", "data_types", "communication_data_type"),
)
"""Keys that say nothing about how a job lies over ranks."""


@dataclass(frozen=True, kw_only=True)
class Zero:
    """What both DeepSpeed's own file and Accelerate's plugin say."""

    stage: int
    offload: str = ""
    nvme: str = ""


def read_deepspeed(fields: Fields, *, ranks: int | None = None) -> Imported:
    """The strategy of a DeepSpeed config; `ranks` where something else says how many there are."""
    zero = read_zero(fields.table("zero_optimization"))
    axes = _axes(fields.table("tensor_parallel"))
    tp = prod(term.size for term in axes)
    micro, total, size = _batches(fields)
    if size is not None and ranks is not None and size * tp != ranks:
        raise ExchangeError(
            f"{fields.file}: the batch sizes make {size} data ranks, but there are {ranks} processes; make "
            "train_batch_size the product of micro-batch, accumulation and data ranks, or leave it out."
        )
    size = size if ranks is None else ranks // tp
    norm = fields.take("gradient_clipping")
    fields.skip(*QUIET)
    strategy = Strategy(
        **zero_axis(zero, size, alone=tp == 1),
        **_precision(fields),
        axes=axes,
        offload=zero.offload,  # type: ignore[arg-type]  # one of the grammar's words by construction
        nvme=zero.nvme,
        micro_batch=micro,
        engine="deepspeed",
    )
    ignored = tuple(fields.unread())
    return Imported(
        strategy=strategy,
        origin="deepspeed",
        file=str(fields.file),
        ignored=ignored,
        global_batch=total,
        max_norm=float(norm) if isinstance(norm, (int, float)) and norm > 0 else None,
    )


def _axes(fields: Fields) -> tuple[AxisTerm, ...]:
    """The tensor axis; DeepSpeed writes a size of 0 where there is none."""
    off = all(fields.number(field, 0) == 0 for field in axis_fields("deepspeed"))
    return () if off else read_axes("deepspeed", fields)


def zero_axis(zero: Zero, size: int | None, *, alone: bool = True) -> dict[str, Any]:
    """The data axis of a stage over so many ranks."""
    if zero.stage == 0 and size == 1:
        return {"data": "single"} if alone else {}
    return {"data": word_of_stage(zero.stage), "data_size": size}


def read_zero(fields: Fields) -> Zero:
    """`zero_optimization`: the stage and what leaves the device."""
    stage = fields.number("stage", 0)
    if stage not in range(4):
        raise fields.wrong("stage", "0, 1, 2 or 3")
    optimizer, parameters = fields.table("offload_optimizer"), fields.table("offload_param")
    devices = [_device(optimizer), _device(parameters)]
    if fields.flag("cpu_offload"):  # as it was written before version 0.3.16
        devices[0] = "cpu"
    return offloading(fields, stage, devices, [str(table.take("nvme_path", "")) for table in (optimizer, parameters)])


def offloading(fields: Fields, stage: int, devices: list[str], folders: list[str]) -> Zero:
    """What leaves the device, of optimizer and parameters; where it cannot under this stage, an error."""
    optimizer, parameters = devices
    if parameters != "none" and stage != 3:
        raise ExchangeError(
            f"{fields.file}: parameters are offloaded under stage {stage}, but only stage 3 divides them; "
            "set the stage to 3, or offload the optimizer alone."
        )
    if optimizer != "none" and stage == 0:
        raise ExchangeError(f"{fields.file}: the optimizer is offloaded under stage 0, which DeepSpeed cannot; set 1.")
    if "nvme" in devices:
        folder = next((path for path in folders if path), "")
        if not folder:
            raise ExchangeError(
                f"{fields.file}: something is offloaded to nvme, and no nvme_path says where; name one."
            )
        return Zero(stage=stage, offload="nvme", nvme=folder)
    return Zero(stage=stage, offload="params" if parameters == "cpu" else "optimizer" if optimizer == "cpu" else "")


def _device(fields: Fields) -> str:
    device = fields.word("device", "none").lower()
    if device not in ("none", "cpu", "nvme"):
        raise fields.wrong("device", "none, cpu or nvme")
    fields.skip(
        "pin_memory", "buffer_count", "buffer_size", "max_in_cpu", "pipeline_read", "pipeline_write", "fast_init"
    )
    return device


def _precision(fields: Fields) -> dict[str, Any]:
    found = []
    for word in ("bf16", "fp16"):
        table = fields.table(word)
        pure = table.flag(f"{word}_master_weights_and_grads")
        table.skip(
            "loss_scale", "initial_scale_power", "loss_scale_window", "hysteresis", "min_loss_scale", "auto_cast"
        )
        table.skip("bf16_optimizer_states", "check_grad_overflow", "consecutive_hysteresis", "immediate_grad_update")
        if table.flag("enabled"):
            found.append({"precision": word, "pure": pure})
    if len(found) > 1:
        raise ExchangeError(f"{fields.file}: bf16 and fp16 are both enabled; enable one of them.")
    return found[0] if found else {}


def _batches(fields: Fields) -> tuple[int | None, int | None, int | None]:
    """Micro-batch, global batch, and the data ranks that follow where the file names all it needs."""
    micro = fields.maybe("train_micro_batch_size_per_gpu")
    total = fields.maybe("train_batch_size")
    steps = fields.maybe("gradient_accumulation_steps")
    if micro is None or total is None or steps is None:
        return micro, total, None
    size, over = divmod(total, micro * steps)
    if over or not size:
        raise ExchangeError(
            f"{fields.file}: train_batch_size is {total}, which is no multiple of train_micro_batch_size_per_gpu x "
            f"gradient_accumulation_steps = {micro * steps}; DeepSpeed refuses that."
        )
    return micro, total, size
