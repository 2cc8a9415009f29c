import inspect
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch.fx import traceback

from meshwright.torch_private.aot import (
    aot_function,
    called_compiling,
    min_cut_rematerialization_partition,
    select_decomp_table,
)


def test_a_function_is_compiled_ahead_of_time() -> None:
    drawn = []

    def compile_graph(graph: torch.fx.GraphModule, inputs: object) -> Callable[..., Any]:
        drawn.append(graph)
        return make_boxed_func(graph)

    x = torch.ones(3, requires_grad=True)
    run = aot_function(
        lambda x: (x * 2).sin(),
        fw_compiler=compile_graph,
        bw_compiler=compile_graph,
        partition_fn=min_cut_rematerialization_partition,
        decompositions=select_decomp_table(),
    )
    run(x).sum().backward()
    assert len(drawn) == 2
    torch.testing.assert_close(x.grad, 2 * (2 * torch.ones(3)).cos())


def test_its_parts_take_what_we_give_them() -> None:
    wanted = {"fw_compiler", "bw_compiler", "partition_fn", "decompositions"}
    assert wanted <= set(inspect.signature(aot_function).parameters)
    wanted = {"compiler", "num_fwd_outputs", "static_lifetime_input_indices"}
    assert wanted <= set(inspect.signature(min_cut_rematerialization_partition).parameters)
    assert isinstance(traceback.current_meta, dict)
    assert torch.Tag.pointwise in torch.ops.aten.exp.default.tags


@pytest.mark.parametrize("operator", ["native_layer_norm", "_fused_rms_norm"])
def test_norms_are_taken_apart(operator: str) -> None:
    assert getattr(torch.ops.aten, operator).default in select_decomp_table()


def test_pooling_is_taken_apart_in_a_new_process() -> None:
    """PyTorch's own rule reads a module that only other parts of the compiler import."""
    code = """
import torch
from meshwright.torch_private.aot import select_decomp_table
pool = select_decomp_table()[torch.ops.aten.max_pool2d_with_indices.default]
print([tuple(one.shape) for one in pool(torch.ones(1, 1, 4, 4), [2, 2])])
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert ran.stdout == "[(1, 1, 2, 2), (1, 1, 2, 2)]\n", ran.stderr


def test_code_that_asks_whether_it_is_compiled() -> None:
    with called_compiling():
        assert torch.compiler.is_compiling()
    assert not torch.compiler.is_compiling()
