"""Peaks by moment and cause."""

from meshwright.tracing.memory import Ledger


def test_each_moment_has_its_peak() -> None:
    ledger = Ledger()
    weights = ledger.allocate(4096, "parameters")
    since = len(ledger.events)
    ledger.moment = "forward"
    first = ledger.allocate(1024, "activations")
    ledger.free(ledger.allocate(2048, "temporary"))
    ledger.moment = "backward"
    ledger.free(first)
    ledger.allocate(512, "gradients")
    assert weights is not None and first is not None
    assert ledger.peaks(since) == {
        "forward": {"parameters": 4096, "activations": 1024, "temporary": 2048},
        "backward": {"parameters": 4096, "activations": 0, "temporary": 0, "gradients": 512},
    }


def test_a_cause_may_become_known_later() -> None:
    ledger = Ledger()
    block = ledger.allocate(100, "temporary")
    assert block is not None
    block.cause = "gradients"
    assert ledger.peaks() == {"build": {"gradients": 512}}


def test_tensors_without_elements_take_nothing() -> None:
    ledger = Ledger()
    ledger.free(ledger.allocate(0, "temporary"))
    assert not ledger.events
