"""The roles of layers under tensor parallelism that are given: by the job's hint, or by the model's own plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase

from torch import nn

from meshwright.errors import JobError
from meshwright.facts.job import Job
from meshwright.facts.tensor_plan import ROLES

# Hugging Face's words for the roles. Its other words (experts, packed layers) are ignored.
_WORDS = {
    **{role: role for role in ROLES},
    **dict.fromkeys(("colwise", "colwise_rep", "colwise_gather_output"), "column"),
    **dict.fromkeys(("rowwise", "rowwise_rep", "rowwise_split_input"), "row"),
    **dict.fromkeys(("replicate", "replicated"), "whole"),
    "embedding_rowwise": "vocabulary",
}


def from_job(job: Job, layers: Mapping[str, nn.Module]) -> dict[str, tuple[str, str]]:
    """The job's hint: role and source by layer. Every name in it must match a layer."""
    given: dict[str, tuple[str, str]] = {}
    for pattern, word in (job.tensor_plan or {}).items():
        if word not in _WORDS:
            raise JobError(f"Job(tensor_plan=...) gives {pattern!r} the role {word!r}; use {', '.join(ROLES)}.")
        names = [name for name in layers if fnmatchcase(name, pattern)]
        if not names:
            known = ", ".join(list(layers)[:6])
            raise JobError(
                f"Job(tensor_plan=...) names {pattern!r}, but no linear layer or embedding has that name; "
                f"the model has {known}, ..."
            )
        given |= {name: (_role(_WORDS[word], layers[name]), "job") for name in names}
    return given


def from_model(model: nn.Module, layers: Mapping[str, nn.Module]) -> dict[str, tuple[str, str]]:
    """The plan of a Hugging Face model, which maps patterns to words: role and source by layer."""
    given = {}
    for prefix, plan in _plans(model):
        for pattern, word in plan.items():
            full = f"{prefix}.{pattern}" if prefix else pattern
            for name in layers:
                if word in _WORDS and fnmatchcase(name, full):
                    given[name] = (_role(_WORDS[word], layers[name]), "model")
    return given


def _plans(model: nn.Module) -> Iterator[tuple[str, dict[str, str]]]:
    for name, module in model.named_modules():
        plans = getattr(getattr(module, "config", None), "base_model_tp_plan", None), getattr(module, "_tp_plan", None)
        for plan in (plan for plan in plans if isinstance(plan, dict)):
            yield name, {str(key): value for key, value in plan.items() if isinstance(value, str)}


def _role(role: str, module: nn.Module) -> str:
    return "vocabulary" if isinstance(module, nn.Embedding) and role != "whole" else role
