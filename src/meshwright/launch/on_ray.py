"""Run ranks as workers of Ray Train's TorchTrainer, on a Ray cluster or on this machine alone.

Ray places the workers, starts them and makes torch's process group; what they run is the same as under torchrun. Ray
would also restart them, but after a user's mistake and after a rank ran out of memory, too. So each attempt is one
`fit`, and whether another one follows is decided here, as for ranks that Meshwright starts itself.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.errors import BadInput, MeshwrightError, RankFailed, one_line

HERE = "ray"
"""`--on ray`: the cluster that this machine belongs to, or a new one on this machine."""
WAIT_S = 1800
"""Seconds that a collective waits for a rank."""


@dataclass(frozen=True, kw_only=True)
class RayOptions:
    """Where Ray runs the ranks, and how."""

    address: str | None = None
    """None: the cluster that this machine belongs to, or else a new one here."""
    spread: bool = False
    """Whether ranks are placed on many nodes; by default on few, so that inner axes stay within a node."""
    cpus: float = 1.0
    """CPUs that each rank reserves."""

    @classmethod
    def parse(cls, text: str) -> RayOptions:
        """Read `ray`, or the address of a cluster, `ray://HOST:PORT`."""
        if text != HERE and not text.startswith("ray://"):
            raise BadInput(f"--on {text!r} is neither ray nor ray://HOST:PORT; leave it out to start ranks here.")
        return cls(address=None if text == HERE else text)


def run_on_ray(
    work: Callable[[Any], dict[str, Any]],
    task: Callable[[int], Any],
    ranks: int,
    options: RayOptions,
    *,
    device: str,
    restarts: int,
) -> dict[str, Any]:
    """Run `work(task(attempt))` on every rank and return what rank 0's returned.

    If a rank or a node is lost, all ranks start again, at most `restarts` times. A user's mistake is raised at once.
    """
    _require_ray()
    with _connected(options.address):
        for attempt in range(restarts + 1):
            try:
                return _fit(work, task(attempt), ranks, options, device=device)
            except MeshwrightError as error:
                if isinstance(error, BadInput) or attempt == restarts:
                    raise
                print(f"{str(error).splitlines()[0]}; restart {attempt + 1} of {restarts}", file=sys.stderr, flush=True)
    raise AssertionError("each attempt returns or raises")


def _require_ray() -> None:
    try:
        import ray.train.torch  # noqa: F401  # only to check that it is installed
    except ImportError:
        raise BadInput("--on ray needs Ray Train: pip install 'meshwright[ray]'.") from None


@contextmanager
def _connected(address: str | None) -> Iterator[None]:
    """A connection to the cluster. One that the caller has stays as it is."""
    import ray

    own = not ray.is_initialized()
    if own:
        try:
            ray.init(address=address, log_to_driver=True, include_dashboard=False if address is None else None)
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise BadInput(f"The Ray cluster {address or 'here'} cannot be reached: {one_line(error)}") from None
    try:
        yield
    finally:
        if own:
            ray.shutdown()


def _fit(
    work: Callable[[Any], dict[str, Any]], task: Any, ranks: int, options: RayOptions, *, device: str
) -> dict[str, Any]:
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    _refuse_too_few(ranks, options, device)
    resources = {"CPU": options.cpus, **({"GPU": 1} if device == "cuda" else {})}
    trainer = TorchTrainer(
        _work,
        train_loop_config={"work": work, "task": task},
        torch_config=TorchConfig(backend="cpu:gloo,cuda:nccl" if device == "cuda" else "gloo", timeout_s=WAIT_S),
        scaling_config=ScalingConfig(
            num_workers=ranks,
            use_gpu=device == "cuda",
            resources_per_worker=resources,
            placement_strategy="SPREAD" if options.spread else "PACK",
        ),
        run_config=RunConfig(storage_path=_storage(), failure_config=FailureConfig(max_failures=0)),
    )
    try:
        result = trainer.fit()
    except Exception as error:
        raise _cause(error) from None
    return dict(result.return_value)


def _work(config: dict[str, Any]) -> dict[str, Any]:
    """What each worker runs. Ray hands back what rank 0 returns."""
    done: dict[str, Any] = config["work"](config["task"])
    return done


def _refuse_too_few(ranks: int, options: RayOptions, device: str) -> None:
    """Ray would wait for missing devices without end; a cluster that adds nodes on demand is not refused."""
    import ray

    there = ray.cluster_resources()
    kind, needed = ("GPU", float(ranks)) if device == "cuda" else ("CPU", ranks * options.cpus)
    if there.get(kind, 0.0) < needed:
        print(
            f"The Ray cluster has {there.get(kind, 0.0):g} {kind}s and {ranks} ranks need {needed:g}; "
            "waiting for more nodes.",
            file=sys.stderr,
            flush=True,
        )


def _storage() -> str:
    """Ray's own records of the run; checkpoints are written by Meshwright, into --out and --store."""
    return str(Path.home() / "ray_results")


def _cause(error: BaseException) -> MeshwrightError:
    """Our own error if a worker raised one, a user's mistake first; else the first worker's failure."""
    failures = getattr(error, "worker_failures", None) or {}
    chains = {rank: list(_chain(failure)) for rank, failure in sorted(failures.items())}
    ours = [one for chain in chains.values() for one in chain if isinstance(one, MeshwrightError)]
    ours.sort(key=lambda one: not isinstance(one, BadInput))
    if ours:
        return ours[0]
    rank, chain = next(iter(chains.items()), (0, [error]))
    return RankFailed(f"Rank {rank} failed on Ray: {one_line(chain[-1])}", rank=rank, traceback=str(error))


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """An error and its causes; Ray wraps what a worker raised."""
    while error is not None:
        yield error
        error = getattr(error, "cause", None) or error.__cause__
