import subprocess
import sys

LOADED = """
import torch
from meshwright.torch_private.loaded import compiler_is_loaded
before = compiler_is_loaded()
torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))
print(before, compiler_is_loaded())
"""


def test_the_compiler_is_loaded_when_something_is_compiled() -> None:
    ran = subprocess.run([sys.executable, "-c", LOADED], capture_output=True, text=True, check=True)
    assert ran.stdout.split() == ["False", "True"]
