"""How a global batch is cut, in the three numbers that other frameworks ask for."""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.exchange.errors import ExchangeError
from meshwright.exchange.export_request import ExportRequest, Unsupported
from meshwright.facts.strategy import Strategy


@dataclass(frozen=True, kw_only=True)
class Batches:
    """`micro * steps * data ranks == total`, which others insist on."""

    micro: int
    """Samples of a rank in one forward pass."""
    steps: int
    """Micro-steps of one optimizer step."""
    total: int


def cut(request: ExportRequest, strategy: Strategy, *, alone: int) -> Batches:
    """Our micro-steps in their numbers; `alone` is the micro-batch where neither strategy nor job names one."""
    ranks = strategy.data_ranks
    if request.global_batch is None:
        micro = strategy.micro_batch or alone
        return Batches(micro=micro, steps=1, total=micro * ranks)
    samples, over = divmod(request.global_batch, ranks)
    steps = 1 if strategy.micro_batch is None else -(-samples // strategy.micro_batch)
    if over or not samples or samples % steps:
        raise ExchangeError(
            f"A global batch of {request.global_batch} was to be cut over {ranks} data ranks in {max(steps, 1)} "
            "micro-steps, and the other side takes equal parts only; choose mb=N so that N times the data ranks "
            "divides the global batch, or another batch with --batch."
        )
    return Batches(micro=samples // steps, steps=steps, total=request.global_batch)


def named(strategy: Strategy, micro: int) -> tuple[Unsupported, ...]:
    """The loss that tells of a micro-batch which the strategy has left open or has otherwise."""
    if strategy.micro_batch == micro:
        return ()
    becomes = {"micro_batch": micro}
    if strategy.micro_batch is None:
        return (
            Unsupported(
                term="mb", says=f"the strategy names none, and the file has to: it says {micro}", becomes=becomes
            ),
        )
    says = f"a rank's samples are cut into equal parts there, which are {micro} each"
    return (Unsupported(term=f"mb={strategy.micro_batch}", says=says, becomes=becomes),)
