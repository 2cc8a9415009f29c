"""Score the planner against measured runs: build, describe and trace each row's decoder, and forecast its run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from meshwright.describe.model import describe
from meshwright.errors import BadInput, MeshwrightError, Refused
from meshwright.facts.catalogue import hardware_of
from meshwright.facts.costs import ModelCosts
from meshwright.facts.hardware import Hardware
from meshwright.facts.job import Job
from meshwright.facts.kernel_table import KernelTable, find_table, shipped_table
from meshwright.facts.model import ModelFacts
from meshwright.jobs.decoder import Shape, decoder_job
from meshwright.jobs.decoder_losses import fused_loss_job, shifted_loss_job
from meshwright.planner.account import account, usable
from meshwright.planner.measured_kernels import KernelPrices
from meshwright.planner.measured_runs import MeasuredRun, SkippedRow, read_rows, read_table
from meshwright.planner.scores import ScoredRun
from meshwright.planner.search import ROOM
from meshwright.planner.stage_costs import StageCosts
from meshwright.probe.machine import torch_release
from meshwright.tracing.costs import measure_costs
from meshwright.units import GIB

Progress = Callable[[int, int], None]
"""Called with the number of finished rows and the total."""


@dataclass(frozen=True)
class Validated:
    """The forecasts of a table's rows, and the rows without one."""

    outcomes: list[ScoredRun]
    skipped: list[SkippedRow]


def validate_rows(path: Path, progress: Progress = lambda done, total: None) -> list[ScoredRun]:
    """Forecast every measured run in a CSV file; an error if one of them cannot be."""
    return _forecast(read_rows(path), progress, skipped=None)


def validate_table(
    path: Path, progress: Progress = lambda done, total: None, kernels: tuple[KernelTable, ...] = ()
) -> Validated:
    """Forecast the measured runs in a CSV file that can be, and name the others.

    Rows of a device in `kernels` are forecast with its measured kernels.
    """
    rows, skipped = read_table(path)
    return Validated(_forecast(rows, progress, skipped, kernels), skipped)


def _forecast(
    rows: list[MeasuredRun],
    progress: Progress,
    skipped: list[SkippedRow] | None,
    kernels: tuple[KernelTable, ...] = (),
) -> list[ScoredRun]:
    shapes, outcomes = _Shapes(kernels), []
    for done, row in enumerate(rows, start=1):
        try:
            outcomes.append(_outcome(row, shapes))
        except Exception as error:  # PyTorch's, of sizes that it cannot describe, or our own mistake: other rows count
            if skipped is None:
                raise
            skipped.append(SkippedRow(row.name, _reason(error)))
        progress(done, len(rows))
    return outcomes


def _reason(error: Exception) -> str:
    message = str(error).rstrip(".")
    return message if isinstance(error, MeshwrightError) else f"{type(error).__name__}: {message}".rstrip(": ")


def _outcome(row: MeasuredRun, shapes: _Shapes) -> ScoredRun:
    hardware, precision = hardware_of(row.cluster), row.step_layout.precision
    if precision not in hardware.flops:
        raise BadInput(f"{hardware.device} has no units for {precision}, or none that the row or the catalogue names")
    try:
        found = account(row.step_layout, shapes.stage_costs(row, hardware), hardware, row.cluster.devices_per_node)
    except Refused as error:
        return ScoredRun(row=row, account=None, fits=False, reason=str(error))
    fits = found.fits(hardware)
    reason = "" if fits else f"{found.reserved / GIB:.1f} of {usable(hardware) / GIB:.1f} GiB"
    safely = found.reserved <= ROOM * usable(hardware)
    return ScoredRun(row=row, account=found, fits=fits, safely=safely, reason=reason)


class _Shapes:
    """Describes and traces each decoder shape once."""

    def __init__(self, kernels: tuple[KernelTable, ...] = ()) -> None:
        self._kernels = kernels
        self._facts: dict[tuple[Shape, str], tuple[Job, ModelFacts, dict[tuple[str, str], ModelCosts]]] = {}
        self._stage_costs: dict[object, StageCosts] = {}

    def stage_costs(self, row: MeasuredRun, hardware: Hardware) -> StageCosts:
        key = (row.shape, row.loss)
        if key not in self._facts:
            job = _JOBS[row.loss](row.shape)
            self._facts[key] = job, describe(job), {}
        job, facts, costs = self._facts[key]
        precision, recompute = row.step_layout.precision, row.step_layout.recompute
        if (precision, "none") not in costs:
            costs[precision, "none"] = measure_costs(job, facts, precision)
        if (precision, recompute) not in costs:
            costs[precision, recompute] = costs[precision, "none"].recomputed(recompute)
        place = (key, row.cluster)
        if place not in self._stage_costs:
            measured = find_table(self._kernels, hardware.device, torch_release()) or shipped_table(hardware.device)
            # What a host or an update takes there is not known: the rows are of other engines.
            prices = KernelPrices(replace(measured, step=0.0, updates=()), hardware) if measured else None
            self._stage_costs[place] = StageCosts(facts, costs, hardware, by_compute=True, prices=prices)
        return self._stage_costs[place]


_JOBS: dict[str, Callable[[Shape], Job]] = {
    "plain": lambda shape: decoder_job(shape, global_batch=1),
    "shifted": lambda shape: shifted_loss_job(shape, global_batch=1),
    "fused": lambda shape: fused_loss_job(shape, global_batch=1),
}
