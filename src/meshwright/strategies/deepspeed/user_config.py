"""Read a user's DeepSpeed configuration and compare it with the strategy and the job.

Sections that say how a job is trained must agree with the strategy and the job. Sections about speed or logging are
passed on. `"auto"`, as transformers writes it, leaves the choice to us. Anything else is refused, because ignoring a
section would silently change the training.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch.optim import Optimizer

from meshwright.errors import BadInput, Refused, Unreadable
from meshwright.exchange import read_deepspeed
from meshwright.exchange.fields import Fields
from meshwright.exchange.read_deepspeed import DeepSpeedConfig, Zero
from meshwright.facts.data_axis import word_of_stage
from meshwright.facts.job import Job
from meshwright.facts.strategy import Strategy
from meshwright.reading import read_json
from meshwright.strategies.deepspeed.user_optimizer import Difference, compare_optimizer

NAME = Path("The DeepSpeed configuration")
"""The name in messages, because code passes a dict instead of a file."""
TUNING = (
    "activation_checkpointing aio checkpoint comet comms_logger csv_monitor dump_state flops_profiler log_level "
    "memory_breakdown meshwright steps_per_print tensorboard wall_clock_breakdown wandb zero_allow_untested_optimizer "
    "zero_force_ds_cpu_optimizer"
)
"""Sections that change only speed or logging."""
COMPARED = (
    "bf16 communication_data_type data_types fp16 gradient_accumulation_steps gradient_clipping optimizer scheduler "
    "train_batch_size train_micro_batch_size_per_gpu zero_optimization"
)
"""Sections that say how a job is trained."""
OFFLOAD = f"device nvme_path {read_deepspeed.OFFLOAD_TUNING}"
# The trainer scales the loss, so options of the loss scale have no effect.
PRECISION = f"enabled {read_deepspeed.LOSS_SCALE}"
ZERO = (
    "allgather_bucket_size allgather_partitions contiguous_gradients ignore_unused_parameters load_from_fp32_weights "
    "memory_efficient_linear offload_optimizer offload_param overlap_comm reduce_bucket_size reduce_scatter "
    "round_robin_gradients stage stage3_gather_16bit_weights_on_model_save stage3_max_live_parameters "
    "stage3_max_reuse_distance stage3_module_granularity_threshold stage3_param_persistence_threshold "
    "stage3_prefetch_bucket_size sub_group_size use_multi_rank_bucket_allreduce"
)
READ = {
    "": f"{TUNING} {COMPARED}",
    "zero_optimization": ZERO,
    "zero_optimization.offload_optimizer": OFFLOAD,
    "zero_optimization.offload_param": OFFLOAD,
    "bf16": PRECISION,
    "fp16": PRECISION,
    "data_types": "grad_accum_dtype",
}
"""The keys that are allowed in each section."""


def read_config(path: Path) -> dict[str, Any]:
    """Read a configuration, drop `"auto"`, and refuse sections that are not understood."""
    try:
        document = read_json(path)
    except Unreadable as error:
        raise BadInput(f"--deepspeed-config {path} cannot be read: {error.why}.") from None
    if not isinstance(document, dict):
        raise BadInput(f"--deepspeed-config {path} holds no JSON object, but {type(document).__name__}.")
    return understood(document)


def understood(document: Mapping[str, Any]) -> dict[str, Any]:
    """Drop `"auto"`, and refuse keys that have no meaning here."""
    config: dict[str, Any] = _without_auto(document)
    for section, names in READ.items():
        if unknown := sorted(_section(config, section).keys() - set(names.split())):
            name = f"{section}.{unknown[0]}" if section else unknown[0]
            raise BadInput(
                f"{NAME} sets {name}, which has no term in a strategy, so this run would not be "
                f"the one that was planned or verified; remove it. Read here: {', '.join(sorted(names.split()))}."
            )
    return config


def strategy_of(config: Mapping[str, Any]) -> Strategy:
    return _strategy_of(read_deepspeed.read_config(Fields(config, NAME)))


def _strategy_of(config: DeepSpeedConfig) -> Strategy:
    offload = _offload(config.zero)
    return Strategy(
        data=word_of_stage(config.zero.stage),
        precision=config.precision,
        # DeepSpeed's default is the compute dtype; a strategy sums in fp32 unless it says otherwise.
        reduce="bf16" if config.reduces_in == "bf16" and config.precision == "bf16" else "fp32",
        offload=offload,  # type: ignore[arg-type]
        nvme=config.zero.nvme_path if offload == "nvme" else "",
        micro_batch=config.micro_batch,
        engine="deepspeed",
    )


def refuse_contradictions(config: Mapping[str, Any], strategy: Strategy, job: Job, optimizer: Optimizer) -> None:
    """Raise if the configuration contradicts a resolved strategy, the job or its optimizer."""
    said = read_deepspeed.read_config(Fields(config, NAME))
    found = [*_of_strategy(said, strategy), *_of_batch(said, strategy, job), *_of_job(said, job, optimizer)]
    if found:
        listed = "; ".join(f"{one.key} is {one.written!r}, and {one.whose}" for one in found)
        raise Refused(f"{NAME} contradicts the run: {listed}. Change one of the two sides.")


def without_job(config: Mapping[str, Any]) -> dict[str, Any]:
    """The part that goes to DeepSpeed: the job supplies the optimizer and its schedule."""
    return {key: value for key, value in config.items() if key not in ("optimizer", "scheduler")}


def _of_strategy(config: DeepSpeedConfig, strategy: Strategy) -> Iterator[Difference]:
    said = _strategy_of(config)
    if said.data != strategy.data:
        yield Difference("zero_optimization.stage", config.zero.stage, f"the strategy has {strategy.data}")
    if said.precision != strategy.precision:
        yield Difference("the precision", said.precision, f"the strategy has {strategy.precision}")
    if (said.offload, said.nvme) != (strategy.offload, strategy.nvme):
        whose = f"the strategy has offload={strategy.offload}" if strategy.offload else "the strategy offloads nothing"
        yield Difference("zero_optimization's offload", said.offload or "none", whose)
    if strategy.number_format.is_low:
        if config.accumulates_in not in ("fp32", "float32"):
            whose = f"{strategy.precision} means gradients of micro-batches that are summed in fp32"
            yield Difference("data_types.grad_accum_dtype", config.accumulates_in, whose)
        if config.reduces_in not in (None, strategy.reduce):
            whose = f"the strategy has reduce={strategy.reduce}"
            yield Difference("communication_data_type", config.reduces_in, whose)


def _of_batch(config: DeepSpeedConfig, strategy: Strategy, job: Job) -> Iterator[Difference]:
    whole, ranks = job.global_batch, strategy.data_ranks
    own = -(-whole // ranks)
    size = min(strategy.micro_batch or own, own)
    if config.global_batch not in (None, whole):
        yield Difference("train_batch_size", config.global_batch, f"the job has global_batch={whole}")
    if config.micro_batch not in (None, size):
        whose = f"the strategy gives a rank micro-batches of {size} (of {whole} samples over {ranks} ranks)"
        yield Difference("train_micro_batch_size_per_gpu", config.micro_batch, whose)
    if config.accumulation not in (None, -(-own // size)):
        whose = f"{own} samples of a rank in micro-batches of {size} are {-(-own // size)}"
        yield Difference("gradient_accumulation_steps", config.accumulation, whose)


def _of_job(config: DeepSpeedConfig, job: Job, optimizer: Optimizer) -> Iterator[Difference]:
    if config.max_norm not in (None, job.max_norm or 0.0):
        yield Difference("gradient_clipping", config.max_norm, f"the job has max_norm={job.max_norm}")
    if config.scheduler is not None:
        kind = config.scheduler.get("type")
        yield Difference("scheduler", kind, f"the job {'has its own' if job.schedule else 'has none'}: Job(schedule=)")
    if config.optimizer is not None:
        yield from compare_optimizer(config.optimizer, optimizer)


def _offload(zero: Zero) -> str:
    """The strategy's offload word for the devices of both offload sections."""
    words = {("none", "none"): "", ("cpu", "none"): "optimizer", ("cpu", "cpu"): "params", ("nvme", "nvme"): "nvme"}
    word = words.get((zero.optimizer, zero.parameters))
    if word is None:
        raise BadInput(
            f"{NAME} offloads the optimizer to {zero.optimizer} and parameters to {zero.parameters}, which no strategy "
            "term expresses; use cpu and none (offload=optimizer), cpu and cpu (params), or nvme and nvme."
        )
    if word == "nvme" and not zero.nvme_path:
        raise BadInput(f"{NAME} offloads to nvme, but sets no nvme_path.")
    return word


def _section(config: Mapping[str, Any], path: str) -> Mapping[str, Any]:
    for name in path.split(".") if path else ():
        config = config.get(name) or {}
        if not isinstance(config, Mapping):
            raise BadInput(f"{NAME}'s {path} is no section, but {config!r}.")
    return config


def _without_auto(value: Any) -> Any:
    if not isinstance(value, Mapping):
        return value
    return {key: _without_auto(item) for key, item in value.items() if item != "auto"}
