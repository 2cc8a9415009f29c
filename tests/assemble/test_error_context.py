"""What goes wrong only because a model is divided is told in one sentence."""

import pytest
import torch
from torch import Tensor, nn

from meshwright.assemble import error_context
from meshwright.assemble.error_context import naming_optimizer, naming_strategy
from meshwright.errors import JobError, Refused
from meshwright.facts.strategy import Strategy


class Failing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise ValueError("three sizes, and two ranks")


def test_strategy_and_module_are_named() -> None:
    model = nn.Sequential(nn.Identity(), nn.Sequential(Failing()))
    said = r"^tp=2 cannot run this model: in 1\.0, ValueError: three sizes, and two ranks\. .*\.$"
    with pytest.raises(Refused, match=said) as caught, naming_strategy(Strategy.parse("tp=2"), model):
        model(torch.ones(2))
    assert isinstance(caught.value.__cause__, ValueError), "for --debug"


def test_errors_of_the_job_and_of_whole_models_stay_what_they_are() -> None:
    with pytest.raises(ValueError, match="three"), naming_strategy(Strategy.parse("ddp"), Failing()):
        Failing()(torch.ones(2))
    with pytest.raises(JobError, match="as it is"), naming_strategy(Strategy.parse("pp=2:1f1b")):
        raise JobError("as it is")


def test_recomputing_is_named() -> None:
    with pytest.raises(Refused, match="drop ac=full"), naming_strategy(Strategy.parse("ddp,ac=full"), Failing()):
        Failing()(torch.ones(2))


def test_an_optimizer_that_fails_on_shards_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NotImplementedError), naming_optimizer(Strategy.parse("ddp"), [torch.ones(2)]):
        raise NotImplementedError("index_put_ has no sharding strategy")
    monkeypatch.setattr(error_context, "is_dtensor", lambda tensor: True)
    said = "^The optimizer's step does not run on the shards of fsdp: .*index_put_.*"
    with pytest.raises(Refused, match=said), naming_optimizer(Strategy.parse("fsdp"), [torch.ones(2)]):
        raise NotImplementedError("index_put_ has no sharding strategy")
