"""Divide a global batch as other frameworks do: micro-batch, accumulation steps and total."""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.exchange.errors import ExchangeError
from meshwright.exchange.export_request import ExportRequest, Unsupported
from meshwright.facts.strategy import Strategy


@dataclass(frozen=True, kw_only=True)
class Batches:
    """A global batch with `micro * steps * data ranks == total`, which other frameworks require."""

    micro: int
    """Samples per rank and forward pass."""
    steps: int
    """Micro-batches per optimizer step."""
    total: int


def cut(request: ExportRequest, strategy: Strategy, *, alone: int) -> Batches:
    """Divide the request's global batch; `alone` is the micro-batch if neither strategy nor job sets one."""
    ranks = strategy.data_ranks
    if request.global_batch is None:
        micro = strategy.micro_batch or alone
        return Batches(micro=micro, steps=1, total=micro * ranks)
    samples, over = divmod(request.global_batch, ranks)
    steps = 1 if strategy.micro_batch is None else -(-samples // strategy.micro_batch)
    if over or not samples or samples % steps:
        raise ExchangeError(
            f"A global batch of {request.global_batch} cannot be divided equally over {ranks} data ranks and "
            f"{max(steps, 1)} micro-batches, as the other framework requires; choose mb=N so that N times the data "
            "ranks divides the global batch, or another batch with --batch."
        )
    return Batches(micro=samples // steps, steps=steps, total=request.global_batch)


def named(strategy: Strategy, micro: int) -> tuple[Unsupported, ...]:
    """Report a micro-batch size that the strategy leaves open or sets differently."""
    if strategy.micro_batch == micro:
        return ()
    becomes = {"micro_batch": micro}
    if strategy.micro_batch is None:
        says = f"the strategy sets none, but the file must: it says {micro}"
        return (Unsupported(term="mb", says=says, becomes=becomes),)
    says = f"a rank's samples are cut into equal parts there, of {micro} each"
    return (Unsupported(term=f"mb={strategy.micro_batch}", says=says, becomes=becomes),)
