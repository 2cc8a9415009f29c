"""Does `verify` cry wolf, and does it miss anything? Sound verifications over models and seeds, and planted defects.

python benchmarks/verify_soundness.py --json docs/data/verify_soundness.json
python benchmarks/verify_soundness.py --only sound --models transformer StableLM

Every model is verified under a few strategies from several seeds of weights and batches; each (model, seed, strategy)
is one verification, and none may differ. Then each defect of tests/planted_defects.py is planted and must be found,
with the words that name it. Exit 1 if a sound one differs or a defect is missed.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

import torch
import transformers

import meshwright
from meshwright.assemble.world import World
from meshwright.describe.model import describe
from meshwright.facts.job import Job
from meshwright.facts.model import ModelFacts
from meshwright.jobs.load import load_job
from meshwright.verify.verify import verify

sys.path.append(str(Path(__file__).parents[1] / "tests"))  # the jobs and the ranks are the tests' own

import tiny_jobs
from architecture_jobs import ARCHITECTURES
from planted_defects import PLANTED, verdict_on
from rank_pool import RankError, RankPool

ROOT = Path(__file__).parents[1]
STRATEGIES = ("single", "ddp", "fsdp", "tp=2", "pp=2:1f1b")
"""Each kind of engine: one process, copies, shards, divided layers, stages."""
MODELS = (
    *("transformer", "masked", "partial", "uneven", "convolutions", "hf_gpt2"),
    *("StableLM", "Llama", "Mixtral", "BERT", "T5"),
    *("examples/cnn.py", "ViT", "examples/gpt.py"),
)
SEEDS = (0, 1)


@dataclass(frozen=True, kw_only=True)
class Sound:
    """One verification of what is right."""

    model: str
    seed: int
    strategy: str
    status: str
    precision: str | None
    loss_max_rel: float | None
    grad_norm_max_rel: float | None
    grad_max_rel: float | None
    param_max_abs: float | None
    first_difference: str | None


@dataclass(frozen=True, kw_only=True)
class Defect:
    """One planted defect and what was said of it."""

    defect: str
    job: str
    strategy: str
    found: bool
    named: bool
    first_difference: str | None


def job_of(model: str) -> Job:
    if model in ARCHITECTURES:
        return ARCHITECTURES[model]
    return load_job(str(ROOT / model)) if model.endswith(".py") else getattr(tiny_jobs, model)


@cache
def looked_at(model: str) -> tuple[Job, ModelFacts]:
    job = job_of(model)
    return job, describe(job)


def examine(world: World, model: str, seed: int) -> list[Sound]:
    """Runs on every rank."""
    job, facts = looked_at(model)
    numbers = ("status", "precision", "loss_max_rel", "grad_norm_max_rel", "grad_max_rel", "param_max_abs")
    return [
        Sound(
            model=model,
            seed=seed,
            strategy=verdict.strategy,
            first_difference=verdict.first_difference,
            **{name: getattr(verdict, name) for name in numbers},
        )
        for verdict in verify(job, facts, STRATEGIES, world, seed=seed)
    ]


def sound_on(pool: RankPool, model: str, seed: int) -> list[Sound]:
    try:
        return pool(examine, model, seed)[0]
    except (RankError, TimeoutError, RuntimeError) as error:
        print(error, file=sys.stderr)
        empty = dict.fromkeys(("precision", "loss_max_rel", "grad_norm_max_rel", "grad_max_rel", "param_max_abs"))
        words = str(error).splitlines()[0]
        return [Sound(model=model, seed=seed, strategy="?", status="failed", first_difference=words, **empty)]


def plant_on(pool: RankPool, name: str) -> Defect:
    planted = PLANTED[name]
    verdict = pool(verdict_on, name)[0]
    words = verdict.first_difference or ""
    named = all(part in words for part in planted.named)
    return Defect(
        defect=name,
        job=planted.job,
        strategy=planted.strategy,
        found=not verdict.equal,
        named=named,
        first_difference=verdict.first_difference,
    )


def write(path: Path, sound: list[Sound], defects: list[Defect]) -> None:
    command = " ".join(["python", "benchmarks/verify_soundness.py", *sys.argv[1:]])
    versions = {"meshwright": meshwright.__version__, "torch": torch.__version__}
    versions |= {"transformers": transformers.__version__, "python": platform.python_version()}
    document = {"command": command, "versions": versions, "ranks": 2}
    document |= {"sound": [asdict(one) for one in sound], "defects": [asdict(one) for one in defects]}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=MODELS)
    parser.add_argument("--seeds", nargs="+", type=int, default=SEEDS)
    parser.add_argument("--only", choices=("sound", "planted"))
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    pool, sound, defects = RankPool(2), [], []
    for model in asked.models if asked.only != "planted" else ():
        for seed in asked.seeds:
            start = time.perf_counter()
            found = sound_on(pool, model, seed)
            sound += found
            words = ", ".join(f"{one.strategy} {one.status}" for one in found)
            print(f"{model} {seed}: {words} ({time.perf_counter() - start:.0f} s)", flush=True)
            for one in found:
                if one.status in ("differs", "failed"):
                    print(f"    {one.strategy}: {one.first_difference}", flush=True)
            if asked.json:  # after each, so that a run which is ended early leaves what it found
                write(asked.json, sound, defects)
    for name in PLANTED if asked.only != "sound" else ():
        defects.append(plant_on(pool, name))
        print(f"{name}: {'found' if defects[-1].found else 'MISSED'}, named: {defects[-1].named}", flush=True)
        if asked.json:
            write(asked.json, sound, defects)
    pool.close()
    verified = [one for one in sound if one.status != "refused"]
    wolves = [one for one in verified if one.status != "equal"]
    missed = [one for one in defects if not (one.found and one.named)]
    print(
        f"{len(verified)} sound verifications, {len(wolves)} false alarms; {len(defects)} defects, {len(missed)} missed"
    )
    sys.exit(1 if wolves or missed else 0)


if __name__ == "__main__":
    main()
