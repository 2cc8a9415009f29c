"""Forecasts and rehearsals that `plan` and `rehearse` found, kept until `train` compares its run with them.

They are small files in the user's cache folder, one for each job, strategy, number of ranks and global batch. A job
file that has changed since is another job.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshwright.environment import cache_folder
from meshwright.facts.cluster import Cluster
from meshwright.facts.plan import Ranking
from meshwright.facts.strategy import Strategy
from meshwright.units import GIB

ORDER = ("rehearse", "plan")
"""Whose figures are preferred: measured ones before forecasts."""
CPU = "cpu"
MOST = 1000
"""Files that are kept; the oldest leave."""


def keep_rehearsal(document: Mapping[str, Any]) -> None:
    """Keep the result of a rehearsal that ran."""
    if document["status"] != "ok":
        return
    measured = document["measured"]
    figures = {name: measured[name] for name in ("peak_gib", "reserved_gib", "step_ms")}
    about = {"device": document["device"], "cluster": document["cluster"]}
    _keep(
        document["job"], document["strategy"], document["world"], document["global_batch"], "rehearse", about | figures
    )


def keep_plans(ranking: Ranking, cluster: Cluster, *, global_batch: int) -> None:
    """Keep the forecasts of a ranking."""
    for plan in ranking.plans:
        figures = {
            "peak_gib": plan.peak / GIB,
            "reserved_gib": plan.forecast.peak / GIB,
            "step_ms": plan.forecast.step * 1e3,
            "cluster": ranking.cluster,
            "device": cluster.device,
        }
        _keep(ranking.job, str(plan.strategy), cluster.devices, global_batch, "plan", figures)


def kept_forecast(job: str, strategy: str, ranks: int, global_batch: int, *, device: str) -> dict[str, Any] | None:
    """What is known about a run: figures and who found them; None if nothing is, or only for another kind of device."""
    try:
        found = json.loads(_path(job, strategy, ranks, global_batch).read_text())
    except (OSError, ValueError):
        return None
    known = {name: found[name] for name in ORDER if name in found}
    alike = [name for name, figures in known.items() if (figures["device"] == CPU) == (device == CPU)]
    return {"source": alike[0], **known[alike[0]]} if alike else None


def compare_run(summary: Mapping[str, Any], job: str) -> dict[str, Any] | None:
    """Forecast against measured for a finished run; None if nothing is known about it.

    On a CPU a run's peak is that of its whole process, which no forecast is about, so only time is compared.
    """
    device, ranks = summary["device"], summary["ranks"]
    known = kept_forecast(job, summary["strategy"], ranks, summary["global_batch"], device=device)
    if known is None:
        return None
    peak = None if device == CPU else max(summary["peak_bytes"]) / GIB
    measured = {"peak_gib": peak, "step_ms": summary["step_ms"]}
    pairs = {"memory": (known["peak_gib"], peak), "time": (known["step_ms"], summary["step_ms"])}
    errors = {name: told / seen - 1 if told and seen else None for name, (told, seen) in pairs.items()}
    return {"forecast": known, "measured": measured, "error": errors}


def _keep(job: str, strategy: str, ranks: int, batch: int, source: str, figures: Mapping[str, Any]) -> None:
    """Add figures to a file of the cache. A folder that cannot be written is no reason to fail."""
    path = _path(job, strategy, ranks, batch)
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        found = {}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
            json.dump({**found, "job": job, "strategy": strategy, source: dict(figures)}, file)
        os.replace(file.name, path)
        _forget_oldest(path.parent)
    except OSError:
        return


def _path(job: str, strategy: str, ranks: int, batch: int) -> Path:
    resolved = str(Strategy.parse(strategy).resolve(ranks))
    key = json.dumps([_identity(job), resolved, ranks, batch])
    return cache_folder() / "forecasts" / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"


def _identity(job: str) -> list[str]:
    """The job's text and, of a file, its place and content."""
    file = Path(job.partition(":")[0])
    if file.suffix != ".py" or not file.is_file():
        return [job]
    return [job, str(file.resolve()), hashlib.sha256(file.read_bytes()).hexdigest()]


def _forget_oldest(folder: Path) -> None:
    files = sorted(folder.glob("*.json"), key=lambda path: path.stat().st_mtime)
    for path in files[:-MOST]:
        path.unlink(missing_ok=True)
