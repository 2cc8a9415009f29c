"""A peft adapter for a job: its tensors under the job's names, next to the base model that the job's builder makes."""

from __future__ import annotations

import sys
from contextlib import redirect_stdout

import torch

from meshwright.checkpoint.foreign.source import Source
from meshwright.checkpoint.hugging_face import hugging_face_of
from meshwright.checkpoint.name_matching import ExpectedState, Match, Prefix
from meshwright.errors import WrongCheckpoint


def match_adapter(source: Source, expected: ExpectedState, *, seed: int) -> tuple[Match, str]:
    """Match an adapter and build its base model; returns a note about where the base comes from.

    Everything that the job trains must be in the adapter. The rest is what the job's builder makes, so it must load
    its base model from somewhere, or make it from the seed alone.
    """
    found = (hugging_face_of(expected.model, expected.names) or {}).get("adapter")
    if not found or not found["names"]:
        raise WrongCheckpoint(
            f"{source.path} is a peft adapter, but the job's model has none that peft would save like it; wrap the "
            "base model in the job's builder: get_peft_model(base, config)."
        )
    names: dict[str, str] = found["names"]
    if extra := [name for name in source.tensors if name not in names]:
        raise WrongCheckpoint(f"{source.path} has {extra[0]}, which the job's adapter does not have.")
    adapter = {names[name]: tensor for name, tensor in source.tensors.items()}
    trained = [p.name for p in expected.facts.parameters if p.trainable and not set(p.names) & adapter.keys()]
    if trained:
        raise WrongCheckpoint(f"{source.path} lacks {trained[0]}, which the job trains.")
    whole = _built(expected, seed)
    tensors = {}
    for own in [p.names for p in expected.facts.parameters] + [(name,) for name in expected.buffers]:
        given = next((adapter[name] for name in own if name in adapter), None)
        if given is not None and given.shape != whole[own[0]].shape:
            raise WrongCheckpoint(
                f"{source.path} has {own[0]} of shape {tuple(given.shape)}, but in the job's model it is "
                f"{tuple(whole[own[0]].shape)}."
            )
        tensors[own[0]] = whole[own[0]] if given is None else given
    rest = len(tensors) - len(source.tensors)
    note = f"weights: {len(source.tensors)} tensors of the adapter; the other {rest} are what the job's builder makes"
    return Match(tensors, Prefix(), (), renamed=names), note


def _built(expected: ExpectedState, seed: int) -> dict[str, torch.Tensor]:
    """The model as the job's builder makes it on the host, by every name."""
    with redirect_stdout(sys.stderr), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return {name: tensor.detach() for name, tensor in expected.job.model().state_dict().items()}
