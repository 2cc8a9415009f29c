"""A DeepSpeed configuration that somebody has already: read, understood, and held against the strategy and the job.

Sections that say how a job is trained must say what the strategy and the job do. Those that say how fast, or what is
written down, are passed on. `"auto"`, as transformers writes it, leaves the choice to us. Anything else is refused:
a section that nobody reads would be a training that nobody asked for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.optim import Optimizer

from meshwright.errors import BadInput, Refused, Unreadable
from meshwright.facts.data_axis import word_of_stage
from meshwright.facts.job import Job
from meshwright.facts.strategy import Strategy
from meshwright.reading import read_json, shown

TUNING = (
    "activation_checkpointing aio checkpoint comet comms_logger csv_monitor dump_state flops_profiler log_level "
    "memory_breakdown meshwright steps_per_print tensorboard wall_clock_breakdown wandb zero_allow_untested_optimizer "
    "zero_force_ds_cpu_optimizer"
)
"""Sections that change how fast it goes, or what is told of it."""
COMPARED = (
    "bf16 communication_data_type data_types fp16 gradient_accumulation_steps gradient_clipping optimizer scheduler "
    "train_batch_size train_micro_batch_size_per_gpu zero_optimization"
)
"""Those that say how a job is trained."""
OFFLOAD = "device nvme_path pin_memory buffer_count buffer_size max_in_cpu fast_init pipeline_read pipeline_write"
# The loss scale is ours, so what is written of it counts for nothing and harms nothing.
PRECISION = (
    "enabled auto_cast loss_scale loss_scale_window initial_scale_power hysteresis min_loss_scale "
    "consecutive_hysteresis"
)
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
"""By section: what may be written in it."""


def read_config(path: Path) -> dict[str, Any]:
    """The configuration without what is `"auto"`; refused where a section is not understood."""
    try:
        document = read_json(path)
    except Unreadable as error:
        raise BadInput(f"--deepspeed-config {path} cannot be read: {error.why}.") from None
    if not isinstance(document, dict):
        raise BadInput(f"--deepspeed-config {path} holds no JSON object, but {type(document).__name__}.")
    return understood(document)


def understood(document: Mapping[str, Any]) -> dict[str, Any]:
    """The same without what is left to us; an error names what nobody here reads."""
    config: dict[str, Any] = _without_auto(document)
    for section, names in READ.items():
        if strange := sorted(_section(config, section).keys() - set(names.split())):
            name = f"{section}.{strange[0]}" if section else strange[0]
            raise BadInput(
                f"The DeepSpeed configuration sets {name}, which has no term in a strategy, so this run would not be "
                f"the one that was planned or verified; remove it. Read here: {', '.join(sorted(names.split()))}."
            )
    return config


def strategy_of(config: Mapping[str, Any]) -> Strategy:
    """What a configuration says of the strategy; what it leaves open is open."""
    zero, offload = _section(config, "zero_optimization"), _offload(config)
    stage = zero.get("stage", 0)
    if type(stage) is not int or stage not in range(4):
        raise BadInput(
            f"The DeepSpeed configuration has zero_optimization.stage {shown(stage)}; it must be 0, 1, 2 or 3."
        )
    return Strategy(
        data=word_of_stage(stage),
        precision=_precision(config),
        offload=offload,  # type: ignore[arg-type]
        nvme=_nvme_path(config) if offload == "nvme" else "",
        micro_batch=config.get("train_micro_batch_size_per_gpu"),
        engine="deepspeed",
    )


@dataclass(frozen=True)
class Difference:
    """One thing that the configuration says, and the strategy or the job does not."""

    key: str
    written: Any
    whose: str
    """Who says otherwise, and what."""


def refuse_contradictions(config: Mapping[str, Any], strategy: Strategy, job: Job, optimizer: Optimizer) -> None:
    """Raises what differs, naming both sides. `strategy` is resolved, `optimizer` what the job makes."""
    found = [*_of_strategy(config, strategy), *_of_batch(config, strategy, job), *_of_job(config, job, optimizer)]
    if found:
        said = "; ".join(f"{one.key} is {one.written!r}, and {one.whose}" for one in found)
        raise Refused(f"The DeepSpeed configuration contradicts the run: {said}. Change one of the two sides.")


def without_job(config: Mapping[str, Any]) -> dict[str, Any]:
    """What is handed on to DeepSpeed: the optimizer and its schedule are the job's own."""
    return {key: value for key, value in config.items() if key not in ("optimizer", "scheduler")}


def _of_strategy(config: Mapping[str, Any], strategy: Strategy) -> Iterator[Difference]:
    said = strategy_of(config)
    if said.data != strategy.data:
        stage = _section(config, "zero_optimization").get("stage", 0)
        yield Difference("zero_optimization.stage", stage, f"the strategy has {strategy.data}")
    if said.precision != strategy.precision:
        yield Difference("the precision", said.precision, f"the strategy has {strategy.precision}")
    if (said.offload, said.nvme) != (strategy.offload, strategy.nvme):
        whose = f"the strategy has offload={strategy.offload}" if strategy.offload else "the strategy offloads nothing"
        yield Difference("zero_optimization's offload", said.offload or "none", whose)
    if strategy.number_format.is_low:
        for key in ("data_types.grad_accum_dtype", "communication_data_type"):
            *section, name = key.split(".")
            dtype = _section(config, ".".join(section)).get(name, "fp32")
            if dtype not in ("fp32", "float32"):
                yield Difference(key, dtype, f"{strategy.precision} means gradients that are summed in fp32")


def _of_batch(config: Mapping[str, Any], strategy: Strategy, job: Job) -> Iterator[Difference]:
    whole, ranks = job.global_batch, strategy.data_ranks
    own = -(-whole // ranks)
    size = min(strategy.micro_batch or own, own)
    if config.get("train_batch_size", whole) != whole:
        yield Difference("train_batch_size", config["train_batch_size"], f"the job has global_batch={whole}")
    if config.get("train_micro_batch_size_per_gpu", size) != size:
        whose = f"the strategy gives a rank micro-batches of {size} (of {whole} samples over {ranks} ranks)"
        yield Difference("train_micro_batch_size_per_gpu", config["train_micro_batch_size_per_gpu"], whose)
    if config.get("gradient_accumulation_steps", -(-own // size)) != -(-own // size):
        whose = f"{own} samples of a rank in micro-batches of {size} are {-(-own // size)}"
        yield Difference("gradient_accumulation_steps", config["gradient_accumulation_steps"], whose)


def _of_job(config: Mapping[str, Any], job: Job, optimizer: Optimizer) -> Iterator[Difference]:
    clips = config.get("gradient_clipping", job.max_norm or 0.0)
    if clips != (job.max_norm or 0.0):
        yield Difference("gradient_clipping", clips, f"the job has max_norm={job.max_norm}")
    if "scheduler" in config:
        kind = config["scheduler"].get("type")
        yield Difference("scheduler", kind, f"the job {'has its own' if job.schedule else 'has none'}: Job(schedule=)")
    section = config.get("optimizer")
    if section is None:
        return
    own, params = type(optimizer).__name__, section.get("params", {})
    kind = str(section.get("type", own)).lower()
    if kind == "adam" and params.get("adam_w_mode", True):  # DeepSpeed's Adam decays as AdamW does unless told not to
        kind = "adamw"
    if kind != own.lower():
        yield Difference("optimizer.type", section["type"], f"the job makes a {own}")
        return
    for key, value in params.items():
        if key in optimizer.defaults and not _alike(value, optimizer.defaults[key]):
            yield Difference(f"optimizer.params.{key}", value, f"the job's {own} has {optimizer.defaults[key]!r}")


def _alike(written: Any, own: Any) -> bool:
    return bool(tuple(written) == tuple(own) if isinstance(written, list) else written == own)


def _precision(config: Mapping[str, Any]) -> str:
    on = [name for name in ("bf16", "fp16") if _section(config, name).get("enabled", False)]
    if len(on) == 2:
        raise BadInput("The DeepSpeed configuration enables bf16 and fp16; enable one of them.")
    return on[0] if on else "fp32"


def _nvme_path(config: Mapping[str, Any]) -> str:
    path = _section(config, "zero_optimization.offload_optimizer").get("nvme_path")
    if not isinstance(path, str):
        raise BadInput("The DeepSpeed configuration offloads to nvme, and its offload_optimizer names no nvme_path.")
    return path


def _offload(config: Mapping[str, Any]) -> str:
    """The word of the strategy for the devices of both offload sections."""
    kinds = ("offload_optimizer", "offload_param")
    found = (_section(config, f"zero_optimization.{kind}").get("device", "none") for kind in kinds)
    optimizer, params = (device if isinstance(device, str) else shown(device) for device in found)
    words = {("none", "none"): "", ("cpu", "none"): "optimizer", ("cpu", "cpu"): "params", ("nvme", "nvme"): "nvme"}
    if (optimizer, params) not in words:
        raise BadInput(
            f"The DeepSpeed configuration offloads the optimizer to {optimizer} and parameters to {params}, for which "
            "there is no term; use cpu and none (offload=optimizer), cpu and cpu (params), or nvme and nvme."
        )
    return words[optimizer, params]


def _section(config: Mapping[str, Any], path: str) -> Mapping[str, Any]:
    for name in path.split(".") if path else ():
        config = config.get(name) or {}
        if not isinstance(config, Mapping):
            raise BadInput(f"The DeepSpeed configuration's {path} is no section, but {config!r}.")
    return config


def _without_auto(value: Any) -> Any:
    if not isinstance(value, Mapping):
        return value
    return {key: _without_auto(item) for key, item in value.items() if item != "auto"}
