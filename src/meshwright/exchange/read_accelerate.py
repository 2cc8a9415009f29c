"""Read the YAML of `accelerate config` as a strategy."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

from meshwright.errors import ExchangeError, Unreadable
from meshwright.exchange.fields import Fields, Imported, axis_fields, read_axes
from meshwright.exchange.read_deepspeed import Zero, read_deepspeed, reduce_term, zero_terms
from meshwright.facts.model_axis import AxisTerm
from meshwright.facts.strategy import Strategy
from meshwright.reading import read_json

SIGNS = ("distributed_type", "compute_environment")
"""Keys that identify Accelerate's files."""
QUIET = (
    *("compute_environment", "debug", "downcast_bf16", "enable_cpu_affinity", "gpu_ids", "machine_rank"),
    *("main_process_ip", "main_process_port", "main_training_function", "rdzv_backend", "same_network", "use_cpu"),
    *("tpu_env", "tpu_use_cluster", "tpu_use_sudo", "fp8_config", "num_machines", "mpirun_config"),
)
"""Keys that do not affect the strategy."""
QUIET_FSDP = (
    *("fsdp_auto_wrap_policy", "fsdp_transformer_layer_cls_to_wrap", "fsdp_min_num_params", "fsdp_state_dict_type"),
    *("fsdp_cpu_ram_efficient_loading", "fsdp_sync_module_states", "fsdp_use_orig_params", "fsdp_backward_prefetch"),
    *("fsdp_forward_prefetch", "fsdp_sharding_strategy", "fsdp_reshard_after_forward"),
)
SHARDING = {"1": "FULL_SHARD", "2": "SHARD_GRAD_OP", "3": "NO_SHARD", "4": "HYBRID_SHARD", "5": "HYBRID_SHARD_ZERO2"}
"""FSDP1's numbers."""


def read_accelerate(fields: Fields, *, ranks: int | None = None) -> Imported:
    """Read the strategy of an Accelerate config, including the DeepSpeed file that it may name.

    `ranks` is used if the file leaves the number to `accelerate launch`.
    """
    kind = fields.word("distributed_type", "NO").upper()
    if kind == "NO" or fields.number("num_processes", -1) != -1:  # as SLURM's users write it
        ranks = fields.size("num_processes", 1)
    if kind == "DEEPSPEED":
        return _deepspeed(fields, ranks)
    if kind not in ("NO", "FSDP") and not kind.startswith("MULTI_"):
        raise fields.wrong("distributed_type", "NO, MULTI_GPU, MULTI_CPU, FSDP or DEEPSPEED to be read here")
    axes, notes = _axes(fields, kind, ranks)
    precision = _precision(fields)
    reduced = _reduced(axes, precision) if kind == "FSDP" else {}
    strategy = Strategy(**axes, **precision, **reduced, compile=_compiled(fields))
    return _imported(fields, strategy, notes=notes)


def _imported(fields: Fields, strategy: Strategy, *, notes: tuple[str, ...] = (), **rest: Any) -> Imported:
    fields.skip(*QUIET)
    ignored = (*notes, *fields.unread(), *rest.pop("ignored", ()))
    return Imported(strategy=strategy, origin="accelerate", file=str(fields.file), ignored=ignored, **rest)


def _axes(fields: Fields, kind: str, ranks: int | None) -> tuple[dict[str, Any], tuple[str, ...]]:
    sizes = fields.table("parallelism_config")
    replicas, shards = (sizes.size(f"parallelism_config_{name}_size") for name in ("dp_replicate", "dp_shard"))
    axes = read_axes("accelerate", sizes)
    tp = prod(term.size for term in axes)
    _refuse_others(sizes)
    if "parallelism_config_dp_shard_size" in sizes or tp > 1 or replicas > 1:
        ranks = ranks or replicas * shards * tp
        _check_sizes(fields, kind, replicas * shards * tp, ranks)
    if kind == "FSDP":
        version = fields.table("fsdp_config").number("fsdp_version", 1)
        if version == 1 and replicas * shards * tp > 1:
            raise ExchangeError(f"{fields.file}: parallelism_config needs fsdp_version: 2, but it is 1.")
        return _fsdp(fields, ranks, replicas, axes, version)
    if tp > 1 and ranks != tp:
        raise ExchangeError(f"{fields.file}: Accelerate refuses replicas beside tp_size {tp}; the type has to be FSDP.")
    if tp > 1:
        return {"axes": axes}, ()
    return ({"data": "single"} if kind == "NO" or ranks == 1 else {"data": "ddp", "data_size": ranks}), ()


def _refuse_others(sizes: Fields) -> None:
    """Refuse axes that take ranks and have no equivalent term."""
    field = "parallelism_config_sp_size"
    if sizes.size(field) > 1:
        raise ExchangeError(f"{sizes.file}: {sizes.path(field)} has no equal here; set it to 1 to read the rest.")
    sizes.skip("parallelism_config_sp_backend", "parallelism_config_cp_backend", "parallelism_config_cp_comm_strategy")


def _check_sizes(fields: Fields, kind: str, product: int, ranks: int) -> None:
    if product != ranks:
        raise ExchangeError(
            f"{fields.file}: the sizes of parallelism_config multiply to {product}, but num_processes is {ranks}; "
            "Accelerate refuses that."
        )
    if kind == "NO":
        raise ExchangeError(f"{fields.file}: distributed_type NO excludes parallelism_config; set it to FSDP.")


def _fsdp(
    fields: Fields, ranks: int | None, replicas: int, axes: tuple[AxisTerm, ...], version: int
) -> tuple[dict[str, Any], tuple[str, ...]]:
    fsdp = fields.table("fsdp_config")
    fsdp.skip("fsdp_version", *QUIET_FSDP)
    tp = prod(term.size for term in axes)
    word = _sharding(fsdp, version)
    shared: dict[str, Any] = {
        "axes": axes,
        "offload": "params" if fsdp.flag("fsdp_offload_params") else "",
        "recompute": "full" if fsdp.flag("fsdp_activation_checkpointing") else "none",
    }
    if word.startswith("HYBRID") and replicas == 1:
        replicas = fields.size("num_machines")
    if ranks is None and replicas > 1:
        raise ExchangeError(f"{fields.file}: {word} needs the number of ranks; name num_processes.")
    if tp > 1 and ranks == tp and not any(term.traits.shares_gradients for term in axes):
        raise ExchangeError(
            f"{fields.file}: FSDP has no rank to shard over beside tp_size {tp}; Accelerate refuses that."
        )
    data = None if ranks is None else ranks // tp
    if replicas > 1:
        notes = (f"{fsdp.path('fsdp_reshard_after_forward')} (hsdp reshards)",) if word in _LAZY else ()
        return {"data": "hsdp", "data_size": data, "hsdp_replicas": replicas, **shared}, notes
    variant = {"SHARD_GRAD_OP": "grad-op", "NO_SHARD": "no-shard"}.get(word, "")
    return {"data": "fsdp", "data_size": data, "variant": variant, **shared}, ()


_LAZY = ("SHARD_GRAD_OP", "HYBRID_SHARD_ZERO2")


def _sharding(fsdp: Fields, version: int) -> str:
    """FSDP1's word for what is sharded; FSDP2's boolean is translated."""
    if version == 2:
        return "FULL_SHARD" if fsdp.flag("fsdp_reshard_after_forward", True) else "SHARD_GRAD_OP"
    named = fsdp.word("fsdp_sharding_strategy", "") or fsdp.word("fsdp_reshard_after_forward", "FULL_SHARD")
    word = SHARDING.get(named, named.upper())
    if word not in SHARDING.values():
        raise fsdp.wrong("fsdp_sharding_strategy", f"one of {', '.join(SHARDING.values())}")
    return word


def _precision(fields: Fields) -> dict[str, Any]:
    word = fields.word("mixed_precision", "no").lower()
    if word not in ("no", "fp32", "bf16", "fp16", "fp8"):
        raise fields.wrong("mixed_precision", "no, bf16, fp16 or fp8")
    return {} if word in ("no", "fp32") else {"precision": word}


def _reduced(data: dict[str, Any], precision: dict[str, Any]) -> dict[str, Any]:
    """Accelerate's FSDP and DeepSpeed sum gradients over ranks in the dtype that they compute in."""
    word = precision.get("precision", "fp32")
    return reduce_term(data, word, word)


def _compiled(fields: Fields) -> bool:
    dynamo = fields.table("dynamo_config")
    dynamo.skip("dynamo_mode", "dynamo_use_dynamic", "dynamo_use_fullgraph", "dynamo_use_regional_compilation")
    return dynamo.word("dynamo_backend", "NO").upper() != "NO"


def _deepspeed(fields: Fields, ranks: int | None) -> Imported:
    plugin = fields.table("deepspeed_config")
    plugin.skip("deepspeed_multinode_launcher", "deepspeed_moe_layer_cls_names", "zero3_init_flag")
    plugin.skip("zero3_save_16bit_model")
    _refuse_tensor_axis(fields)
    named = plugin.take("deepspeed_config_file")
    if named:
        return _with_file(fields, Path(str(named)), ranks)
    plugin.skip("gradient_accumulation_steps")  # says nothing without the micro-batch, which the script sets
    norm = plugin.take("gradient_clipping")
    terms, precision = zero_terms(plugin, _zero(plugin), ranks), _precision(fields)
    strategy = Strategy(
        **terms,
        **precision,
        **_reduced(terms, precision),
        compile=_compiled(fields),
        engine="deepspeed",
    )
    return _imported(fields, strategy, max_norm=float(norm) if norm and float(norm) > 0 else None)


def _refuse_tensor_axis(fields: Fields) -> None:
    sizes = fields.table("parallelism_config")
    others = [f"parallelism_config_{name}_size" for name in ("dp_replicate", "dp_shard", "sp")]
    for field in (*others, *axis_fields("accelerate")):
        if sizes.size(field) > 1:
            raise ExchangeError(
                f"{fields.file}: {sizes.path(field)} and distributed_type DEEPSPEED exclude each other here: DeepSpeed "
                "shards over all ranks; set the size to 1, or the type to FSDP."
            )


def _zero(plugin: Fields) -> Zero:
    stage = plugin.number("zero_stage", 2)  # Accelerate's default
    if stage not in (0, 1, 2, 3):
        raise plugin.wrong("zero_stage", "0, 1, 2 or 3")
    devices = [plugin.word(f"offload_{what}_device", "none").lower() for what in ("optimizer", "param")]
    folders = [plugin.word(f"offload_{what}_nvme_path", "") for what in ("optimizer", "param")]
    return Zero(stage=stage, optimizer=devices[0], parameters=devices[1], nvme_path=folders[0] or folders[1])


def _with_file(fields: Fields, named: Path, ranks: int | None) -> Imported:
    """Read the DeepSpeed file. Accelerate then allows none of the plugin's fields but the precision."""
    beside = fields.file.parent / named
    path = beside if beside.exists() else named  # Accelerate looks in the working folder
    try:
        values = read_json(path)
    except Unreadable as error:
        why = f"its deepspeed_config_file {str(named)!r} cannot be read: {error.why}"
        raise ExchangeError(f"{fields.file}: {why}.") from None
    if not isinstance(values, dict):
        raise ExchangeError(f"{fields.file}: its deepspeed_config_file {str(named)!r} is not a table of settings.")
    found = read_deepspeed(Fields(values, path), ranks=ranks)
    left_open = {} if found.strategy.number_format.is_low else _precision(fields)
    left_open |= _reduced(vars(found.strategy), left_open) if left_open else {}
    strategy = replace(found.strategy, **left_open, compile=_compiled(fields))
    return _imported(fields, strategy, ignored=found.ignored, global_batch=found.global_batch, max_norm=found.max_norm)
