"""What a model's code caches outside of the model is not left behind by a pass without values."""

from functools import cache, lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from meshwright import Job
from meshwright.describe.model import describe
from meshwright.facts.strategy import Strategy
from meshwright.recording.caches import forgetting
from meshwright.tracing import trace_step


@cache
def unbounded(n: int) -> Tensor:
    return torch.arange(n)


@lru_cache(maxsize=8)
def bounded(n: int, device: torch.device) -> tuple[Tensor, None]:
    return torch.arange(n, device=device)[:, None] / n, None


@cache
def numbers(n: int) -> int:
    return n


TABLES: dict[int, Tensor] = {}


class Tabled(nn.Module):
    tables: dict[int, list[Tensor]] = {}  # noqa: RUF012  # as users write it

    def __init__(self) -> None:
        super().__init__()
        self.token, self.out = nn.Embedding(16, 4), nn.Linear(4, 16)

    def forward(self, x: Tensor) -> Tensor:
        n = x.shape[1]
        if n not in TABLES:
            TABLES[n] = torch.arange(n, device=x.device)[:, None] / n
        if n not in self.tables:
            self.tables[n] = [torch.arange(n, device=x.device)[:, None] / n]
        return self.out(self.token(x) + bounded(n, x.device)[0] + TABLES[n] + self.tables[n][0])


def loss(logits: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    return F.cross_entropy(logits.flatten(0, 1), batch["x"].flatten(), reduction="sum"), batch["x"].numel()


class Lazy:
    """As lazy modules and proxies are: to ask anything of it is an error."""

    def __getattribute__(self, name: str) -> Any:
        raise ImportError(f"{name} cannot be loaded")


LAZY = Lazy()


class WithLazy:
    lazy = Lazy()


def test_a_dict_keeps_the_tensors_without_values_that_it_had() -> None:
    TABLES[0] = torch.empty(3, device="meta")
    with forgetting(Tabled()):
        TABLES[1] = torch.empty(3, device="meta")
        TABLES[2] = torch.ones(3)
    assert TABLES.keys() == {0, 2}
    TABLES.clear()


def test_lazy_objects_are_left_alone() -> None:
    with forgetting(nn.Linear(2, 2)):
        bounded(5, torch.device("meta"))
    assert bounded.cache_info().currsize == 0


def test_functions_forget_tensors_without_values() -> None:
    kept = unbounded(3), numbers(3)
    with forgetting(), FakeTensorMode():
        bounded(4, torch.device("cpu"))
        numbers(4)
    assert bounded.cache_info().currsize == 0
    assert numbers.cache_info().currsize == 2
    assert unbounded(3) is kept[0]


def test_a_cache_that_an_inner_pass_cleared_is_looked_at_again() -> None:
    with forgetting():
        with forgetting(), FakeTensorMode():
            bounded(6, torch.device("cpu"))
        assert bounded.cache_info().currsize == 0
        bounded(6, torch.device("meta"))
    assert bounded.cache_info().currsize == 0


def test_functions_of_modules_that_a_pass_imports_or_changes_forget_too(tmp_path: Path, monkeypatch: Any) -> None:
    text = "from functools import cache\nimport torch\n@cache\ndef table(n): return torch.empty(n, device='meta')\n"
    tmp_path.joinpath("imported_in_a_pass.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    with forgetting():
        module = import_module("imported_in_a_pass")
        module.table(3)
    assert module.table.cache_info().currsize == 0
    module.table = cache(lambda n: torch.empty(n, device="meta"))
    with forgetting():
        module.table(3)
    assert module.table.cache_info().currsize == 0


@pytest.mark.parametrize("strategy", ["single,bf16", "single,bf16,compile"])
def test_a_model_with_tables_around_it_is_looked_at_and_then_runs(strategy: str) -> None:
    job = Job(
        model=Tabled,
        inputs=lambda batch: (batch["x"],),
        loss=loss,
        optimizer=lambda params: torch.optim.AdamW(params),
        sample=lambda n: {"x": torch.randint(16, (n, 6))},
        global_batch=4,
    )
    facts = describe(job)
    assert not facts.unseen
    assert trace_step(job, facts, Strategy.parse(strategy), ranks=1).unseen == ""
    assert Tabled()(torch.zeros(2, 6, dtype=torch.long)).isfinite().all()
    TABLES.clear()
    Tabled.tables.clear()
