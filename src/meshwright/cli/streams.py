"""Under `--json`, stdout holds one document; what jobs and libraries print goes to stderr, also from C and children."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from typing import TextIO

STDOUT, STDERR = 1, 2
_reserved: list[TextIO] = []


def result_stream() -> TextIO:
    """Where a verb's result goes: the reserved stdout, or the usual one."""
    return _reserved[-1] if _reserved else sys.stdout


@contextmanager
def reserved_stdout() -> Iterator[None]:
    """Reserve stdout for `result_stream()`. Everything else that is written to it, by any code or child, is on stderr.

    The file descriptor itself is redirected, so that code in C and processes that are started meanwhile follow.
    """
    sys.stdout.flush()
    try:
        copy = os.dup(STDOUT)
        os.dup2(STDERR, STDOUT)
    except OSError:  # a closed stdout or stderr: there is nothing to keep apart
        yield
        return
    is_real = sys.stdout is sys.__stdout__
    result = os.fdopen(os.dup(copy), "w", encoding="utf-8") if is_real else sys.stdout
    _reserved.append(result)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        _reserved.pop()
        result.flush()
        if is_real:
            result.close()
        os.dup2(copy, STDOUT)
        os.close(copy)
