"""Outputs of records beside JSON lines: always a CSV file, and on request Weights & Biases and MLflow.

Both tools are used through their clients, with the clients' usual variables: `WANDB_MODE=offline` keeps a run on this
machine, `MLFLOW_TRACKING_URI` names a server. A client that fails causes a warning and does not end the training.
"""

from __future__ import annotations

import csv
import math
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from meshwright.environment import mlflow_uri, wandb_project
from meshwright.errors import BadInput, one_line

CSV = "records.csv"
PROJECT = "meshwright"
SERVICES = {"tensorboard": "tensorboard", "wandb": "wandb", "mlflow": "mlflow"}
"""Values of `--log-to`, and the package that each needs."""
Record = Mapping[str, Any]


class Sink(Protocol):
    """Output that gets one record per step."""

    def write(self, record: Record) -> None: ...

    def close(self) -> None: ...


def check_services(names: Sequence[str], folder: Path | None) -> None:
    """Refuse `--log-to` values that cannot work, before the run starts."""
    for name in names:
        if name not in SERVICES:
            raise BadInput(
                f"--log-to {name!r} is none of {', '.join(SERVICES)}; CSV and JSON lines are always written."
            )
        if find_spec(SERVICES[name]) is None:
            raise BadInput(f"--log-to {name} needs the package: pip install 'meshwright[{name}]'.")
    if names and folder is None:
        raise BadInput(f"--log-to {names[0]} writes into the run's folder; give --out a folder.")


def open_services(names: Sequence[str], folder: Path, about: Record) -> list[Sink]:
    """Open clients, which continue this folder's earlier run if there is one. `about` describes the run."""
    makers: dict[str, Callable[[Path, Record], Sink]] = {"wandb": WandbRun, "mlflow": MlflowRun}
    sinks = []
    for name in names:
        try:
            sinks.append(makers[name](folder, about))
        except Exception as error:  # no key, no server, a deleted run: clients raise many classes
            raise BadInput(f"--log-to {name} was given, but its client cannot start: {one_line(error)}") from error
    return sinks


class CsvFile:
    """Writes one line per step; the first record names the columns."""

    def __init__(self, folder: Path, *, after: int = 0) -> None:
        """A run resumed `after` a step repeats later steps, so their old lines are dropped."""
        path, part = folder / CSV, folder / f"{CSV}.part"
        kept = _rows_until(path, after)
        self._names = list(kept[0]) if kept else []
        self._file = part.open("w", buffering=1, newline="")
        if kept:
            self._writer().writeheader()
            self._writer().writerows(kept)
        part.replace(path)

    def write(self, record: Record) -> None:
        if not self._names:
            self._names = list(record)
            self._writer().writeheader()
        self._writer().writerow(record)

    def close(self) -> None:
        self._file.close()

    def _writer(self) -> csv.DictWriter[str]:
        return csv.DictWriter(self._file, self._names, restval="", extrasaction="ignore", lineterminator="\n")


def _rows_until(path: Path, step: int) -> list[dict[str, str]]:
    """Complete lines up to a step; a killed run may have left half a line."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    whole = [row for row in rows if None not in row.values() and (row.get("step") or "").isdigit()]
    return [row for row in whole if int(row["step"]) <= step]


class WandbRun:
    """A run of Weights & Biases; a resumed run keeps its id."""

    def __init__(self, folder: Path, about: Record) -> None:
        import wandb

        marker = folder / "wandb-run"
        known = marker.read_text() if marker.exists() else None
        self._run = wandb.init(
            project=wandb_project(PROJECT),
            dir=str(folder),
            name=folder.name,
            id=known,
            resume="allow" if known else None,
            config=dict(about),
        )
        marker.write_text(str(self._run.id))

    def write(self, record: Record) -> None:
        self._run.log(numbers(record), step=record["step"])

    def close(self) -> None:
        self._run.finish()


class MlflowRun:
    """A run of MLflow, on the configured server or in a file in the run's folder."""

    def __init__(self, folder: Path, about: Record) -> None:
        from mlflow.tracking import MlflowClient

        uri = mlflow_uri(f"sqlite:///{(folder / 'mlflow.db').resolve()}")
        self._client = MlflowClient(tracking_uri=uri)
        marker = folder / "mlflow-run"
        if marker.exists():
            self._id = marker.read_text()
            self._client.update_run(self._id, status="RUNNING")
        else:
            self._id = self._begin(folder, about)
            marker.write_text(self._id)

    def _begin(self, folder: Path, about: Record) -> str:
        found = self._client.get_experiment_by_name(PROJECT)
        experiment = found.experiment_id if found else self._client.create_experiment(PROJECT)
        run_id = str(self._client.create_run(experiment, run_name=folder.name).info.run_id)
        for name, value in about.items():
            self._client.log_param(run_id, name, value)
        return run_id

    def write(self, record: Record) -> None:
        from mlflow.entities import Metric

        step, now = int(record["step"]), int(time.time() * 1e3)
        metrics = [Metric(name, float(value), now, step) for name, value in numbers(record).items()]
        self._client.log_batch(self._id, metrics=metrics)

    def close(self) -> None:
        self._client.set_terminated(self._id)


def numbers(record: Record) -> dict[str, float]:
    """The finite numbers of a record, which can be plotted."""
    return {
        name: value
        for name, value in record.items()
        if name != "step" and isinstance(value, int | float) and math.isfinite(value)
    }
