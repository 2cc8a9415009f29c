"""Linear layers in float8 inside of a block's recorded program."""

import torch

from meshwright.strategies.float8_linear import float8_linear
from meshwright.strategies.tensor.compiled import compiled
from meshwright.strategies.tensor.program import Instruction, Local, Program

PROGRAM = Program(
    inputs=(0, 1),
    instructions=(Instruction(float8_linear, (Local(0), Local(1), None), {}, (2,), True, True),),
    outputs=(2,),
    shapes={0: (4, 8, 32), 1: (16, 32), 2: (4, 8, 16)},
)


def test_a_program_multiplies_in_float8() -> None:
    x, weight = torch.randn(4, 8, 32).bfloat16(), torch.randn(16, 32).bfloat16()
    (found,) = PROGRAM.compile()(x, weight)
    assert torch.equal(found, float8_linear(x, weight))
    assert not torch.equal(found, torch.nn.functional.linear(x, weight))


def test_torch_compile_accepts_it() -> None:
    assert compiled(PROGRAM) is not None
