"""Write a strategy as the YAML of `accelerate launch --config_file`, for Accelerate 1.15."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import yaml

from meshwright.exchange.approximate import (
    PLAIN_WORDS,
    Rule,
    approximate,
    as_data,
    axes_missing_in,
    drop,
    drop_axes,
    impure,
    offloaded,
    one_rank,
    replicates,
    without_autocast,
    zero_alone,
)
from meshwright.exchange.deepspeed import ZERO, zero_section
from meshwright.exchange.export_request import Exported, ExportRequest, Unsupported, comments, cut
from meshwright.facts.grammar import show_data
from meshwright.facts.strategy import Strategy

WRAP = (
    "Each block is gathered separately if the model declares its blocks in _no_split_modules, as transformers' do; "
    "otherwise name their class in fsdp_transformer_layer_cls_to_wrap."
)
SEVERAL = "Several machines: pass --machine_rank, --main_process_ip and --main_process_port to each accelerate launch."
ON_CPU = (
    "Call Accelerator(cpu=True): without it each rank trains alone. The type is MULTI_GPU because MULTI_CPU starts a "
    "single process if there is no mpirun."
)
TENSOR = "The tensor axis divides models of transformers that were loaded with a tp_plan."


def _reduced_as_computed(strategy: Strategy) -> Unsupported | None:
    """FSDP and DeepSpeed sum gradients in the dtype of mixed_precision there, and DDP in that of the parameters."""
    sharded = strategy.traits.gathers or strategy.engine == "deepspeed"
    sums = strategy.traits.sized and strategy.data_size != 1
    there = "bf16" if sharded and sums and strategy.precision == "bf16" else "fp32"
    if strategy.reduce == there:
        return None
    says = "Accelerate sums gradients of FSDP and DeepSpeed in the dtype of mixed_precision"
    if not sharded:
        says = "the config has no word for it; pass DistributedDataParallelKwargs(comm_hook=...) in the script"
    return Unsupported(term=f"reduce={strategy.reduce}", says=says, becomes={"reduce": there})


_OPEN: tuple[Rule, ...] = (
    without_autocast(
        lambda s: not s.traits.gathers and s.engine == "torch",
        "Accelerate's word for it is mixed_precision alone: without FSDP it runs that by autocast",
    ),
    without_autocast(lambda s: True, "FSDP and DeepSpeed also cast parameters under Accelerate's mixed_precision"),
    impure(lambda s: True, "Accelerate keeps fp32 masters; load the model in that dtype, with mixed_precision no"),
    _reduced_as_computed,
    drop("micro_batch", None, "the batch size is the DataLoader's, in the script", head="mb"),
)
_TORCH: tuple[Rule, ...] = (
    axes_missing_in("accelerate"),
    *PLAIN_WORDS,
    as_data(lambda s: replicates(s) and bool(s.axes), "fsdp", "Accelerate refuses replicas beside a tensor axis"),
    as_data(lambda s: one_rank(s) and bool(s.axes), None, "there is one data rank, and none to shard over"),
    as_data(lambda s: not s.traits.hybrid and one_rank(s), "single", "there is one rank"),
    offloaded(lambda s: not s.traits.gathers, "", "Accelerate offloads with FSDP or DeepSpeed only"),
    offloaded(lambda s: True, "params", "FSDP takes parameters, gradients and optimizer to the host, or nothing"),
    *_OPEN,
)
_ON_CPU: tuple[Rule, ...] = (
    axes_missing_in("accelerate"),
    drop_axes("Accelerate has no tensor axis on CPU ranks"),
    as_data(lambda s: s.traits.gathers, "ddp", "on CPU ranks Accelerate runs DDP where FSDP is asked for"),
)
_DEEPSPEED: tuple[Rule, ...] = (
    axes_missing_in("accelerate"),
    drop_axes("Accelerate's tensor axis does not go with DeepSpeed"),
    *ZERO,
    offloaded(lambda s: s.offload == "nvme", "params", "accelerate launch hands no folder on; they go to the host"),
    drop("recompute", "none", "DeepSpeed has no switch for it; the model's own checkpointing is called", head="ac"),
    *_OPEN,
)


def write_accelerate(request: ExportRequest) -> Exported:
    """FSDP2 or DDP; the DeepSpeed plugin for engine=deepspeed, or if only DeepSpeed has the strategy."""
    needs_deepspeed = request.strategy.engine == "deepspeed" or zero_alone(request.strategy)
    settled, losses, config = _deepspeed(request) if needs_deepspeed else _torch(request)
    text = comments(request, losses, _remarks(request, config)) + yaml.safe_dump(config, sort_keys=False)
    return Exported(to="accelerate", text=text, request=request, strategy=settled, without_equal=losses)


Written = tuple[Strategy, tuple[Unsupported, ...], dict[str, Any]]


def _torch(request: ExportRequest) -> Written:
    on_cpu = _ON_CPU if request.device == "cpu" else ()
    settled, losses = approximate(request, (*on_cpu, *_TORCH, _recompute))
    if settled.traits.gathers:
        config = _base(request, settled, "FSDP") | {"fsdp_config": _fsdp(settled)}
    else:
        config = _base(request, settled, "NO" if settled.traits.alone else "MULTI_GPU")
    if settled.axes or settled.traits.hybrid:
        config["parallelism_config"] = {
            "parallelism_config_dp_replicate_size": settled.replicas,
            "parallelism_config_dp_shard_size": settled.shards,
            **settled.config_sizes("accelerate"),
        }
    return settled, losses, config


def _deepspeed(request: ExportRequest) -> Written:
    settled, losses = approximate(request, (_handed_over, *_DEEPSPEED))
    steps = cut(request, replace(settled, micro_batch=request.strategy.micro_batch), alone=1).steps
    zero = zero_section(settled)
    section: dict[str, Any] = {
        "gradient_accumulation_steps": steps,
        "gradient_clipping": request.max_norm or 0.0,
        "offload_optimizer_device": zero.get("offload_optimizer", {}).get("device", "none"),
        "offload_param_device": zero.get("offload_param", {}).get("device", "none"),
        "zero3_init_flag": zero["stage"] == 3,
        "zero3_save_16bit_model": zero["stage"] == 3,
        "zero_stage": zero["stage"],
    }
    return settled, losses, _base(request, settled, "DEEPSPEED") | {"deepspeed_config": section}


def _handed_over(strategy: Strategy) -> Unsupported | None:
    """Hand ZeRO-1 and ZeRO-2 of the torch engine over to DeepSpeed."""
    if strategy.engine == "deepspeed":
        return None
    says = "Accelerate has it through DeepSpeed only, which then runs it"
    return Unsupported(term=show_data(strategy), says=says, becomes={"engine": "deepspeed"})


def _recompute(strategy: Strategy) -> Unsupported | None:
    """FSDP's plugin recomputes whole blocks; the others have no switch."""
    if strategy.recompute == "none" or (strategy.recompute == "full" and strategy.traits.gathers):
        return None
    sharded = strategy.traits.gathers
    says = "FSDP's plugin recomputes whole blocks" if sharded else "only FSDP's plugin has a switch for it"
    becomes = {"recompute": "full" if sharded else "none"}
    return Unsupported(term=f"ac={strategy.recompute}", says=says, becomes=becomes)


def _base(request: ExportRequest, strategy: Strategy, kind: str) -> dict[str, Any]:
    config: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "debug": False,
        "distributed_type": kind,
        "machine_rank": 0,
        "main_training_function": "main",
        "mixed_precision": strategy.precision if strategy.number_format.is_low else "no",
        "num_machines": request.nodes,
        "num_processes": request.ranks,
        "rdzv_backend": "static",
        "same_network": True,
        "use_cpu": request.device == "cpu",
    }
    if strategy.precision == "fp8":
        config["fp8_config"] = {"backend": "AO"}
    if strategy.compile:
        config["dynamo_config"] = {"dynamo_backend": "INDUCTOR"}
    return config


def _fsdp(strategy: Strategy) -> dict[str, Any]:
    return {
        "fsdp_version": 2,
        "fsdp_activation_checkpointing": strategy.recompute == "full",
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_cpu_ram_efficient_loading": True,
        "fsdp_offload_params": strategy.offload == "params",
        "fsdp_reshard_after_forward": strategy.traits.reshards,
        "fsdp_state_dict_type": "SHARDED_STATE_DICT",
    }


def _remarks(request: ExportRequest, config: dict[str, Any]) -> list[str]:
    """Remarks for the user of the file."""
    remarks = {
        WRAP: "fsdp_config" in config,
        TENSOR: config.get("parallelism_config", {}).get("parallelism_config_tp_size", 1) > 1,
        SEVERAL: request.nodes > 1,
        ON_CPU: config["use_cpu"] and request.ranks > 1,
    }
    return [remark for remark, holds in remarks.items() if holds]
