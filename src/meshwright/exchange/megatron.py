"""Write a strategy as options of Megatron-LM's training scripts, for core 0.14: a file that a shell sources."""

from __future__ import annotations

from dataclasses import replace

from meshwright.exchange.approximate import (
    PLAIN_WORDS,
    Rule,
    approximate,
    as_data,
    axes_missing_in,
    drop,
    impure,
    offloaded,
    without_autocast,
)
from meshwright.exchange.export_request import Batches, Exported, ExportRequest, Unsupported, comments, cut, named
from meshwright.facts.strategy import Strategy

REMARK = (
    'Source this file and pass its options to a script of Megatron-LM: torchrun ... pretrain_gpt.py "${MEGATRON[@]}" '
    "and your options for model, data and optimizer. Megatron-LM trains its own models only."
)
SHARDED = {1: "optim", 2: "optim_grads", 3: "optim_grads_params"}
"""Megatron-LM's names of ZeRO's stages."""
VIRTUAL = "interleaved"
PLAIN = "1f1b"
_OPTIMIZER = "the config offloads nothing; see --optimizer-cpu-offload"


def _schedule(strategy: Strategy) -> Unsupported | None:
    """Megatron-LM has 1F1B, plain and interleaved."""
    stage = strategy.stage_axis
    if stage is None or strategy.schedule in (PLAIN, VIRTUAL):
        return None
    left = tuple(replace(term, suffix=PLAIN) if term == stage else term for term in strategy.axes)
    says = "Megatron-LM runs 1F1B, plain or interleaved; the file says plain"
    return Unsupported(term=str(stage), says=says, becomes={"axes": left})


_RULES: tuple[Rule, ...] = (
    axes_missing_in("megatron"),
    _schedule,
    drop("engine", "torch", "Megatron-LM runs on its own engine"),
    *PLAIN_WORDS,
    as_data(lambda s: s.traits.hybrid, "fsdp", "the file shards over all data ranks"),
    as_data(
        lambda s: s.traits.gathers and not s.traits.reshards,
        "zero2",
        "whole parameters between forward and backward are optim_grads",
    ),
    without_autocast(lambda s: True, "Megatron-LM casts parameters where it says bf16 or fp16"),
    impure(lambda s: True, "Megatron-LM keeps fp32 masters"),
    offloaded(lambda s: True, "", _OPTIMIZER),
    drop("compile", False, "Megatron-LM has no switch for it"),
)


def write_megatron(request: ExportRequest) -> Exported:
    """The options as an array of a shell."""
    settled, losses = approximate(request, _RULES)
    batches = cut(request, settled, alone=1)
    losses = (*losses, *named(settled, batches.micro))
    said = replace(settled, micro_batch=batches.micro)
    options = "".join(f"    {option}\n" for option in _options(request, said, batches))
    text = f"{comments(request, losses, (REMARK,))}MEGATRON=(\n{options})\n"
    return Exported(to="megatron", text=text, request=request, strategy=said, without_equal=losses)


def _options(request: ExportRequest, strategy: Strategy, batches: Batches) -> list[str]:
    sizes = strategy.config_sizes("megatron")
    return [
        *(f"--{name} {size}" for name, size in sizes.items()),
        *(["--sequence-parallel"] if sizes["tensor-model-parallel-size"] > 1 else []),
        *(["--cp-comm-type allgather"] if sizes["context-parallel-size"] > 1 else []),
        *(["--num-virtual-stages-per-pipeline-rank 2"] if strategy.schedule == VIRTUAL else []),
        *_data(strategy),
        *_precision(strategy),
        *_recompute(strategy),
        f"--micro-batch-size {batches.micro}",
        *_of_job(request, batches),
    ]


def _data(strategy: Strategy) -> list[str]:
    stage = strategy.traits.zero_stage or 0
    if stage < 2:
        return ["--use-distributed-optimizer"] * stage
    return [
        "--use-distributed-optimizer",
        "--use-megatron-fsdp",
        f"--data-parallel-sharding-strategy {SHARDED[stage]}",
        "--no-gradient-accumulation-fusion",
    ]


def _precision(strategy: Strategy) -> list[str]:
    if not strategy.number_format.is_low:
        return []
    if strategy.precision == "fp16":
        return ["--fp16", *(["--accumulate-allreduce-grads-in-fp32"] if strategy.reduce == "fp32" else [])]
    fp8 = ["--fp8-format hybrid"] if strategy.precision == "fp8" else []
    return ["--bf16", *fp8, *(["--grad-reduce-in-bf16"] if strategy.reduce == "bf16" else [])]


def _recompute(strategy: Strategy) -> list[str]:
    if strategy.recompute == "none":
        return []
    whole = ["--recompute-method uniform", "--recompute-num-layers 1"] if strategy.recompute == "full" else []
    return [f"--recompute-granularity {strategy.recompute}", *whole]


def _of_job(request: ExportRequest, batches: Batches) -> list[str]:
    """What the job says. Megatron-LM clips to 1.0 by default."""
    if request.global_batch is None:
        return []
    return [f"--global-batch-size {batches.total}", f"--clip-grad {request.max_norm or 0.0}"]
