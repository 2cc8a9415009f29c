"""What `torch.utils.checkpoint.checkpoint` calls, however a model has imported it (PyTorch 2.11 to 2.13)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from torch.utils import checkpoint


@contextmanager
def run_once(inside: Callable[[Callable[[], Any] | None], AbstractContextManager[Any] | None]) -> Iterator[None]:
    """Run checkpointed functions only once, in the context that `inside` returns; with None they run as usual.

    `inside` is given the function that makes a selective checkpoint's contexts, or None.
    """
    usual, reentrant = checkpoint._checkpoint_without_reentrant_generator, checkpoint.CheckpointFunction

    def generator(function: Any, preserve: Any, context_fn: Any, *others: Any, **kwargs: Any) -> Iterator[None]:
        context = inside(None if context_fn is checkpoint.noop_context_fn else context_fn)
        if context is None:
            yield from usual(function, preserve, context_fn, *others, **kwargs)
            return
        with context:
            yield

    class Reentrant:
        @staticmethod
        def apply(function: Any, preserve: Any, *args: Any) -> Any:
            context = inside(None)
            if context is None:
                return reentrant.apply(function, preserve, *args)
            with context:
                return function(*args)

    with ExitStack() as stack:
        stack.enter_context(patch.object(checkpoint, "_checkpoint_without_reentrant_generator", generator))
        stack.enter_context(patch.object(checkpoint, "CheckpointFunction", Reentrant))
        yield
