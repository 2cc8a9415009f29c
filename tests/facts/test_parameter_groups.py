"""Parameter groups by patterns of names."""

import pytest
import torch
from torch import nn

from meshwright.describe.model import describe
from meshwright.errors import JobError
from meshwright.facts.job import NamedParameters
from minimal import make_job

NAMES = ("token.weight", "blocks.0.norm.weight", "blocks.0.up.weight", "blocks.0.up.bias")


def parameters(names: tuple[str, ...] = NAMES, *, whole: bool = True) -> NamedParameters:
    return NamedParameters([(name, nn.Parameter(torch.zeros(2))) for name in names], whole=whole)


def test_the_first_pattern_takes_a_parameter() -> None:
    params = parameters()
    groups = params.groups({("*.bias", "*norm*"): {"weight_decay": 0.0}, "blocks.*": {"lr": 0.5}})
    by_id = {id(parameter): name for name, parameter in params.named()}
    names = [[by_id[id(parameter)] for parameter in group["params"]] for group in groups]
    assert names == [[NAMES[1], NAMES[3]], [NAMES[2]], [NAMES[0]]]
    assert [group.get("lr") for group in groups] == [None, 0.5, None]
    assert groups[0]["weight_decay"] == 0.0


def test_a_stage_has_all_groups() -> None:
    """Also those of which it holds nothing, so that groups have the same numbers on every rank."""
    groups = parameters(NAMES[:1], whole=False).groups({"blocks.*": {"lr": 0.5}})
    assert [len(group["params"]) for group in groups] == [0, 1]


def test_a_pattern_that_matches_nothing_is_refused_when_a_job_is_described() -> None:
    job = make_job(optimizer=lambda params: torch.optim.SGD(params.groups({"*.biass": {"lr": 1.0}}), lr=0.1))
    with pytest.raises(JobError, match=r"'\*\.biass' of a parameter group matches no trained parameter"):
        describe(job)
