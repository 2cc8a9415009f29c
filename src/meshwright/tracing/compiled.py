"""`torch.compile` in a trace: what the compiler would make of a module, run without values.

The compiler's first half is PyTorch's own: AOTAutograd draws forward and backward as one graph, in the operators that
Inductor takes apart further, and a minimal cut decides what is kept for backward and what is computed again. Its second
half, which writes kernels, needs a GPU; `fusion.py` has its rules. Dynamo, which comes first and reads Python's
bytecode, cannot run on fake tensors: the module's `forward` is run instead, so a graph that Dynamo would break in two
is taken for one.

What is private to PyTorch's compiler is used here and nowhere else; `tests/tracing/test_compiled.py` holds it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, fx, nn
from torch.fx import traceback
from torch.utils.checkpoint import CheckpointPolicy, checkpoint

from meshwright.assemble import recompute
from meshwright.describe.as_on_cuda import as_compiled
from meshwright.errors import one_line
from meshwright.torch_private.modules import lend_tensors
from meshwright.torch_private.trees import TreeSpec, tree_flatten, tree_unflatten
from meshwright.tracing.fusion import Program, fuse
from meshwright.tracing.nodes import is_choice
from meshwright.tracing.recorder import StepRecorder
from meshwright.tracing.runner import Runner

Function = Callable[..., Any]


@dataclass
class Compiler:
    """What was compiled so far. Modules that look the same are compiled once."""

    recorder: StepRecorder
    moments: Callable[[str], str]
    """From a parameter of the model to where a step is that reads it."""
    made: dict[Any, CompiledGraph | None] = field(default_factory=dict)
    failed: dict[str, None] = field(default_factory=dict)
    """Why something could not be drawn, and ran as it is."""
    policies: list[Any] = field(default_factory=list)
    """For each stretch that is computed again, what says which operators are not."""

    @contextmanager
    def compiling(self) -> Iterator[None]:
        """While active, what is compiled runs as a compiler would have it run, once it is called."""

        def compile_module(module: nn.Module, *args: Any, **kwargs: Any) -> None:
            module.forward = Compiled(self, module.forward, module)

        def compile_function(model: Any = None, **options: Any) -> Any:
            return compile_function if model is None else Compiled(self, model)

        with ExitStack() as stack:
            stack.enter_context(warnings.catch_warnings())
            warnings.filterwarnings(
                "ignore", "FSDP2-wrapped module .* returned a view"
            )  # of memory that was taken over
            stack.enter_context(patch.object(nn.Module, "compile", compile_module))
            stack.enter_context(patch.object(torch, "compile", compile_function))
            stack.enter_context(patch.object(recompute, "checkpoint", self._checkpoint))
            yield

    def _checkpoint(self, function: Function, *args: Any, context_fn: Any = None, **kwargs: Any) -> Any:
        """Where a graph is drawn, what is to be computed again is marked for the cut, as the compiler marks it."""
        options = {} if context_fn is None else {"context_fn": context_fn}
        if not self.recorder.paused:
            return checkpoint(function, *args, **options, **kwargs)
        kwargs.pop("use_reentrant", None)
        self.policies.append(getattr(context_fn()[0], "policy_fn", None) if context_fn is not None else None)
        marks = {"recompute": CheckpointPolicy.PREFER_RECOMPUTE, "ac_graph_id": len(self.policies)}
        with patch.dict(traceback.current_meta, marks):
            return function(*args, **kwargs)

    def keep_the_dear(self, graph: fx.Graph) -> None:
        """Mark what a selective policy does not compute again."""
        for node in graph.nodes:
            policy = self.policies[node.meta["ac_graph_id"] - 1] if "ac_graph_id" in node.meta else None
            if policy is not None:
                whole = node.args[0] if is_choice(node) else node  # a part is kept as the whole is
                node.meta["recompute"] = policy(None, whole.target)


@dataclass
class CompiledGraph:
    """A function of tensors that was compiled for arguments of one kind."""

    call: Callable[[list[Tensor]], list[Tensor]]
    tree: TreeSpec
    outputs: list[Any] = field(default_factory=list)
    """Leaves of what it returns, with `_TENSOR` in place of the tensors."""
    is_loss: bool = False


_TENSOR = object()


class Compiled:
    """Stands for a function, or for a module's `forward`, that was compiled."""

    def __init__(self, compiler: Compiler, function: Function, module: nn.Module | None = None) -> None:
        self._compiler, self._function, self._module = compiler, function, module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._compiler.recorder.paused:
            return self._function(*args, **kwargs)  # it is part of what is being drawn
        leaves, tree = tree_flatten((args, kwargs))
        state = self._state()
        others = [_TENSOR if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        given = [*state.values(), *(leaf for leaf in leaves if isinstance(leaf, Tensor))]
        made = self._find(list(state), tree, others, given)
        if made is None:
            return self._function(*args, **kwargs)
        with self._at_loss(args) if made.is_loss else nullcontext():
            found = iter(made.call(given))
        return tree_unflatten([next(found) if leaf is _TENSOR else leaf for leaf in made.outputs], made.tree)

    @contextmanager
    def _at_loss(self, args: Any) -> Iterator[None]:
        self._compiler.recorder.at("loss")
        with self._compiler.recorder.loss_of(args[0]):
            yield

    def _state(self) -> dict[str, Tensor]:
        if self._module is None:
            return {}
        return dict(self._module.named_parameters()) | dict(self._module.named_buffers())

    def _find(self, names: list[str], tree: TreeSpec, others: list[Any], given: list[Tensor]) -> CompiledGraph | None:
        compiler = self._compiler
        whose = self._function if self._module is None else (type(self._module), repr(self._module))
        key = (whose, tree, tuple(map(repr, others)), torch.is_grad_enabled(), *map(_looks, given))
        if key not in compiler.made:
            try:
                with compiler.recorder.pausing(), as_compiled():
                    compiler.made[key] = self._draw(names, tree, others, given)
            except Exception as error:  # whatever a model does that cannot be drawn
                compiler.made[key] = None
                compiler.failed[one_line(error)] = None
        return compiler.made[key]

    def _draw(self, names: list[str], tree: TreeSpec, others: list[Any], given: list[Tensor]) -> CompiledGraph:
        made = CompiledGraph(lambda tensors: [], tree)

        def run(tensors: list[Tensor]) -> list[Tensor]:
            state, rest = dict(zip(names, tensors, strict=False)), iter(tensors[len(names) :])
            args, kwargs = tree_unflatten([next(rest) if leaf is _TENSOR else leaf for leaf in others], tree)
            leaves, made.tree = tree_flatten(self._call(state, args, kwargs))
            made.outputs = [_TENSOR if isinstance(leaf, Tensor) else leaf for leaf in leaves]
            return [leaf for leaf in leaves if isinstance(leaf, Tensor)]

        losses = self._compiler.recorder.drawn_losses
        made.call = _compile(run, names, self._compiler)
        made.call([_stand_in(tensor) for tensor in given])
        made.is_loss = self._compiler.recorder.drawn_losses > losses
        return made

    def _call(self, state: dict[str, Tensor], args: Any, kwargs: Any) -> Any:
        if self._module is None:
            return self._function(*args, **kwargs)
        with lend_tensors(self._module, state, tie_weights=True):
            return self._function(*args, **kwargs)


def _looks(tensor: Tensor) -> Any:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.requires_grad


def _stand_in(tensor: Tensor) -> Tensor:
    """A graph keeps what it is drawn from, so it is not drawn from tensors whose end is waited for."""
    empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    return empty.requires_grad_(tensor.requires_grad)


def _compile(run: Function, names: list[str], compiler: Compiler) -> Callable[[list[Tensor]], list[Tensor]]:
    """A function of tensors, the first of which have `names`; it is drawn when it is called first."""
    from meshwright.torch_private import aot  # takes seconds, so not before it is needed

    drawn: list[Program] = []
    returned = 0

    def cut(graph: fx.GraphModule, inputs: Any, *, num_fwd_outputs: int, **options: Any) -> Any:
        nonlocal returned
        returned = num_fwd_outputs
        compiler.keep_the_dear(graph.graph)
        options["static_lifetime_input_indices"] = list(range(len(names)))
        return aot.min_cut_rematerialization_partition(
            graph, inputs, compiler="inductor", num_fwd_outputs=num_fwd_outputs, **options
        )

    def make_kernels(gm: fx.GraphModule, example_inputs: Any) -> Runner:
        drawn.append(fuse(gm.graph, _kept_between(drawn[0], returned) if drawn else frozenset()))
        keys = _inputs(drawn[0]) if len(drawn) == 1 else _outputs(drawn[-1])
        moments = {key: compiler.moments(name) for key, name in zip(keys, names, strict=False)}
        return Runner(drawn[-1], compiler.recorder, moments)

    return aot.aot_function(
        run,
        fw_compiler=make_kernels,
        bw_compiler=make_kernels,
        partition_fn=cut,
        decompositions=aot.select_decomp_table(),
    )


def _inputs(program: Program) -> list[Any]:
    return [(node, 0) for node in program.inputs]


def _outputs(program: Program) -> list[Any]:
    """Backward returns a gradient for each argument of forward."""
    return [output[0] if output is not None else None for output in program.outputs]


def _kept_between(forward: Program, returned: int) -> frozenset[str]:
    """What forward keeps for backward alone: names of values that nobody else holds."""
    keys = _outputs(forward)
    own = {key for key in keys if key is not None and keys.count(key) == 1 and key[0] not in forward.inputs}
    kept = [output for output in forward.outputs[returned:] if output is not None]
    return frozenset(node.name for key, node in kept if key in own)
