"""What a job's model expects of a checkpoint: names, shapes and ties, from the model on the meta device."""

from __future__ import annotations

import sys
from contextlib import redirect_stdout
from dataclasses import dataclass

import torch
from torch import nn

from meshwright.describe.model import parameter_facts
from meshwright.facts.job import Job
from meshwright.facts.model import ModelFacts
from meshwright.jobs.load import load_job
from meshwright.recording.blueprint import record


@dataclass(frozen=True)
class ExpectedState:
    """A job's model without weights."""

    job: Job
    model: nn.Module
    facts: ModelFacts
    """Only its parameters: no step was traced."""
    buffers: dict[str, tuple[int, ...]]
    """Shapes of the persistent buffers."""

    @property
    def names(self) -> set[str]:
        """Every name in its `state_dict`; tied parameters have several."""
        return {name for p in self.facts.parameters for name in p.names} | self.buffers.keys()

    @property
    def tied(self) -> dict[str, str]:
        """Further names of tied parameters, each mapped to the first."""
        return {alias: p.name for p in self.facts.parameters for alias in p.names[1:]}


def expected_by(job: str) -> ExpectedState:
    """Load a job as written on the command line. Nothing is computed, so no sample is needed."""
    with redirect_stdout(sys.stderr):  # a job may print, and stdout is reserved for the JSON document
        loaded = load_job(job)
        model = record(loaded.model, seed=0, values=False).model
    parameters = parameter_facts(model, None)
    known = {name for p in parameters for name in p.names}
    buffers = {
        name: tuple(tensor.shape)
        for name, tensor in model.state_dict().items()
        if name not in known and isinstance(tensor, torch.Tensor)
    }
    return ExpectedState(loaded, model, ModelFacts(parameters=parameters, blocks=()), buffers)
