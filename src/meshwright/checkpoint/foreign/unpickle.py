"""Read torch files without running anything in them: tensors, numbers, text and plain containers, or a refusal."""

from __future__ import annotations

import re
import zipfile
from pathlib import Path
from typing import Any

import torch

from meshwright.errors import CheckpointError
from meshwright.reading import refuse_special

INERT = ("lightning.fabric.utilities.data.AttributeDict", "lightning_fabric.utilities.data.AttributeDict")
"""Classes that are plain dicts under another name: they are read as dicts."""


class _InertDict(dict[Any, Any]):
    """Stands for a class of `INERT`."""


def unpickle(path: Path) -> Any:
    """Load only tensors and plain containers: any other object in the file is refused before it can run."""
    refuse_special(path)
    try:
        is_archive = zipfile.is_zipfile(path)
        if is_archive:
            _refuse_compressed(path)
        with torch.serialization.safe_globals([(_InertDict, name) for name in INERT]):
            # Files older than torch 1.6 are not zip archives and cannot be mapped.
            return torch.load(path, map_location="cpu", weights_only=True, mmap=is_archive)
    except (OSError, CheckpointError):
        raise
    except Exception as error:
        if foreign := re.search(r"GLOBAL (\S+)", str(error)):
            raise CheckpointError(
                f"{path} holds a {foreign[1]}, but only tensors can be read, beside numbers, text and plain "
                "containers; load it where you trust it, and save only state_dicts and numbers."
            ) from None
        raise CheckpointError(f"{path} is not a valid torch file ({type(error).__name__}).") from None


def _refuse_compressed(path: Path) -> None:
    """Refuse compression: torch never compresses, and a compressed archive may expand to any size."""
    with zipfile.ZipFile(path) as archive:
        if any(part.compress_type != zipfile.ZIP_STORED for part in archive.infolist()):
            raise CheckpointError(f"{path} is a compressed archive, which torch.save does not write; save it again.")
