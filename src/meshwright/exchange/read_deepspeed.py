"""Read DeepSpeed's JSON as a strategy."""

from __future__ import annotations

from math import prod
from typing import Any

from meshwright.exchange.deepspeed_config import DeepSpeedConfig, Zero, read_config
from meshwright.exchange.errors import ExchangeError
from meshwright.exchange.fields import Fields
from meshwright.exchange.imported import Imported
from meshwright.facts.data_axis import word_of_stage
from meshwright.facts.strategy import Strategy

SIGNS = ("zero_optimization", "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
"""Keys that identify DeepSpeed's files."""
QUIET = (
    *("meshwright", "steps_per_print", "wall_clock_breakdown", "dump_state", "comms_logger"),
    *("zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer"),
)
"""Keys that do not affect the strategy."""


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
    strategy = Strategy(
        **zero_terms(fields, config.zero, size if ranks is None else ranks // tp, alone=tp == 1),
        precision=config.precision,
        pure=config.pure,
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
