"""What strategies are compared with: plain PyTorch, and under bf16 and fp16 one process of ours.

They are made in a process of their own that knows of no ranks (`python -m meshwright.verify.references FOLDER`),
before the ranks start, and come back as files. A model with collectives of its own would otherwise wait for ranks that
do something else.
"""

from __future__ import annotations

import json
import pickle
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import torch

from meshwright.assemble.batch import micro_steps
from meshwright.assemble.world import World
from meshwright.describe.dtypes import DTYPES
from meshwright.environment import environment_without_ranks
from meshwright.errors import BadInput, JobError, MeshwrightError, one_line
from meshwright.facts.job import Job
from meshwright.facts.model import ModelFacts
from meshwright.facts.strategy import Strategy
from meshwright.importing import importing
from meshwright.jobs.load import load_job
from meshwright.launch.attempt import exit_now
from meshwright.runtime.request import CauseTask, ReferenceTask
from meshwright.strategies import Place
from meshwright.strategies.pipeline.sizes import is_pipelined
from meshwright.verify.bounds import LOSS_BOUND
from meshwright.verify.causes import find_cause
from meshwright.verify.evidence import ROUNDING, Evidence, Reference
from meshwright.verify.float64 import NarrowWatch, double_arithmetic, in_double
from meshwright.verify.plain_training import Recipe, train_plainly
from meshwright.verify.strategy_steps import Perturbation, run_steps
from meshwright.verify.verdict import FAILED, REFUSED, Verdict, judge, judge_loss, without_verdict


def reference_of(strategy: Strategy, facts: ModelFacts, global_batch: int) -> Strategy:
    """One process with the same precision. Where there is BatchNorm, also with the same samples in each statistic."""
    ranks = strategy.data_ranks
    # A pipeline with BatchNorm is one of a single micro-batch: others were refused.
    count = 1 if is_pipelined(strategy) else micro_steps(global_batch, ranks, strategy.micro_batch)
    size = -(-global_batch // count) if facts.batch_norms and count > 1 else None
    return Strategy(
        data="single",
        precision=strategy.precision,
        pure=strategy.pure,
        autocast=strategy.autocast,
        micro_batch=size,
    )


def runs_alone(strategy: Strategy) -> bool:
    """Whether a strategy is one process of ours, which is compared where the references are made."""
    return strategy.traits.one_process


def own_place(strategy: Strategy, place: Place) -> Place:
    """Where a strategy is verified among the ranks of a place: one device is one rank of it."""
    return replace(place, ranks=1, local_ranks=1) if strategy.traits.alone else place


class References(Protocol):
    """Where verdicts come from what to compare with."""

    def of(self, strategy: Strategy) -> Reference:
        """What a resolved strategy is compared with."""

    def verdict_on_process(self, strategy: Strategy) -> Verdict:
        """How one process of ours compares with plain PyTorch."""


@dataclass(frozen=True, kw_only=True)
class Float64Support:
    """Whether a model runs in float64, and how much of it does."""

    runs: bool
    narrow: str | None = None
    """The precision that some of it rounds to all the same."""
    note: str | None = None


class LocalReferences:
    """References that are made in this process, each when it is first asked for."""

    def __init__(self, job: Job, facts: ModelFacts, device: torch.device, *, steps: int, seed: int) -> None:
        self._job, self._facts, self._world = job, facts, World(device=device)
        self._steps, self._seed = steps, seed
        self._made: dict[str, Reference] = {}

    def of(self, strategy: Strategy) -> Reference:
        """In float64 where the strategy computes in fp32 and the model also runs in more."""
        key = reference_of(strategy, self._facts, self._job.global_batch)
        double = not strategy.number_format.is_low and _takes_double(strategy) and self._double.runs
        name = f"{key}{' in float64' * double}"
        if name not in self._made:
            make = self._ours if strategy.number_format.is_low else self._plain
            self._made[name] = make(key, double)
        return self._made[name]

    def verdict_on_process(self, strategy: Strategy) -> Verdict:
        lowered = strategy.number_format.is_low
        autocast = DTYPES[strategy.precision] if lowered else None
        plain = train_plainly(self._job, replace(self._recipe(strategy), autocast=autocast)) if lowered else None
        reference = None if lowered else self.of(strategy)
        try:
            if plain is not None:
                return judge_loss(str(strategy), self._run(strategy), plain, self.of(strategy))
            assert reference is not None
            return judge(str(strategy), self._run(strategy, double=reference.precision == "float64"), reference)
        except BadInput as reason:
            return without_verdict(str(strategy), REFUSED, str(reason))
        except Exception as error:
            traceback.print_exc()
            return without_verdict(str(strategy), FAILED, one_line(error))

    @cached_property
    def _double(self) -> Float64Support:
        watch = NarrowWatch()
        recipe = replace(self._recipe(Strategy.parse("single"), double=True), watch=lambda: watch, steps=1)
        try:
            train_plainly(in_double(self._job), recipe)
        except MeshwrightError as error:
            why = f"compared in fp32: the model does not run in float64 ({one_line(error.__cause__ or error)})"
            return Float64Support(runs=False, note=why)
        if watch.precision is not None:
            why = f"rounds to {watch.precision} in places (first by {watch.operator}), so bounds are those of that"
            return Float64Support(runs=True, narrow=watch.precision, note=why)
        return Float64Support(runs=True)

    def _plain(self, key: Strategy, double: bool) -> Reference:
        job = in_double(self._job) if double else self._job
        narrow = self._double.narrow if double else None
        precision = "float64" if double else "fp32"
        unit = ROUNDING[narrow or precision]
        recipe = self._recipe(key, double=double)
        exact = train_plainly(job, recipe)
        moved = train_plainly(job, replace(recipe, moved=(1, 2 * unit)))
        turned = train_plainly(job, replace(recipe, moved=(2, 2 * unit), backwards=True))
        if _order_matters(exact, turned, narrow or "fp32"):
            turned = train_plainly(job, replace(recipe, moved=(2, 2 * unit)))
        return Reference(
            words=f"plain PyTorch in {precision}" + f", mb={key.micro_batch}" * (key.micro_batch is not None),
            precision=precision,
            exact=exact,
            disturbed=[moved, turned],
            narrow=narrow,
            note=self._double.note,
        )

    def _ours(self, key: Strategy, double: bool) -> Reference:
        """Of bf16 and fp16: autocast rounds elsewhere, so only one process of ours can be compared in detail."""
        by = 2 * ROUNDING[key.precision]
        exact, moved = self._run(key), self._run(key, disturbed=Perturbation(seed=1, by=by))
        turned = self._run(key, disturbed=Perturbation(seed=2, by=by, backwards=True))
        if _order_matters(exact, turned, key.precision):
            turned = self._run(key, disturbed=Perturbation(seed=2, by=by))
        return Reference(words=str(key), precision=key.precision, exact=exact, disturbed=[moved, turned])

    def _run(self, strategy: Strategy, *, double: bool = False, disturbed: Perturbation | None = None) -> Evidence:
        return run_steps(
            *(self._job, self._facts, strategy, self._world),
            steps=self._steps,
            seed=self._seed,
            double=double,
            disturbed=disturbed,
        )

    def _recipe(self, key: Strategy, *, double: bool = False) -> Recipe:
        return Recipe(
            steps=self._steps,
            seed=self._seed,
            device=self._world.device,
            micro_batch=key.micro_batch if self._facts.batch_norms else None,
            arithmetic=double_arithmetic if double else nullcontext,
        )


def _takes_double(strategy: Strategy) -> bool:
    """DeepSpeed's engine takes fp32 and less, a compiled model is of one dtype, and a mode is one thread's alone."""
    return strategy.engine == "torch" and not strategy.compile and not strategy.traits.many_devices


def _order_matters(exact: Evidence, turned: Evidence, precision: str) -> bool:
    """Where the order of samples has a meaning (BatchNorm over micro-batches), turning it round is no rounding."""
    return not abs(turned.losses[0] - exact.losses[0]) <= LOSS_BOUND[precision] * abs(exact.losses[0])


class StoredReferences:
    """References that another process has made, read from its folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._index = json.loads((folder / "index.json").read_text())
        self._read: dict[str, Reference] = {}

    def of(self, strategy: Strategy) -> Reference:
        name = self._index["references"][str(strategy)]
        if name not in self._read:
            self._read = {name: Reference.load(self._folder / name)}  # one at a time: each is several models large
        return self._read[name]

    def verdict_on_process(self, strategy: Strategy) -> Verdict:
        return Verdict(**self._index["processes"][str(strategy)])


def store_references(task: ReferenceTask, folder: Path) -> None:
    """Have another process make the references of resolved strategies, and verdicts on those of one process."""
    _ask(folder, task)


def find_cause_apart(task: CauseTask, folder: Path) -> str | None:
    """Have another process look for a cause of differences in the job itself."""
    try:
        _ask(folder, task)
    except MeshwrightError:
        return None  # the verdicts stand without it
    return json.loads((folder / "cause.json").read_text())  # type: ignore[no-any-return]


def _ask(folder: Path, task: ReferenceTask | CauseTask) -> None:
    (folder / "task").write_bytes(pickle.dumps(task))
    command = [sys.executable, "-m", "meshwright.verify.references", str(folder)]
    # The child ends when its stdin does, so that it does not outlive this process.
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=sys.stderr, env=environment_without_ranks())
    try:
        code = child.wait()
    except BaseException:
        child.kill()
        raise
    if (folder / "failure.json").exists():
        raise JobError(json.loads((folder / "failure.json").read_text()))
    if code:
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        raise MeshwrightError(f"The process that trains the job in plain PyTorch {how}; it needs room for all of it.")


def main(folder: Path) -> None:
    """What the process does: a file for each reference and an index of them, or a cause."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    task: ReferenceTask | CauseTask = pickle.loads((folder / "task").read_bytes())
    request = task.request
    try:
        job, device, seed = load_job(request.job), torch.device(task.device), request.seed
        if isinstance(task, CauseTask):
            (folder / "cause.json").write_text(json.dumps(find_cause(job, seed=seed, device=device)))
        else:
            here = LocalReferences(job, task.facts, device, steps=request.steps, seed=seed)
            index = _make_all(here, task.wanted, folder)
            (folder / "index.json").write_text(json.dumps(index))
    except BadInput as error:
        (folder / "failure.json").write_text(json.dumps(str(error)))
    exit_now(0)


def _make_all(here: LocalReferences, wanted: Sequence[Strategy], folder: Path) -> dict[str, dict[str, Any]]:
    index: dict[str, dict[str, Any]] = {"references": {}, "processes": {}}
    names: dict[int, str] = {}
    for number, strategy in enumerate(wanted):
        if runs_alone(strategy):
            index["processes"][str(strategy)] = here.verdict_on_process(strategy).to_json()
            continue
        reference = here.of(strategy)
        if id(reference) not in names:
            names[id(reference)] = f"reference-{number}.pt"
            reference.save(folder / names[id(reference)])
        index["references"][str(strategy)] = names[id(reference)]
    return index


def _end_with_parent() -> None:
    sys.stdin.read()
    exit_now(1)


if __name__ == "__main__":
    with importing():
        main(Path(sys.argv[1]))
