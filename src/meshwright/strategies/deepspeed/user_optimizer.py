"""Compare the optimizer section of a DeepSpeed configuration with the optimizer that the job makes.

DeepSpeed's Adam is AdamW unless `adam_w_mode` is false, and its own Adam decays weights by nothing unless told. So
what is compared is what DeepSpeed would train with: its defaults count where the section is silent.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch.optim import Optimizer

ADAMS = ("adam", "adamw")
DEFAULTS = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
"""Of DeepSpeed's FusedAdam and DeepSpeedCPUAdam; with `torch_adam`, torch's own apply."""
MODES = frozenset({"adam_w_mode", "torch_adam", "foreach", "fused", "set_grad_none"})
"""How or in which class Adam is computed; `adam_w_mode` is compared as a whole."""
ALWAYS = {"bias_correction": True, "fp32_optimizer_states": True}
"""What torch's optimizers do without a setting."""


@dataclass(frozen=True)
class Difference:
    """A key in which the configuration contradicts the strategy or the job."""

    key: str
    written: Any
    whose: str
    """What the strategy or the job says."""


def compare_optimizer(section: Mapping[str, Any], optimizer: Optimizer) -> Iterator[Difference]:
    """Every setting in which DeepSpeed's optimizer would train differently from the job's."""
    own, params = type(optimizer).__name__, dict(section.get("params") or {})
    kind = str(section.get("type", own)).lower()
    if kind in ADAMS and own.lower() in ADAMS:
        yield from _compare_adams(kind, params, optimizer)
        return
    if kind != own.lower():
        yield Difference("optimizer.type", section["type"], f"the job makes {_article(own)} {own}")
        return
    yield from _compare_values(params, {}, optimizer)


def _compare_adams(kind: str, params: Mapping[str, Any], optimizer: Optimizer) -> Iterator[Difference]:
    """Adam and AdamW differ only if weights decay."""
    own = type(optimizer).__name__
    decouples = kind == "adamw" or bool(params.get("adam_w_mode", True))
    if decouples != (own.lower() == "adamw") and any(group.get("weight_decay") for group in optimizer.param_groups):
        theirs = "AdamW" if decouples else "Adam"
        why = " unless adam_w_mode is false" if decouples and kind == "adam" else ""
        whose = f"DeepSpeed runs it as {theirs}{why}, but the job makes {_article(own)} {own} with weight decay"
        yield Difference("optimizer.type", "AdamW" if kind == "adamw" else "Adam", whose)
    defaults = {"weight_decay": 0.01 if decouples else 0.0} if params.get("torch_adam") else {}
    yield from _compare_values(params, DEFAULTS | defaults, optimizer)


def _compare_values(
    params: Mapping[str, Any], defaults: Mapping[str, Any], optimizer: Optimizer
) -> Iterator[Difference]:
    """A setting agrees if any of the job's groups has it: groups that say otherwise do so on purpose."""
    own = type(optimizer).__name__
    for key, value in {**defaults, **params}.items():
        if key in MODES or (key in ALWAYS and value == ALWAYS[key]):
            continue
        if key not in optimizer.defaults:
            yield Difference(f"optimizer.params.{key}", value, f"the job's {own} has no such setting")
            continue
        found = [_initial(group, key) for group in optimizer.param_groups]
        if not any(_alike(value, one) for one in found):
            shown = f"the job's {own} has {found[0]!r}"
            if key not in params:
                shown += "; the section does not set it, so this is DeepSpeed's default"
            yield Difference(f"optimizer.params.{key}", value, shown)


def _initial(group: Mapping[str, Any], key: str) -> Any:
    """A group's setting before a schedule changed it."""
    return group.get("initial_lr", group["lr"]) if key == "lr" else group.get(key)


def _alike(written: Any, own: Any) -> bool:
    return bool(tuple(written) == tuple(own) if isinstance(written, list | tuple) else written == own)


def _article(name: str) -> str:
    return "an" if name[:1] in "AEIOU" else "a"
