"""PyTorch's flight recorder: the last collectives that this process has called (PyTorch 2.13, for gloo and NCCL)."""

from __future__ import annotations

import json
from typing import Any

from torch._C import _distributed_c10d

_dump_fr_trace_json = getattr(_distributed_c10d, "_dump_fr_trace_json", None)
"""None in an older release, which records NCCL only, in another form."""


def recorded_collectives() -> list[dict[str, Any]]:
    """The recorded calls, the oldest first: group, number in the group, name and sizes; empty without a recorder."""
    if _dump_fr_trace_json is None:
        return []
    entries = json.loads(_dump_fr_trace_json(True, False)).get("entries", [])
    return [
        {
            "group": ":".join(entry["process_group"]),
            "number": entry["collective_seq_id"],
            "name": entry["profiling_name"].rpartition(":")[2],
            "sizes": entry["input_sizes"],
        }
        for entry in entries
        if not entry["is_p2p"]
    ]
