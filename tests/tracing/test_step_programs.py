"""The recorded programs of a tensor axis in the step of a traced rank, compiled or not."""

from collections import Counter
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
from torch import nn

from meshwright.describe.model import describe
from meshwright.facts.strategy import Strategy
from meshwright.jobs.decoder import Shape, decoder_job
from meshwright.strategies.tensor import replay
from meshwright.strategies.tensor.compiled import MADE
from meshwright.tracing import record_step, trace_step
from traced_decoders import facts_of, job_of, sent, trace


def test_tensor_parallel_divides_and_says_so() -> None:
    found = trace("tp=2", 2)
    assert found.memory["parameters"] < 0.6 * trace("single").memory["parameters"]
    assert sent(found, "all_gather", "tensor") > 0


def test_a_tensor_axis_runs_the_programs_that_training_runs() -> None:
    """Attention keeps the joint product of query, key and value alive, and its output is copied to be sent."""
    shape = Shape(layers=3, width=64, heads=8, kv_heads=4, feed_forward=128, vocabulary=64, length=256)
    job = decoder_job(shape, global_batch=8)
    programs = trace_step(job, describe(job), Strategy.parse("tp=2,bf16"), ranks=2)
    with patch.object(replay, "_enabled", False):
        plain = trace_step(job, describe(job), Strategy.parse("tp=2,bf16"), ranks=2)
    query_key_output = (64 + 32 + 64) * 8 * 256 * 2 // 2
    # A head keeps its gathered input as it came, or in order: then it is no message's memory.
    kept = [found.memory["activations"] + found.memory.get("communication", 0) for found in (programs, plain)]
    assert kept[0] - kept[1] == 3 * query_key_output
    assert sent(programs, "all_gather", "tensor") == sent(plain, "all_gather", "tensor")
    summed = [sum(m.count for m in found.messages if m.kind == "all_reduce") for found in (programs, plain)]
    assert summed[0] < summed[1]  # the gradients of a block's norms are one message


def test_a_model_that_reads_values_runs_its_programs_too() -> None:
    """As Hugging Face's do, which look at positions and masks before their first block."""
    job = job_of()

    def build() -> nn.Module:
        model = job.model()
        model.register_forward_pre_hook(lambda module, inputs: None if int(inputs[0].max()) >= 0 else inputs)
        return model

    reading = replace(job, model=build)
    peaks = [trace_step(one, describe(one), Strategy.parse("tp=2,bf16"), ranks=2).peak for one in (job, reading)]
    assert peaks[0] == peaks[1]
    with patch.object(replay, "_enabled", False):
        assert trace_step(job, describe(job), Strategy.parse("tp=2,bf16"), ranks=2).peak != peaks[0]


def test_compiled_programs_send_the_same_and_launch_less() -> None:
    compiled, eager = (trace(strategy, 2, layers=10) for strategy in ("tp=2,compile", "tp=2"))
    assert compiled.messages and Counter(compiled.messages) == Counter(eager.messages)
    launches = [sum(operation.count for operation in found.operations) for found in (compiled, eager)]
    assert launches[0] < launches[1]
    assert not compiled.unseen
    assert compiled.peak == trace("tp=2,compile", 2, layers=10, whole=True).peak


def test_no_program_of_a_trace_is_left() -> None:
    before = dict(MADE)
    trace("tp=2,compile", 2, layers=1)
    assert before == MADE


@pytest.mark.parametrize(("text", "steps"), [("ddp", 2), ("tp=2", 3), ("tp=2,compile", 2)])
def test_the_recorded_step_is_like_all_later_ones(text: str, steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the first step records programs, the second is the first that runs them, and the third is recorded."""
    taken = []
    step = record_step._step

    def counted(*args: Any) -> None:
        taken.append(args)
        step(*args)

    monkeypatch.setattr(record_step, "_step", counted)
    job = job_of()
    trace_step(job, facts_of(job), Strategy.parse(text), ranks=2, whole=True)
    assert len(taken) == steps
