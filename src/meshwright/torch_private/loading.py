"""Data-loading processes (PyTorch 2.11 to 2.13)."""

from __future__ import annotations

from torch.utils.data import get_worker_info
from torch.utils.data._utils import worker as _worker


def hide_worker() -> tuple[int, int]:
    """The number of this data-loading process and the number of all; (0, 1) outside of one.

    Afterwards `get_worker_info()` returns None here. A dataset that divides its samples over such processes then gives
    all of them.
    """
    info = get_worker_info()
    if info is None:
        return 0, 1
    _worker._worker_info = None
    return info.id, info.num_workers
