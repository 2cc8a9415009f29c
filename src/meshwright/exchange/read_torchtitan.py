"""Read torchtitan's TOML as a strategy, with torchtitan's defaults."""

from __future__ import annotations

from math import prod
from typing import Any

from meshwright.errors import ExchangeError
from meshwright.exchange.fields import Fields, Imported, read_axes
from meshwright.exchange.torchtitan import FLOAT8, LOCAL_BATCH, SCHEDULES
from meshwright.facts.data_axis import find_traits
from meshwright.facts.strategy import Strategy

SIGNS = ("parallelism", "activation_checkpoint", "training")
"""Tables that identify torchtitan's files."""
QUIET = (
    *("job", "profiling", "metrics", "optimizer", "lr_scheduler", "checkpoint", "comm", "memory_estimation"),
    *("fault_tolerance", "experimental", "validation", "debug"),
)
"""Tables that do not affect the strategy."""
QUIET_TRAINING = (
    *("dataset", "dataset_path", "seq_len", "steps", "gc_freq", "gc_debug", "dataloader", "mixed_precision_reduce"),
)
NEAREST = {"LoopedBFS": "interleaved"}
"""PyTorch's schedules without an equal here, and the nearest one."""
_WORDS = {name.lower(): word for word, name in SCHEDULES.items()}


def read_torchtitan(fields: Fields, *, ranks: int | None = None) -> Imported:
    """Read the strategy of a torchtitan config; `ranks` sizes the shards that the file leaves open."""
    parallelism, training = fields.table("parallelism"), fields.table("training")
    notes: list[str] = []
    axes = _axes(parallelism, ranks, notes)
    recompute = _recompute(fields.table("activation_checkpoint"), notes)
    compiled = fields.table("compile")
    compiled.skip("components", "backend")
    local = training.size("local_batch_size", LOCAL_BATCH)
    micro = parallelism.size("pipeline_parallel_microbatch_size", 1)
    strategy = Strategy(
        **axes,
        **_precision(fields, training, axes),
        recompute=recompute,  # type: ignore[arg-type]  # one of the grammar's words, or it was refused
        offload="params" if training.flag("enable_cpu_offload") else "",
        micro_batch=micro if any(term.traits.staged for term in axes["axes"]) else local,
        compile=compiled.flag("enable"),
    )
    total = training.number("global_batch_size", -1)
    norm = float(training.take("max_norm", 1.0))
    training.skip(*QUIET_TRAINING)
    fields.skip(*QUIET)
    return Imported(
        strategy=strategy,
        origin="torchtitan",
        file=str(fields.file),
        ignored=(*notes, *fields.unread()),
        global_batch=total if total > 0 else None,
        max_norm=norm if norm != float("inf") else None,
    )


def _axes(fields: Fields, ranks: int | None, notes: list[str]) -> dict[str, Any]:
    schedule = _schedule(fields, notes)
    terms = read_axes("torchtitan", fields, schedule)
    model_ranks = prod(term.size for term in terms)
    inside = prod(term.size for term in terms if term.traits.splits_batch)
    replicas, shards = fields.size("data_parallel_replicate_degree"), _shards(fields)
    if shards is not None:
        shards = _outside(fields, shards, inside)
    elif ranks is not None:
        shards = max(1, ranks // (replicas * model_ranks))
    if shards == 1 and any(term.traits.shares_gradients or term.traits.splits_batch for term in terms):
        sharded = _data(fields, replicas, 2, alone=False, notes=notes)  # FSDP shards over these axes too
        return {**sharded, "data_size": replicas, "axes": terms}
    return {**_data(fields, replicas, shards, alone=model_ranks == 1, notes=notes), "axes": terms}


def _outside(fields: Fields, shards: int, inside: int) -> int:
    """Ranks of the data term: torchtitan's degree also counts those of the axes that lie inside the data axis."""
    if shards % inside:
        name = fields.path("data_parallel_shard_degree")
        raise ExchangeError(f"{fields.file}: {name} is {shards}, which the {inside} ranks of experts do not divide.")
    return shards // inside


def _shards(fields: Fields) -> int | None:
    """The shards; None if they are what the other axes leave, which torchtitan writes as -1."""
    shards = fields.number("data_parallel_shard_degree", -1)
    if shards == 0 or shards < -1:
        raise fields.wrong("data_parallel_shard_degree", "-1, or a whole number of at least 1")
    return None if shards == -1 else shards


def _data(fields: Fields, replicas: int, shards: int | None, *, alone: bool, notes: list[str]) -> dict[str, Any]:
    lazy = fields.word("fsdp_reshard_after_forward", "default") == "never"
    if replicas > 1 and shards is None:
        raise ExchangeError(
            f"{fields.file}: data_parallel_replicate_degree is {replicas}, but the number of shards is unknown; "
            "set data_parallel_shard_degree, or give the number of ranks."
        )
    if replicas > 1 and shards == 1:
        return {"data": "ddp", "data_size": replicas}
    if replicas > 1:
        notes += ["parallelism.fsdp_reshard_after_forward (hsdp reshards)"] * lazy
        return {"data": "hsdp", "data_size": replicas * (shards or 1), "hsdp_replicas": replicas}
    if shards == 1:
        return {"data": "single"} if alone else {}
    return {"data": "fsdp", "data_size": shards, "variant": "grad-op" if lazy else ""}


def _schedule(fields: Fields, notes: list[str]) -> str:
    fields.skip("expert_tensor_parallel_degree")  # has no effect without experts
    if fields.flag("enable_async_tensor_parallel"):
        notes.append(fields.path("enable_async_tensor_parallel"))
    fields.skip("pipeline_parallel_layers_per_stage", "disable_loss_parallel", "context_parallel_rotate_method")
    fields.skip("context_parallel_load_balancer", "expert_parallel_comm_backend", "pipeline_parallel_schedule_csv")
    name = fields.word("pipeline_parallel_schedule", "1F1B")
    if name in NEAREST:
        notes.append(f"parallelism.pipeline_parallel_schedule = {name} ({NEAREST[name]} was used instead)")
        return NEAREST[name]
    if name.lower() not in _WORDS:
        raise fields.wrong("pipeline_parallel_schedule", f"one of {', '.join(SCHEDULES.values())}")
    return _WORDS[name.lower()]


def _recompute(fields: Fields, notes: list[str]) -> str:
    mode = fields.word("mode", "selective")
    if mode not in ("none", "selective", "full"):
        raise fields.wrong("mode", "none, selective or full to be read here")
    option = fields.word("selective_ac_option", "2")
    if mode == "selective" and option != "op":
        notes.append(f"activation_checkpoint.selective_ac_option = {option} (ours chooses operators, not layers)")
    fields.skip("early_stop", "preserve_rng_state", "determinism_check", "debug", "memory_budget")
    return mode


def _precision(fields: Fields, training: Fields, axes: dict[str, Any]) -> dict[str, Any]:
    model = fields.table("model")
    converters = model.take("converters", [])
    model.skip("name", "flavor", "hf_assets_path", "tokenizer_path", "print_after_conversion")
    fields.skip("quantize")
    pure = _dtype(training, "dtype", "float32")
    # Without FSDP, torchtitan skips mixed precision if there is a tensor axis or a pipeline.
    mixed = find_traits(axes.get("data")).gathers or not axes["axes"]
    small = _dtype(training, "mixed_precision_param", "bfloat16") and mixed
    word = "fp8" if FLOAT8 in converters and (small or pure) else "bf16" if small or pure else "fp32"
    return {"precision": word, "pure": pure}


def _dtype(training: Fields, name: str, default: str) -> bool:
    """Whether a setting is bfloat16, the lower of torchtitan's two dtypes."""
    word = training.word(name, default)
    if word not in ("bfloat16", "float32"):
        raise training.wrong(name, "bfloat16 or float32")
    return word == "bfloat16"
