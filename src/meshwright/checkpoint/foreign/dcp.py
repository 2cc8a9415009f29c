"""Folders of `torch.distributed.checkpoint`: what FSDP, Accelerate and torchtitan write, sharded by any strategy.

PyTorch's own reader joins the shards. Its metadata is a pickle, of which only the classes that such a file needs are
loaded; values that are not tensors are read with `weights_only`.
"""

from __future__ import annotations

import io
import pickle
import warnings
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import torch
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import metadata as parts
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem

from meshwright.errors import CheckpointError, OutputError, one_line
from meshwright.reading import refuse_special

METADATA = ".metadata"
_STORAGE = ("torch.distributed.checkpoint.filesystem", "_StorageInfo")
_CLASSES = {
    ("collections", "OrderedDict"): OrderedDict,
    ("torch", "Size"): torch.Size,
    ("pathlib", "PosixPath"): PurePosixPath,
    ("pathlib._local", "PosixPath"): PurePosixPath,
    ("pathlib", "WindowsPath"): PureWindowsPath,
    ("pathlib._local", "WindowsPath"): PureWindowsPath,
}
_PARTS = frozenset(
    {
        "Metadata",
        "TensorStorageMetadata",
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "TensorProperties",
        "MetadataIndex",
        "StorageMeta",
        "_MEM_FORMAT_ENCODING",
    }
)


def is_dcp(folder: Path) -> bool:
    return (folder / METADATA).is_file()


def read_dcp(folder: Path) -> dict[str, Any]:
    """Everything in a folder as the nested dict that was saved, on the host."""
    try:
        reader = _Reader(folder)
        metadata = reader.read_metadata()
        state = {
            key: torch.empty(entry.size, dtype=entry.properties.dtype)
            if isinstance(entry, TensorStorageMetadata)
            else io.BytesIO()
            for key, entry in metadata.state_dict_metadata.items()
        }
        _load(state, reader)
    except (CheckpointError, OSError):
        raise
    except CheckpointException as failure:  # not an Exception
        raise _unreadable(folder, next(iter(failure.failures.values()))[0]) from None
    except Exception as error:
        raise _unreadable(folder, error) from None
    return _nested(state, metadata.planner_data or {})


def _unreadable(folder: Path, error: BaseException) -> CheckpointError:
    return CheckpointError(f"{folder} cannot be read as a torch.distributed checkpoint: {one_line(error)}")


def write_dcp(folder: Path, content: Mapping[str, Any]) -> None:
    """Write a nested dict as one process would."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        try:
            dcp.save(dict(content), storage_writer=dcp.FileSystemWriter(folder), no_dist=True)
        except CheckpointException as failure:
            raise OutputError(
                f"{folder} cannot be written: {one_line(next(iter(failure.failures.values()))[0])}"
            ) from None


def _load(state: dict[str, Any], reader: _Reader) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.load(state, storage_reader=reader, planner=_Planner(), no_dist=True)


class _Planner(dcp.DefaultLoadPlanner):
    """Loads into a flat dict; values other than tensors are read with `weights_only`."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def create_local_plan(self) -> LoadPlan:
        plan = super().create_local_plan()
        assert all(item.type in (LoadItemType.TENSOR, LoadItemType.BYTE_IO) for item in plan.items)
        return plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        name = read_item.dest_index.fqn
        try:
            self.state_dict[name] = torch.load(value, map_location="cpu", weights_only=True)
        except Exception:
            self.state_dict[name] = Unread()


class Unread:
    """Stands for a value that holds more than tensors, numbers and text, such as a data loader's."""


class _Reader(dcp.FileSystemReader):
    """PyTorch's reader, with metadata that runs nothing and files inside the folder only."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._folder = folder

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        path = self._folder / METADATA
        refuse_special(path)
        with path.open("rb") as file:
            metadata = _MetadataUnpickler(file).load()
        if not isinstance(metadata, Metadata):
            raise CheckpointError(f"{path} is not the metadata of a torch.distributed checkpoint.")
        for place in (metadata.storage_data or {}).values():
            name = place.relative_path
            if Path(name).is_absolute() or ".." in Path(name).parts:
                raise CheckpointError(f"{path} names the file {name!r}, which is not inside the folder.")
            refuse_special(self._folder / name)
        return metadata


class _MetadataUnpickler(pickle.Unpickler):
    """Loads the classes of a checkpoint's metadata, and refuses everything else before it can run."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _CLASSES:
            return _CLASSES[module, name]
        if module == parts.__name__ and name in _PARTS:
            return getattr(parts, name)
        if (module, name) == _STORAGE:
            return super().find_class(module, name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if (module, name) == ("torch.serialization", "_get_layout"):
            return _layout
        raise CheckpointError(f"The metadata holds a {module}.{name}, but only descriptions of tensors can be read.")


def _layout(name: str) -> torch.layout:
    found = getattr(torch, str(name).removeprefix("torch."), None)
    if not isinstance(found, torch.layout):
        raise CheckpointError(f"The metadata has the layout {name!r}.")
    return found


def _nested(state: Mapping[str, Any], paths: Mapping[str, tuple[Any, ...]]) -> dict[str, Any]:
    """Undo the flattening of `dcp.save`: `optimizer.param_groups.0.lr` is at ("optimizer", "param_groups", 0, "lr")."""
    whole: dict[Any, Any] = {}
    for key, value in state.items():
        *outer, last = paths.get(key, (key,))
        place = whole
        for step in outer:
            place = place.setdefault(step, {})
        place[last] = value
    return {key: _with_lists(value) for key, value in whole.items()}


def _with_lists(value: Any) -> Any:
    """Dicts that count from 0 were lists; but not an optimizer's numbered state."""
    if not isinstance(value, dict):
        return value
    found = {key: child if key == "state" else _with_lists(child) for key, child in value.items()}
    is_list = bool(found) and all(type(key) is int for key in found) and sorted(found) == list(range(len(found)))
    return [found[at] for at in range(len(found))] if is_list else found
