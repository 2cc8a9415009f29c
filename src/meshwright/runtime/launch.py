"""Start ranks on this machine through torch's elastic launcher, and bring back the first failure's own words."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from meshwright import errors
from meshwright.runtime.environment import environment_for_ranks, own_folder, own_rank

WORKER = "meshwright.runtime.worker"


def launch(request: dict[str, Any], ranks: int, *, results: list[Any]) -> None:
    """Run the worker once per rank and wait. What rank 0 reports goes to `results`, also if a rank fails later.

    The first failure is raised as that rank told it.
    """
    with tempfile.TemporaryDirectory(prefix="meshwright-") as folder:
        path = Path(folder)
        (path / "request.json").write_text(json.dumps(request))
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=ranks,
            run_id=path.name,
            rdzv_backend="c10d",
            rdzv_endpoint="127.0.0.1:0",
            local_addr="127.0.0.1",
            max_restarts=0,
            monitor_interval=0.1,
            logs_specs=DefaultLogsSpecs(log_dir=folder, redirects=_only_rank_0_speaks(ranks)),
        )
        # We say ourselves what failed, in one sentence.
        logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
        try:
            with environment_for_ranks(ranks, folder):
                elastic_launch(config, sys.executable)("-u", "-m", WORKER)
        except ChildFailedError as error:
            raise _first_failure(path, error) from None
        except SignalException as signalled:
            raise KeyboardInterrupt(signalled.sigval.name) from None
        finally:
            results += read_results(path)


def report(document: Any) -> None:
    """Rank 0 tells the launcher something; each call is one result."""
    folder = own_folder()
    if folder is not None and own_rank() == 0:
        with (folder / "results.jsonl").open("a") as file:
            file.write(json.dumps(document) + "\n")


def read_results(folder: Path) -> list[Any]:
    path = folder / "results.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def guard(run: Callable[[], Any]) -> None:
    """Run a rank's work; on failure leave its last words for the launcher and go."""
    try:
        run()
    except BaseException as error:
        _leave_words(error)
        sys.stderr.flush()
        # Peers wait in collectives that this rank will not reach: leave at once, without a farewell to them.
        os._exit(getattr(error, "exit_code", 1))


def _only_rank_0_speaks(ranks: int) -> dict[int, Std] | Std:
    return {rank: Std.ALL for rank in range(1, ranks)} or Std.NONE


def _leave_words(error: BaseException) -> None:
    folder, rank = own_folder(), own_rank()
    if folder is None:
        traceback.print_exc()
        return
    words = {
        "rank": rank,
        "time": time.time(),
        "kind": type(error).__name__,
        "message": str(error),
        "traceback": "".join(traceback.format_exception(error)),
    }
    path = folder / f"failure-{rank}.json"
    path.with_suffix(".part").write_text(json.dumps(words))
    path.with_suffix(".part").rename(path)


def _first_failure(folder: Path, failed: ChildFailedError) -> errors.MeshwrightError:
    words = sorted((json.loads(path.read_text()) for path in folder.glob("failure-*.json")), key=lambda w: w["time"])
    # A rank that a signal ended could say nothing, and what its peers say is only that they lost it.
    ended = {rank: f for rank, f in failed.failures.items() if f.exitcode < 0 and f.exitcode != -signal.SIGTERM}
    if ended or not words:
        rank, failure = next(iter(ended.items()), failed.get_first_failure())
        return errors.RankFailed(_ended(rank, failure.exitcode), rank=rank, traceback=_last_lines(folder, rank))
    first = words[0]
    kind = getattr(errors, first["kind"], None)
    if isinstance(kind, type) and issubclass(kind, errors.BadInput):
        return kind(first["message"])
    message = f"Rank {first['rank']} failed: {first['kind']}: {first['message']}"
    return errors.RankFailed(message, rank=first["rank"], traceback=first["traceback"])


def _ended(rank: int, code: int) -> str:
    if code >= 0:
        return f"Rank {rank} ended with exit code {code} and said nothing."
    name = signal.Signals(-code).name
    advice = "; the machine may have run out of memory" if name == "SIGKILL" else ""
    return f"Rank {rank} was ended by {name}{advice}."


def _last_lines(folder: Path, rank: int, count: int = 20) -> str:
    """The end of what a silent rank wrote to its stderr."""
    logs = [path for path in folder.rglob("stderr.log") if path.parent.name == str(rank)]
    return "\n".join(logs[0].read_text(errors="replace").splitlines()[-count:]) if logs else ""
