"""Describe many models on meta tensors and on fake tensors, and say where the two differ.

    PYTHONPATH=src:tests python benchmarks/meta_pass_check.py          # three minutes
    PYTHONPATH=src:tests python benchmarks/meta_pass_check.py Llama T5

The models are those of tests/architecture_jobs.py, the examples and a preset of each kind; costs are in bf16 and fp32.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from architecture_jobs import ARCHITECTURES, HABITS
from meshwright.describe import pass_tensors
from meshwright.describe.meta_pass import NotOnMeta, meta_pass
from meshwright.describe.model import describe
from meshwright.facts.job import Job
from meshwright.jobs.load import load_job
from meshwright.tracing import costs

EXAMPLES = ("gpt", "cnn", "resnet", "resnet_groupnorm", "hf_gpt2", "hf_llama", "hf_vit")
PRESETS = ("llama3.2-1b", "gpt2", "bert-base", "vit-base", "resnet-50")
gave_way: list[str] = []
"""Why passes on meta tensors failed."""


@contextmanager
def watched(model: Any) -> Iterator[None]:
    try:
        with meta_pass(model):
            yield
    except Exception as error:
        gave_way.append(f"{type(error).__name__}: {error}".splitlines()[0])
        raise


@contextmanager
def none(model: Any) -> Iterator[None]:
    raise NotOnMeta("fake tensors only")
    yield


def jobs() -> dict[str, Job]:
    folder = Path(__file__).parents[1] / "examples"
    return {
        **ARCHITECTURES,
        **HABITS,
        **{f"{name}.py": load_job(str(folder / f"{name}.py")) for name in EXAMPLES},
        **{f"preset:{name}": load_job(f"preset:{name}") for name in PRESETS},
    }


def look(job: Job, way: Any) -> tuple[Any, Any, float]:
    """The description, the costs and the seconds it took; an error stands for what it prevented."""
    pass_tensors.meta_pass = way
    began = time.perf_counter()
    try:
        facts = describe(job)
        found = [costs.measure_costs(job, facts, precision) for precision in ("bf16", "fp32")]
    except Exception as error:
        return None, f"{type(error).__name__}: {error}", time.perf_counter() - began
    return facts, found, time.perf_counter() - began


def main(names: list[str]) -> None:
    chosen = {name: job for name, job in jobs().items() if not names or name in names}
    same = 0
    for name, job in chosen.items():
        gave_way.clear()
        first, counted, quick = look(job, watched)
        second, recounted, slow = look(job, none)
        words = "same" if (first, counted) == (second, recounted) else "COSTS DIFFER" if first == second else "DIFFERS"
        same += words == "same"
        told = f"; gave way: {gave_way[0][:90]}" if gave_way else ""
        print(f"{name:24} {words:12} {quick:5.2f} s, {slow:5.2f} s on fake tensors{told}", flush=True)
    print(f"{same} of {len(chosen)} the same in every field")


if __name__ == "__main__":
    main(sys.argv[1:])
