"""Run a compiled graph without values: allocate and free its memory, and note its kernels."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from meshwright.describe.dtypes import WORDS
from meshwright.facts.compiled_blocks import FUSED
from meshwright.tracing.element_steps import compiled_scatter_steps
from meshwright.tracing.fusion import CompiledKernel, Program
from meshwright.tracing.layouts import Buffer
from meshwright.tracing.meter import OperatorRun, operator_run, strided_in
from meshwright.tracing.nodes import Key, is_scatter, operator_of, values_of
from meshwright.tracing.recorder import StepRecorder


class Runner:
    """Represents the code that a compiler writes for a graph."""

    _boxed_call = True
    """AOTAutograd passes the arguments in a list that is emptied, so that each is freed after its last read."""

    def __init__(self, program: Program, recorder: StepRecorder, moments: dict[Key, str]) -> None:
        """`moments` maps arguments and results to the moment at which they are read or written."""
        self._program, self._recorder, self._moments = program, recorder, moments
        # Without the values, which would be computed with.
        self._constants: dict[Key, Any] = {(n, 0): torch.empty_like(n.meta["val"]) for n in program.constants}

    def __call__(self, given: list[Any]) -> list[Any]:
        memory: dict[Key, Any] = {(n, 0): value for n, value in zip(self._program.inputs, given, strict=True)}
        given.clear()
        memory |= self._constants
        for node in self._program.unread:
            del memory[node, 0]
        for kernel in self._program.kernels:
            self._tell_moment(kernel)
            for key in kernel.writes:
                over = kernel.takes.get(key)
                memory[key] = memory[over] if over is not None else _empty(self._program.buffers[key])
            if not self._recorder.paused:
                self._note(kernel)
            for key in kernel.frees:
                del memory[key]
        return [_shown(memory[o[0]], o[1]) if o is not None else None for o in self._program.outputs]

    def _tell_moment(self, kernel: CompiledKernel) -> None:
        for key in kernel.reads | kernel.writes:
            if key in self._moments:
                self._recorder.at(f"{self._recorder.step_phase} of {self._moments[key]}")

    def _note(self, kernel: CompiledKernel) -> None:
        if kernel.node is not None:
            func, args = operator_of(kernel.node)
            args, kwargs = fx.node.map_arg((args, kernel.node.kwargs), lambda node: node.meta.get("val"))
            found = kernel.node.meta["val"] if "val" in kernel.node.meta else list(values_of(kernel.node).values())
            self._recorder.ran(func, args, kwargs, found)
            run = operator_run(func, args, kwargs, found, strided_in((args, kwargs)), strided_in(found))
            if is_scatter(kernel.node):
                run = replace(run, steps=compiled_scatter_steps(args))
            self._recorder.operations.compiled(run, self._recorder.step_phase)
            return
        written = [self._program.buffers[key] for key in kernel.writes]
        moved = [*(self._program.buffers[key] for key in kernel.reads), *written]
        most = max(moved, key=lambda buffer: (buffer.dtype.is_floating_point, buffer.bytes))
        operations, phase = self._recorder.operations, self._recorder.step_phase
        operations.note_fused(sum(b.bytes for b in moved), most.dtype, phase)
        operations.compiled(_fused_run(moved, written, most.dtype), phase)


def _fused_run(moved: list[Buffer], written: list[Buffer], dtype: torch.dtype) -> OperatorRun:
    """A kernel that was fused from many operators. It streams what it reads and writes."""
    return OperatorRun(
        name=FUSED,
        kind="other",
        dtype=WORDS.get(dtype, "fp32"),
        flops=0.0,
        bytes=float(sum(buffer.bytes for buffer in moved)),
        made=float(sum(buffer.bytes for buffer in written)),
        shape=(),
    )


def _empty(buffer: Buffer) -> Tensor:
    return torch.empty_strided(buffer.shape, buffer.strides, dtype=buffer.dtype)


def _shown(memory: Tensor, node: fx.Node) -> Tensor:
    """A node's view of a value, with the graph's strides even if the buffer is padded."""
    value = node.meta["val"]
    if (memory.shape, memory.stride()) == (value.shape, value.stride()):
        return memory
    return memory.as_strided(value.shape, value.stride(), value.storage_offset() + memory.storage_offset())
