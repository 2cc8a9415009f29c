"""`torch.compile` in a trace: capture the graph that the compiler would see, and run it without values.

The first half of the compiler is PyTorch's: AOTAutograd captures forward and backward as one graph of decomposed
operators, and a minimal cut decides what is saved for backward and what is recomputed. The second half, which writes
kernels, needs a GPU; `fusion.py` models its rules. Dynamo, which reads Python's bytecode first, cannot run on fake
tensors. The module's `forward` is run instead. If that cannot be captured, for example because it branches on a value
in a loop over layers (LayerDrop), it runs eagerly and the modules that it calls are compiled one by one. Dynamo does
the same: it skips a function whose graph breaks inside a loop, and compiles the functions that are called from it.

Private API of PyTorch's compiler is used only here; `tests/tracing/test_compiled.py` tests it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, fx, nn
from torch.fx import traceback
from torch.utils.checkpoint import CheckpointPolicy

from meshwright.assemble.low_copies import parameters_as_read
from meshwright.describe.as_on_cuda import as_compiled
from meshwright.errors import one_line
from meshwright.recording.caches import forgetting
from meshwright.strategies.tensor.compiled import MADE
from meshwright.torch_private.checkpointing import run_once
from meshwright.torch_private.fake_tensors import DataDependentOutputException, DynamicOutputShapeException
from meshwright.torch_private.modules import lend_tensors
from meshwright.torch_private.trees import TreeSpec, tree_flatten, tree_unflatten
from meshwright.tracing.fusion import Program, fuse
from meshwright.tracing.module_attributes import (
    Attribute,
    Changes,
    attributes_lent,
    lasting,
    tensor_attributes,
)
from meshwright.tracing.nodes import is_constant, is_getitem
from meshwright.tracing.recorder import StepRecorder
from meshwright.tracing.runner import Runner

Function = Callable[..., Any]


@dataclass
class Compiler:
    """Compiles modules and functions in a trace. Equal modules are compiled once."""

    recorder: StepRecorder
    moments: Callable[[list[str]], dict[str, str]]
    """From the parameters of a module to the moments of a step that read them; not all have one."""
    made: dict[Any, CompiledGraph | None] = field(default_factory=dict)
    failed: dict[str, None] = field(default_factory=dict)
    """Why some functions could not be captured and ran eagerly."""
    divided: dict[str, None] = field(default_factory=dict)
    """Why some modules could not be captured as one, so that the modules which they call were compiled one by one."""
    policies: list[Any] = field(default_factory=list)
    """For each checkpointed region, the policy that says which operators are saved instead."""

    @contextmanager
    def compiling(self) -> Iterator[None]:
        """While active, compiled modules and functions run as the compiler would run them."""

        def compile_module(module: nn.Module, *args: Any, **kwargs: Any) -> None:
            self.compile(module)

        def compile_function(model: Any = None, **options: Any) -> Any:
            return compile_function if model is None else Compiled(self, model)

        with ExitStack() as stack:
            stack.enter_context(warnings.catch_warnings())
            # The view is of reused memory, which the user's code never sees.
            warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view")
            stack.enter_context(patch.object(nn.Module, "compile", compile_module))
            stack.enter_context(patch.object(torch, "compile", compile_function))
            stack.enter_context(patch.dict(MADE, clear=True))
            stack.enter_context(run_once(self._recomputed))
            yield

    def compile(self, module: nn.Module) -> None:
        """Run a module's `forward` as the compiler would; a module that is compiled already is left alone."""
        if not isinstance(module.forward, Compiled):
            module.forward = Compiled(self, module.forward, module)

    def _recomputed(self, contexts: Callable[[], Any] | None) -> AbstractContextManager[Any] | None:
        """While a graph is captured, mark what is to be recomputed, as the compiler does."""
        if not self.recorder.paused:
            return None
        self.policies.append(getattr(contexts()[0], "policy_fn", None) if contexts is not None else None)
        marks = {"recompute": CheckpointPolicy.PREFER_RECOMPUTE, "ac_graph_id": len(self.policies)}
        return patch.dict(traceback.current_meta, marks)

    def mark_saved(self, graph: fx.Graph) -> None:
        """Mark the operators that a selective policy saves."""
        for node in graph.nodes:
            policy = self.policies[node.meta["ac_graph_id"] - 1] if "ac_graph_id" in node.meta else None
            if policy is not None:
                whole = node.args[0] if is_getitem(node) else node  # one of several results is saved like all of them
                node.meta["recompute"] = policy(None, whole.target)


@dataclass
class CompiledGraph:
    """A function of tensors that was compiled for arguments of one layout."""

    call: Callable[[list[Tensor]], list[Tensor]]
    tree: TreeSpec
    outputs: list[Any] = field(default_factory=list)
    """The leaves that it returns, with `_TENSOR` in place of tensors."""
    is_loss: bool = False
    sets: list[Attribute] = field(default_factory=list)
    """The attributes that it sets, whose tensors it returns last."""


_TENSOR = object()


@dataclass
class _Taken:
    """What a compiled function takes: tensors of its module by name, attributes with tensors, and arguments."""

    names: list[str]
    attributes: list[Attribute]
    tree: TreeSpec
    others: list[Any]
    """The leaves of the arguments, with `_TENSOR` in place of tensors."""

    @property
    def layout(self) -> Any:
        return self.tree, tuple(map(repr, self.others)), tuple(attribute.layout for attribute in self.attributes)


class Compiled:
    """A compiled function, or a module's compiled `forward`."""

    def __init__(self, compiler: Compiler, function: Function, module: nn.Module | None = None) -> None:
        self._compiler, self._function, self._module = compiler, function, module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._compiler.recorder.paused:
            return self._function(*args, **kwargs)  # it is part of the graph that is being captured
        leaves, tree = tree_flatten((args, kwargs))
        state, held = self._state(), lasting(tensor_attributes(self._module))
        others = [_TENSOR if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        given = [*state.values(), *chain(*held.values()), *(leaf for leaf in leaves if isinstance(leaf, Tensor))]
        made = self._find(_Taken(list(state), list(held), tree, others), given)
        if made is None:
            return self._function(*args, **kwargs)
        recorder = self._compiler.recorder
        if made.is_loss:
            recorder.at("loss")
        with recorder.loss_of(args[0]) if made.is_loss else nullcontext():
            found = iter(made.call(given))
        output = tree_unflatten([next(found) if leaf is _TENSOR else leaf for leaf in made.outputs], made.tree)
        if self._module is not None:
            for attribute in made.sets:
                attribute.set(self._module, found)
        return output

    def _state(self) -> dict[str, Tensor]:
        if self._module is None:
            return {}
        return parameters_as_read(self._module) | dict(self._module.named_buffers())

    def _find(self, taken: _Taken, given: list[Tensor]) -> CompiledGraph | None:
        compiler = self._compiler
        whose = self._function if self._module is None else (type(self._module), repr(self._module))
        key = (whose, taken.layout, torch.is_grad_enabled(), *map(_layout, given))
        if key not in compiler.made:
            try:
                with compiler.recorder.pausing(), forgetting(self._module), as_compiled():
                    compiler.made[key] = self._capture(taken, given)
            except Exception as error:  # the model does something that cannot be captured
                compiler.made[key] = None
                called = _called_by(self._module) if self._module is not None else []
                (compiler.divided if called else compiler.failed)[_reason(error)] = None
                for module in called:
                    compiler.compile(module)
        return compiler.made[key]

    def _capture(self, taken: _Taken, given: list[Tensor]) -> CompiledGraph:
        made = CompiledGraph(lambda tensors: [], taken.tree)

        def run(tensors: list[Tensor]) -> list[Tensor]:
            rest = iter(tensors)
            state = dict(zip(taken.names, rest, strict=False))
            held = [(attribute, list(islice(rest, attribute.count))) for attribute in taken.attributes]
            args, kwargs = tree_unflatten(
                [next(rest) if leaf is _TENSOR else leaf for leaf in taken.others], taken.tree
            )
            with self._lent(state, held) as changes:
                leaves, made.tree = tree_flatten(self._function(*args, **kwargs))
                changed = changes()
            made.outputs, made.sets = [_TENSOR if isinstance(leaf, Tensor) else leaf for leaf in leaves], list(changed)
            return [*(leaf for leaf in leaves if isinstance(leaf, Tensor)), *chain(*changed.values())]

        losses = self._compiler.recorder.captured_losses
        made.call = _compile(run, taken.names, self._compiler)
        made.call([_stand_in(tensor) for tensor in given])
        made.is_loss = self._compiler.recorder.captured_losses > losses
        return made

    @contextmanager
    def _lent(self, state: dict[str, Tensor], held: list[tuple[Attribute, list[Tensor]]]) -> Iterator[Changes]:
        """Parameters, buffers and attributes are these tensors, and a compiler is at work."""
        from meshwright.torch_private import aot  # late, because the import takes seconds

        module = nn.Module() if self._module is None else self._module
        with (
            lend_tensors(module, state, tie_weights=True),
            attributes_lent(module, held) as changes,
            aot.called_compiling(),
        ):
            yield changes


def _called_by(module: nn.Module) -> list[nn.Module]:
    """The modules that a module's `forward` may call: its children, and those in its lists."""
    found: list[nn.Module] = []
    for child in module.children():
        found += _called_by(child) if isinstance(child, nn.ModuleList | nn.ModuleDict) else [child]
    return found


def _reason(error: BaseException) -> str:
    """Why a function could not be captured: that it reads a value, if handling this failed too."""
    first: BaseException | None = error
    while first is not None and not isinstance(first, DataDependentOutputException | DynamicOutputShapeException):
        first = first.__context__
    return one_line(error) if first is None else f"it reads a value from a tensor ({one_line(first)})."


def _layout(tensor: Tensor) -> Any:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.requires_grad


def _stand_in(tensor: Tensor) -> Tensor:
    """An empty tensor to capture the graph with: the graph would keep the real one alive."""
    empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    return empty.requires_grad_(tensor.requires_grad)


def _compile(run: Function, names: list[str], compiler: Compiler) -> Callable[[list[Tensor]], list[Tensor]]:
    """A function of tensors, the first of which have `names`. Its graph is captured on the first call."""
    from meshwright.torch_private import aot  # late, because the import takes seconds

    programs: list[Program] = []
    returned = 0
    known = compiler.moments(names)

    def cut(graph: fx.GraphModule, inputs: Any, *, num_fwd_outputs: int, **options: Any) -> Any:
        nonlocal returned
        returned = num_fwd_outputs
        compiler.mark_saved(graph.graph)
        options["static_lifetime_input_indices"] = list(range(len(names)))
        parts = aot.min_cut_rematerialization_partition(
            graph, inputs, compiler="inductor", num_fwd_outputs=num_fwd_outputs, **options
        )
        for part in parts:
            _drop_constants(part)
        return parts

    def make_kernels(gm: fx.GraphModule, example_inputs: Any) -> Runner:
        kept = _kept_between(programs[0], returned) if programs else frozenset()
        programs.append(fuse(gm.graph, kept, reorders=not programs))
        keys = [(node, 0) for node in programs[0].inputs] if len(programs) == 1 else _outputs(programs[-1])
        moments = {key: known[name] for key, name in zip(keys, names, strict=False) if name in known}
        return Runner(programs[-1], compiler.recorder, moments)

    return aot.aot_function(
        run,
        fw_compiler=make_kernels,
        bw_compiler=make_kernels,
        partition_fn=cut,
        decompositions=aot.select_decomp_table(),
    )


def _drop_constants(module: fx.GraphModule) -> None:
    """Drop the tensors that a graph holds: their values cannot be copied without values, and nothing reads them."""
    for node in module.graph.nodes:
        if is_constant(node):
            setattr(module, node.target, None)


def _outputs(program: Program) -> list[Any]:
    """The values that a program returns; those of backward are the gradients of forward's arguments."""
    return [output[0] if output is not None else None for output in program.outputs]


def _kept_between(forward: Program, returned: int) -> frozenset[str]:
    """Names of the values that forward saves only for backward."""
    keys = _outputs(forward)
    own = {key for key in keys if key is not None and keys.count(key) == 1 and key[0] not in forward.inputs}
    kept = [output for output in forward.outputs[returned:] if output is not None]
    return frozenset(node.name for key, node in kept if key in own)
