import subprocess
import sys

import torch

from meshwright.torch_private.loaded import compiler_is_loaded


def test_the_compiler_is_loaded_when_something_is_compiled() -> None:
    told = "import torch; from meshwright.torch_private.loaded import compiler_is_loaded as told; print(told())"
    ran = subprocess.run([sys.executable, "-c", told], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "False"
    torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))
    assert compiler_is_loaded()
