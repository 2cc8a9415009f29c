"""Gradients in the step of a traced rank: when they are reduced, and in which dtype."""

import pytest

from traced_decoders import sent, trace, weights


@pytest.mark.parametrize(
    "strategy",
    ["fsdp", *(pytest.param(s, marks=pytest.mark.thorough) for s in ("zero2,bf16", "fsdp:grad-op", "hsdp=2x2"))],
)
def test_sharded_gradients_are_reduced_in_each_micro_batch_or_once(strategy: str) -> None:
    """Four micro-batches on each of four ranks. Reduced in each, gradients rest in shards; once, they rest whole.

    The difference of the peaks is less than that: while a unit's gradients are reduced, they are whole in both.
    """
    layers, axis, shards = 8, "shard" if "hsdp" in strategy else "data", 2 if "hsdp" in strategy else 4
    each, last = (trace(f"{strategy},mb=1{how}", 4, layers=layers) for how in ("", ",sync=last"))
    assert sent(last, "reduce_scatter", axis) == pytest.approx(4 * weights(layers), rel=0.01)
    assert sent(each, "reduce_scatter", axis) == pytest.approx(4 * sent(last, "reduce_scatter", axis))
    assert last.peak - each.peak > 0.5 * (1 - 1 / shards) * 4 * weights(layers)


@pytest.mark.parametrize("strategy", ["fsdp,pp=2:1f1b", pytest.param("zero2,pp=2:1f1b", marks=pytest.mark.thorough)])
def test_a_stage_reduces_in_each_micro_batch_or_once(strategy: str) -> None:
    """Eight micro-batches on each of two data ranks."""
    layers = 8
    each, last = (trace(f"{strategy},mb=1{how}", 4, layers=layers) for how in ("", ",sync=last"))
    assert sent(each, "reduce_scatter", "data") == pytest.approx(8 * sent(last, "reduce_scatter", "data"))
    # Half of a stage's gradients is in the other rank's shard; while a unit's are reduced, they are whole in both.
    assert last.peak - each.peak > 0.15 * 4 * weights(layers) / 2


@pytest.mark.parametrize(
    ("strategy", "kind", "axis"),
    [
        ("ddp", "all_reduce", "data"),
        ("zero2", "reduce_scatter", "data"),
        ("fsdp", "reduce_scatter", "data"),
        *(
            pytest.param(*case, marks=pytest.mark.thorough)
            for case in (
                ("zero1", "reduce_scatter", "data"),
                ("fsdp:grad-op,mb=1", "reduce_scatter", "data"),
                ("zero2,mb=1,sync=last", "reduce_scatter", "data"),
                ("hsdp=2x2", "reduce_scatter", "shard"),
                ("hsdp=2x2", "all_reduce", "replica"),
                ("ddp,pp=2:1f1b", "all_reduce", "data"),
                ("zero1,pp=2:1f1b", "reduce_scatter", "data"),
                ("fsdp,pp=2:1f1b", "reduce_scatter", "data"),
            )
        ),
    ],
)
def test_gradients_that_are_reduced_in_bf16_are_half_the_bytes(strategy: str, kind: str, axis: str) -> None:
    full, half = (trace(f"{strategy},bf16{how}", 4) for how in ("", ",reduce=bf16"))
    whole, rounded = (sent(found, kind, axis, "backward") for found in (full, half))
    assert 0 < rounded == pytest.approx(whole / 2, rel=0.001)
    assert sent(half, "all_gather", axis) == sent(full, "all_gather", axis)
