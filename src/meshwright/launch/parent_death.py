"""End a process when its parent ends, even by SIGKILL. Imports no torch.

On Linux the kernel signals the child (`prctl`, man 2 PR_SET_PDEATHSIG). Elsewhere a thread polls the parent.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time

_PR_SET_PDEATHSIG = 1
_LOOK_EVERY_S = 1.0


def end_with(parent: int) -> None:
    """End this process when `parent` ends, or now if it has already ended."""
    if not _ask_the_kernel():
        threading.Thread(target=_watch, args=(parent,), name="parent", daemon=True).start()
    if os.getppid() != parent:  # it ended before prctl
        os._exit(128 + signal.SIGKILL)


def _ask_the_kernel() -> bool:
    if not sys.platform.startswith("linux"):
        return False
    try:
        return bool(ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) == 0)
    except (OSError, AttributeError):
        return False


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_LOOK_EVERY_S)
    os._exit(128 + signal.SIGKILL)
