"""The strategy that corresponds to what a script does."""

from __future__ import annotations

import ast
import re

from meshwright.adopt.kind import Kind
from meshwright.adopt.script import Script, keyword


def strategy_of(script: Script, kind: Kind) -> tuple[str, list[str]]:
    """A strategy's text, and what it leaves open."""
    notes: list[str] = []
    terms = [_data(script, kind, notes)]
    terms += filter(None, [_precision(script), _compile(script), _recompute(script), _offload(script)])
    if "tp" in kind.libraries:
        notes.append(
            "The script shards layers by hand; tp=N shards them from the plain model, which the job must build."
        )
        terms.append("tp=2")
    return ",".join(terms), notes


def _data(script: Script, kind: Kind, notes: list[str]) -> str:
    if kind.libraries & {"fsdp", "fsdp2"}:
        return _sharding(script)
    if "deepspeed" in kind.libraries:
        stage = re.search(r"""["']stage["']\s*:\s*([0-3])""", script.text)
        if stage is None:
            notes.append(
                "DeepSpeed's stage is in a config file; train --deepspeed-config FILE.json takes that as it is."
            )
        return {"0": "ddp", "1": "zero1", "2": "zero2", "3": "zero3"}[stage[1]] if stage else "zero2"
    if "zero1" in kind.libraries:
        return "zero1"
    for name in ("accelerate", "fabric"):
        if name in kind.libraries:
            return _of_library(script, name, notes)
    return "ddp"


def _sharding(script: Script) -> str:
    for word, term in (("SHARD_GRAD_OP", "fsdp:grad-op"), ("NO_SHARD", "fsdp:no-shard")):
        if f"ShardingStrategy.{word}" in script.text:
            return term
    again = [keyword(call, "reshard_after_forward") for call in script.calls_of("fully_shard")]
    return "fsdp:grad-op" if any(isinstance(one, ast.Constant) and one.value is False for one in again) else "fsdp"


def _of_library(script: Script, name: str, notes: list[str]) -> str:
    for call in script.calls_of("Fabric"):
        given = keyword(call, "strategy")
        if isinstance(given, ast.Constant) and isinstance(given.value, str):
            return {"fsdp": "fsdp", "deepspeed": "zero2", "deepspeed_stage_3": "zero3"}.get(given.value, "ddp")
    if name == "accelerate":
        notes.append("Accelerate's config decides the strategy; plan --against CONFIG.yaml reads it.")
    return "ddp"


def _precision(script: Script) -> str:
    if "GradScaler(" in script.text and "enabled=" not in script.text:
        return "fp16"
    for call in script.calls_of("autocast", "Accelerator", "Fabric", "MixedPrecision", "MixedPrecisionPolicy"):
        text = ast.unparse(call)
        if "bf16" in text or "bfloat16" in text:
            return "bf16"
        if "fp16" in text or "float16" in text or "16-mixed" in text:
            return "fp16"
    return ""


def _compile(script: Script) -> str:
    return "compile" if any(script.dotted(call.func) == "torch.compile" for call in script.calls) else ""


def _recompute(script: Script) -> str:
    words = ("apply_activation_checkpointing", "checkpoint_wrapper", "gradient_checkpointing_enable")
    return "ac=full" if script.calls_of(*words) or script.methods(*words) else ""


def _offload(script: Script) -> str:
    return "offload=params" if script.calls_of("CPUOffload", "CPUOffloadPolicy") else ""
