"""Builders of the tiny transformer that a recording cannot follow, or that draw from anywhere."""

from __future__ import annotations

import os

import torch
from torch import nn

from tiny_jobs import Transformer


def looks_at_values() -> nn.Module:
    """Weights leave PyTorch and come back."""
    model = Transformer()
    for parameter in model.parameters():
        values = parameter.detach().numpy()
        values -= values.mean()
    return model


def from_anywhere() -> nn.Module:
    """Other numbers in every process, also beside parameters."""
    model = Transformer()
    model.token.weight.data.mul_(os.urandom(1)[0] + 1)
    model.shift = torch.full((1,), float(os.urandom(1)[0]))
    return model


def unseeded_and_looked_at() -> nn.Module:
    """Neither can be recorded nor repeated."""
    model = looks_at_values()
    generator = torch.Generator()
    generator.seed()
    model.token.weight.data.normal_(generator=generator)
    model.waves = model.waves + float(os.urandom(1)[0])
    return model
