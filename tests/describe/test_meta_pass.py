"""A pass on meta tensors shows what one on fake tensors shows, or gives way to it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from architecture_jobs import ARCHITECTURES
from meshwright.describe import pass_tensors
from meshwright.describe.as_on_cuda import as_on_cpu
from meshwright.describe.meta_pass import NotOnMeta, meta_pass
from meshwright.describe.model import describe
from meshwright.facts.job import Job
from meshwright.jobs.load import load_job
from meshwright.recording.report_as_cpu import meta_of
from meshwright.tracing.costs import measure_costs

EXAMPLES = Path(__file__).parents[2] / "examples"
JOBS: dict[str, Callable[[], Job]] = {
    "gpt": lambda: load_job(str(EXAMPLES / "gpt.py")),
    "cnn": lambda: load_job(str(EXAMPLES / "cnn.py")),
    "vit": lambda: load_job("preset:vit-base"),
    "Llama": lambda: ARCHITECTURES["Llama"],
    "T5": lambda: ARCHITECTURES["T5"],
    "Mamba 2": lambda: ARCHITECTURES["Mamba 2"],
}


@contextmanager
def no_meta_pass(model: nn.Module) -> Iterator[None]:
    raise NotOnMeta("none today")
    yield


def no_fake_tensors(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("a pass on meta tensors failed")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.thorough) if name in ("T5", "Mamba 2", "gpt", "vit") else name
        for name in JOBS
    ],
)
def test_meta_tensors_show_what_fake_tensors_show(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    job = JOBS[name]()
    with monkeypatch.context() as patch:
        patch.setattr(pass_tensors, "FakeTensorMode", no_fake_tensors)
        on_meta = describe(job)
        counted = measure_costs(job, on_meta, "bf16")
    monkeypatch.setattr(pass_tensors, "meta_pass", no_meta_pass)
    assert describe(job) == on_meta
    assert measure_costs(job, on_meta, "bf16") == counted


@pytest.mark.parametrize("name", ["BERT", pytest.param("SegFormer", marks=pytest.mark.thorough)])
def test_where_meta_tensors_fail_fake_tensors_are_used(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first looks at a mask, the second has convolutions with channels last."""
    facts = describe(ARCHITECTURES[name])
    monkeypatch.setattr(pass_tensors, "meta_pass", no_meta_pass)
    assert describe(ARCHITECTURES[name]) == facts
    assert not facts.unseen


def test_new_tensors_are_meta_tensors_that_pass_for_cpu_tensors() -> None:
    with meta_pass(nn.Linear(1, 1)):
        x = torch.arange(1 << 40)
        assert x.device == torch.device("cpu")
        assert not x.is_meta
        assert x.to("cpu") is x.to(x) is x.to(device=x.device) is x.cpu() is x
        assert (x + torch.tensor(1)).shape == x.shape
    assert x.device == torch.device("meta")


class Names(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("heads", [(4, 4), (4, 2)])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("masked", [False, True])
def test_attention_of_meta_tensors_is_taken_apart_as_on_a_cpu(
    heads: tuple[int, int], dropout: float, masked: bool
) -> None:
    def attend(tensors: list[Tensor]) -> list[str]:
        with Names() as seen:
            grouped = heads[0] != heads[1]
            F.scaled_dot_product_attention(*tensors, dropout_p=dropout, enable_gqa=grouped).sum().backward()
        return [name for name in seen.names if "scaled_dot_product" in name]

    shapes = [(2, number, 8, 16) for number in (heads[0], heads[1], heads[1])]
    real = [torch.zeros(shape, requires_grad=True) for shape in shapes]
    real += [torch.ones(8, 8, dtype=torch.bool)] if masked else []
    expected = attend(real)
    with meta_pass(nn.Identity()), as_on_cpu():
        on_meta = [meta_of(tensor).requires_grad_(tensor.requires_grad) for tensor in real]
        assert attend(on_meta) == expected


def test_autocast_would_pass_shadows_by() -> None:
    with meta_pass(nn.Identity()), pytest.raises(NotOnMeta, match="Autocast"), torch.autocast("cpu"):
        torch.zeros(2) + 1


def test_a_real_tensor_is_not_changed_by_a_shadow() -> None:
    real = torch.zeros(2)
    with meta_pass(nn.Identity()), pytest.raises(NotOnMeta, match="has values"):
        real.add_(torch.ones(2))
    assert real.tolist() == [0, 0]


def test_recurrent_layers_cast_no_shadow() -> None:
    with pytest.raises(NotOnMeta), meta_pass(nn.Sequential(nn.LSTM(2, 2))):
        pass
