"""Errors that say that memory is exhausted, and what is made of them."""

import resource

import pytest
import torch

from meshwright.assemble.world import World
from meshwright.errors import JobError, OutOfMemory
from meshwright.facts.memory_report import MemoryReport
from meshwright.runtime.memory_limit import find_limit, memory_usage
from meshwright.runtime.out_of_memory import asked_bytes, memory_error, reporting_memory
from meshwright.units import MIB

ON_CPU = "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 4096 bytes. Error code 12"
ON_GPU = "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 139.80 GiB"
CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("error", "asked"),
    [
        (RuntimeError(ON_CPU), 4096),
        (torch.OutOfMemoryError(ON_GPU), round(2.5 * 2**30)),
        (MemoryError(), None),
    ],
)
def test_memory_errors(error: Exception, asked: int | None) -> None:
    wrapped = JobError("The model cannot be built.")
    wrapped.__cause__ = error
    assert memory_error(error) is error
    assert memory_error(wrapped) is error
    assert asked_bytes(error) == asked


def test_other_errors_pass() -> None:
    assert memory_error(RuntimeError("shapes differ")) is None
    with pytest.raises(ValueError), reporting_memory(World(device=CPU), lambda: None):
        raise ValueError


def test_report_of_a_limit() -> None:
    """An allocation that a real limit forbids."""
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = memory_usage(CPU)["VmData"] + 256 * MIB
    with pytest.raises(OutOfMemory) as caught, reporting_memory(World(device=CPU), lambda: None):
        resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))
        try:
            torch.ones(512 * MIB // 4)
        finally:
            found = find_limit(CPU, memory_usage(CPU), local_ranks=1)
            resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
    assert (found.name, found.limit) == ("ulimit -d", limit)
    report = MemoryReport.from_json(caught.value.details)
    assert report.asked == 512 * MIB
    assert report.needed >= 512 * MIB
    assert "while the model was laid out" in str(caught.value)
    assert "asked for 512 MiB more" in str(caught.value)


def test_sentences() -> None:
    report = MemoryReport(
        rank=1, step=3, limit=800 * MIB, limited_by="ulimit -v", used=790 * MIB, base=300 * MIB, asked=96 * MIB,
        held={"parameters": 100 * MIB, "gradients": 0, "rest": 390 * MIB},
    )  # fmt: skip
    assert report.room == 500 * MIB and report.needed == 586 * MIB
    assert report.sentences() == (
        "Rank 1 ran out of memory in step 3: it used 790 MiB of 800 MiB (ulimit -v) and asked for 96 MiB more. "
        "It held: 300 MiB before training, parameters 100 MiB, rest 390 MiB."
    )
    assert MemoryReport.from_json(report.to_json()) == report
