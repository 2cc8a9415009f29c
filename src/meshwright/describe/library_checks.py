"""Answer libraries that ask whether their tensors are fake as they would be answered in a training step.

transformers makes an attention mask of fake tensors where it would pass `is_causal=True` for real ones, and attention
with a mask is another kernel. Its compiled code makes the mask too, because it asks whether it is being compiled.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

from meshwright.describe.as_on_cuda import is_compiled

CHECKS = (("transformers.utils.import_utils", "is_fake_tensor"),)
"""Functions that tell fake tensors from others: their modules and names."""


@contextmanager
def fakes_pass_as_real() -> Iterator[None]:
    """While active, loaded libraries do not recognise fake tensors, except in code that is being compiled."""
    with ExitStack() as stack:
        for module_name, name in CHECKS:
            module = sys.modules.get(module_name)
            if module is not None and hasattr(module, name):
                stack.enter_context(patch.object(module, name, _if_compiled(getattr(module, name))))
        yield


def _if_compiled(check: Callable[..., bool]) -> Callable[..., bool]:
    return lambda *args: is_compiled() and check(*args)
