"""References that strategies are compared with: plain PyTorch, and for bf16 and fp16 our single process.

A separate process that belongs to no process group makes them (`python -m meshwright.verify.references FOLDER`) before
the ranks start, and writes them to files. In a rank, a model that calls collectives would wait for the other ranks.
"""

from __future__ import annotations

import json
import pickle
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import torch

from meshwright.assemble.batch import micro_steps
from meshwright.assemble.world import World
from meshwright.deferred_warnings import show_written, write_warnings
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
from meshwright.verify.plain_training import Perturbation, Recipe, train_plainly
from meshwright.verify.strategy_steps import run_steps
from meshwright.verify.verdict import FAILED, REFUSED, Verdict, judge, judge_loss, without_verdict

WARNINGS = "warnings"
"""The file of the process's folder that gets the warnings of libraries."""


def reference_of(strategy: Strategy, facts: ModelFacts, global_batch: int, *, dropout: bool = False) -> Strategy:
    """One process with the same precision, and with the strategy's micro-batches where its results depend on them.

    With dropout they are those whose masks are drawn together; with BatchNorm, the samples of each statistic, over all
    ranks.
    """
    size = _drawn_together(strategy, global_batch) if dropout else global_batch
    if facts.batch_norms:
        # A pipeline with BatchNorm has a single micro-batch: others were refused.
        count = 1 if is_pipelined(strategy) else micro_steps(global_batch, strategy.data_ranks, strategy.micro_batch)
        size = -(-global_batch // count)
    return Strategy(
        data="single",
        precision=strategy.precision,
        pure=strategy.pure,
        autocast=strategy.autocast,
        micro_batch=size if size < global_batch else None,
    )


def keeps_dropout(strategy: Strategy, facts: ModelFacts, global_batch: int) -> bool:
    """Whether one process can draw the strategy's dropout masks: it needs the same micro-batches.

    BatchNorm wants others of it, and a loss over the whole batch wants none. Autocast, with which one process in bf16
    is compared, draws in other dtypes.
    """
    size = _drawn_together(strategy, global_batch)
    even = facts.loss_over != "batch" and global_batch % (strategy.data_ranks * size) == 0
    cut_alike = size == global_batch or even
    draws_alike = strategy.model_ranks == 1 and not strategy.compile and not strategy.traits.many_devices
    low_process = strategy.number_format.is_low and strategy.traits.one_process
    return facts.drops and draws_alike and cut_alike and not facts.batch_norms and not low_process


def _drawn_together(strategy: Strategy, global_batch: int) -> int:
    """Samples of a micro-batch, whose masks are drawn from one seed."""
    return min(strategy.micro_batch or global_batch, -(-global_batch // strategy.data_ranks))


def own_place(strategy: Strategy, place: Place) -> Place:
    """The place in which a strategy is verified: one rank if it uses one device."""
    return replace(place, ranks=1, local_ranks=1) if strategy.traits.alone else place


class References(Protocol):
    """The interface through which `verify` gets references."""

    def of(self, strategy: Strategy) -> Reference:
        """The reference of a resolved strategy."""

    def verdict_on_process(self, strategy: Strategy) -> Verdict:
        """Compare our single process with plain PyTorch."""


@dataclass(frozen=True, kw_only=True)
class Float64Support:
    """Whether a model runs in float64, and whether all of it does."""

    runs: bool
    narrow: str | None = None
    """The precision that parts of it still round to."""
    note: str | None = None


class LocalReferences:
    """References made in this process, each on first use."""

    def __init__(self, job: Job, facts: ModelFacts, device: torch.device, *, steps: int, seed: int) -> None:
        self._job, self._facts, self._world = job, facts, World(device=device)
        self._steps, self._seed = steps, seed
        self._made: dict[str, Reference] = {}

    def of(self, strategy: Strategy) -> Reference:
        """In float64 if the strategy computes in fp32 and can run in float64, as can the model."""
        dropout = keeps_dropout(strategy, self._facts, self._job.global_batch)
        key = reference_of(strategy, self._facts, self._job.global_batch, dropout=dropout)
        double = not strategy.number_format.is_low and _takes_double(strategy) and self._double.runs
        name = f"{key}{' in float64' * double}{' with dropout' * dropout}"
        if name not in self._made:
            low = strategy.number_format.is_low
            self._made[name] = self._ours(key, dropout) if low else self._plain(key, double, dropout)
        return self._made[name]

    def verdict_on_process(self, strategy: Strategy) -> Verdict:
        lowered = strategy.number_format.is_low
        if lowered:
            key = reference_of(strategy, self._facts, self._job.global_batch)
            plain = train_plainly(self._job, replace(self._recipe(key), autocast=DTYPES[strategy.precision]))
        else:
            reference = self.of(strategy)
        try:
            if lowered:
                return judge_loss(str(strategy), self._run(strategy), plain, self.of(strategy))
            dropout = keeps_dropout(strategy, self._facts, self._job.global_batch)
            double = reference.precision == "float64"
            return judge(str(strategy), self._run(strategy, double=double, dropout=dropout), reference)
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

    def _plain(self, key: Strategy, double: bool, dropout: bool) -> Reference:
        job = in_double(self._job) if double else self._job
        narrow = self._double.narrow if double else None
        precision = "float64" if double else "fp32"
        recipe = replace(self._recipe(key, double=double), dropout=dropout)
        exact, disturbed = _run_disturbed(
            lambda disturbed: train_plainly(job, replace(recipe, disturbed=disturbed)),
            by=2 * ROUNDING[narrow or precision],
            order_bound=LOSS_BOUND[narrow or "fp32"],
        )
        words = f"plain PyTorch in {precision}" + f", mb={key.micro_batch}" * (key.micro_batch is not None)
        return Reference(
            words=words + ", with dropout" * dropout,
            precision=precision,
            exact=exact,
            disturbed=disturbed,
            narrow=narrow,
            note=self._double.note,
        )

    def _ours(self, key: Strategy, dropout: bool) -> Reference:
        """For bf16 and fp16: autocast rounds at other places, so only our single process can be compared in detail."""
        exact, disturbed = _run_disturbed(
            lambda disturbed: self._run(key, dropout=dropout, disturbed=disturbed),
            by=2 * ROUNDING[key.precision],
            order_bound=LOSS_BOUND[key.precision],
        )
        words = str(key) + ", with dropout" * dropout
        return Reference(words=words, precision=key.precision, exact=exact, disturbed=disturbed)

    def _run(self, strategy: Strategy, **options: Any) -> Evidence:
        where = (self._job, self._facts, strategy, self._world)
        return run_steps(*where, steps=self._steps, seed=self._seed, **options)

    def _recipe(self, key: Strategy, *, double: bool = False) -> Recipe:
        return Recipe(
            steps=self._steps,
            seed=self._seed,
            device=self._world.device,
            micro_batch=key.micro_batch,
            arithmetic=double_arithmetic if double else nullcontext,
        )


def _takes_double(strategy: Strategy) -> bool:
    """Not DeepSpeed, which takes at most fp32, nor compiled models, which have one dtype, nor several threads: a torch
    function mode belongs to one thread."""
    return strategy.engine == "torch" and not strategy.compile and not strategy.traits.many_devices


def _run_disturbed(
    run: Callable[[Perturbation | None], Evidence], *, by: float, order_bound: float
) -> tuple[Evidence, list[Evidence]]:
    """An exact run and two disturbed ones. The second reverses samples, unless that changes more than rounding does,
    as under BatchNorm over micro-batches."""
    exact, moved = run(None), run(Perturbation(seed=1, by=by))
    turned = run(Perturbation(seed=2, by=by, backwards=True))
    if not abs(turned.losses[0] - exact.losses[0]) <= order_bound * abs(exact.losses[0]):
        turned = run(Perturbation(seed=2, by=by))
    return exact, [moved, turned]


class StoredReferences:
    """References that another process made, read from its folder."""

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


def find_cause_apart(task: CauseTask, folder: Path) -> str | None:
    """Look in another process for a cause of differences in the job."""
    try:
        run_apart(task, folder)
    except MeshwrightError:
        return None  # the verdicts stand without it
    return json.loads((folder / "cause.json").read_text())  # type: ignore[no-any-return]


def run_apart(task: ReferenceTask | CauseTask, folder: Path) -> None:
    """Run a task in another process, which writes its results to the folder."""
    (folder / "task").write_bytes(pickle.dumps(task))
    command = [sys.executable, "-m", "meshwright.verify.references", str(folder)]
    # The child ends when its stdin closes, so it does not outlive this process.
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=sys.stderr, env=environment_without_ranks())
    try:
        code = child.wait()
    except BaseException:
        child.kill()
        raise
    finally:
        show_written(folder / WARNINGS)
    if (folder / "failure.json").exists():
        raise JobError(json.loads((folder / "failure.json").read_text()))
    if code:
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        raise MeshwrightError(f"The process that trains the job in plain PyTorch {how}; it needs memory for all of it.")


def main(folder: Path) -> None:
    """Entry point of the process: writes references and an index of them, or a cause."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    write_warnings(folder / WARNINGS)
    task: ReferenceTask | CauseTask = pickle.loads((folder / "task").read_bytes())
    request = task.request
    try:
        job, device, seed = load_job(request.job), torch.device(task.device), request.seed
        if isinstance(task, CauseTask):
            (folder / "cause.json").write_text(json.dumps(find_cause(job, seed=seed, device=device)))
        else:
            local = LocalReferences(job, task.facts, device, steps=request.steps, seed=seed)
            index = _make_all(local, task.wanted, folder)
            (folder / "index.json").write_text(json.dumps(index))
    except BadInput as error:
        (folder / "failure.json").write_text(json.dumps(str(error)))
    exit_now(0)


def _make_all(local: LocalReferences, wanted: Sequence[Strategy], folder: Path) -> dict[str, dict[str, Any]]:
    index: dict[str, dict[str, Any]] = {"references": {}, "processes": {}}
    names: dict[int, str] = {}
    for number, strategy in enumerate(wanted):
        if strategy.traits.one_process:
            index["processes"][str(strategy)] = local.verdict_on_process(strategy).to_json()
            continue
        reference = local.of(strategy)
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
