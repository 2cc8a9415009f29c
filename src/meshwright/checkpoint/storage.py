"""Storage for `torch.distributed.checkpoint`: one safetensors file per rank, and our manifest.

Why not PyTorch's file storage: it pickles its metadata and unpickles it on load; here nothing is pickled. Files are
written by hand so that bytes are hashed once, while they are written; the `safetensors` package can open them.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import IO, Any

import torch
from torch.distributed.checkpoint import StorageReader, StorageWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from meshwright.checkpoint.manifest import (
    DIGESTS,
    MANIFEST,
    Chunk,
    Entry,
    File,
    Manifest,
    RunState,
    digest_line,
    digest_of_file,
)
from meshwright.errors import CheckpointError

BLOCK = 1 << 22  # bytes read or written at a time

# Safetensors' names for dtypes.
NAMES = {
    **{torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"},
    **{torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8"},
    **{torch.bool: "BOOL", torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2"},
    **{torch.uint16: "U16", torch.uint32: "U32", torch.uint64: "U64", torch.complex64: "C64"},
}


class Writer(StorageWriter):
    """Writes one file per rank into a folder, and the manifest last; `publish` makes the folder a checkpoint."""

    def __init__(
        self,
        folder: Path,
        rank: int,
        run_state: RunState,
        publish: Callable[[Path], None],
        *,
        begin: Callable[[], None] = lambda: None,
        written: Callable[[Path], None] = lambda file: None,
    ) -> None:
        """`publish`, `begin` and `run_state` matter on the coordinator only; `written` gets each rank's file."""
        self.folder, self._rank, self._run_state, self._publish = folder, rank, run_state, publish
        self._begin, self._written = begin, written

    def reset(self, checkpoint_id: Any = None) -> None:
        pass

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if is_coordinator:
            shutil.rmtree(self.folder, ignore_errors=True)  # left by a killed run
            self.folder.mkdir(parents=True)
            self._begin()

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        future: Future[list[WriteResult]] = Future()
        path = self.folder / f"rank-{self._rank:05d}.safetensors"
        # Large elements first: this aligns every tensor to its element size.
        items = sorted(plan.items, key=lambda item: -_data(item).properties.dtype.itemsize)
        self.folder.mkdir(parents=True, exist_ok=True)  # a node's own
        results = list(_write_file(path, items, planner)) if items else []
        if items:
            self._written(path)
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        text = _manifest(self._run_state, metadata, [result for rank in results for result in rank]).text()
        write_durably(self.folder / MANIFEST, text)
        write_durably(self.folder / DIGESTS, digest_line(text))
        self._publish(self.folder)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return False


@dataclass(frozen=True)
class FinishedFile:
    """A rank's finished file, reported to the coordinator along with its items."""

    name: str
    file: File


class Reader(StorageReader):
    """Reads a manifest's tensors from mapped files: only the bytes that a rank requests are copied."""

    def __init__(self, manifest: Manifest, mapped: MappedFiles) -> None:
        self._manifest, self._bytes = manifest, mapped

    def reset(self, checkpoint_id: Any = None) -> None:
        pass

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return to_metadata(self._manifest)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        for item in plan.items:
            entry = self._manifest.tensors[item.storage_index.fqn]
            assert item.storage_index.index is not None, "we make the indices"
            saved = self._bytes.tensor(entry, entry.chunks[item.storage_index.index])
            target = planner.resolve_tensor(item)
            target.copy_(narrowed(saved, item.storage_offsets, item.lengths))
            planner.commit_tensor(item, target)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return False


class MappedFiles:
    """A checkpoint's chunks as tensors backed by its mapped files."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._maps: dict[str, mmap.mmap] = {}

    def tensor(self, entry: Entry, chunk: Chunk) -> torch.Tensor:
        """The chunk as a read-only tensor."""
        if prod(chunk.sizes) == 0:
            return torch.empty(chunk.sizes, dtype=entry.torch_dtype)
        file, dtype = self._map(chunk.file), entry.torch_dtype
        return torch.frombuffer(file, dtype=dtype, count=prod(chunk.sizes), offset=chunk.at).view(chunk.sizes)

    def _map(self, name: str) -> mmap.mmap:
        if name not in self._maps:
            with (self._folder / name).open("rb") as file:
                # A private copy-on-write map, because torch warns about read-only buffers. Without NORESERVE, for which
                # Python has no name, the kernel would reserve memory for all of it.
                self._maps[name] = mmap.mmap(
                    file.fileno(), 0, flags=mmap.MAP_PRIVATE | 0x4000, prot=mmap.PROT_READ | mmap.PROT_WRITE
                )
        return self._maps[name]


def narrowed(tensor: torch.Tensor, offsets: Any, lengths: Any) -> torch.Tensor:
    """A box of a tensor, as a view."""
    for dim, (start, length) in enumerate(zip(offsets, lengths, strict=True)):
        tensor = tensor.narrow(dim, start, length)
    return tensor


def to_metadata(manifest: Manifest) -> Metadata:
    """Convert a manifest to `torch.distributed.checkpoint` metadata."""
    found = {}
    for name, entry in manifest.tensors.items():
        chunks = [ChunkStorageMetadata(torch.Size(c.offsets), torch.Size(c.sizes)) for c in entry.chunks]
        properties = TensorProperties(dtype=entry.torch_dtype)
        found[name] = TensorStorageMetadata(properties, torch.Size(entry.shape), chunks)
    return Metadata(state_dict_metadata=found)  # type: ignore[arg-type]  # a dict of one of its kinds


def write_durably(path: Path, text: str) -> None:
    """Write text and flush it to disk, or raise an error."""
    with path.open("w") as file:
        file.write(text)
        flush(file)


def flush(file: IO[Any]) -> None:
    file.flush()
    os.fsync(file.fileno())


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """A tensor's bytes in row-major order; copied only if they are not already so in host memory."""
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return memoryview(flat.numpy())  # type: ignore[arg-type]  # an array is a buffer


def header_of(entries: list[tuple[str, torch.dtype, tuple[int, ...]]]) -> bytes:
    """The start of a safetensors file with these tensors in this order."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, dtype, sizes in entries:
        if dtype not in NAMES:
            raise CheckpointError(f"{name} has dtype {dtype}, which safetensors does not support.")
        end = at + prod(sizes) * dtype.itemsize
        header[name] = {"dtype": NAMES[dtype], "shape": list(sizes), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _write_file(path: Path, items: list[WriteItem], planner: SavePlanner) -> Iterator[WriteResult]:
    """Write, hash and flush; yield a result for each item, and one for the file."""
    entries = [(_key(item), _data(item).properties.dtype, _sizes(item)) for item in items]
    contents = (tensor_bytes(planner.resolve_data(item)) for item in items)  # type: ignore[arg-type]  # no bytes
    written = write_file(path, header_of(entries), contents)
    for item, at, digest in zip(items, written.places, written.digests, strict=True):
        offsets = tuple(_data(item).chunk.offsets)
        chunk = Chunk(offsets=offsets, sizes=_sizes(item), file=path.name, at=at, sha256=digest)
        size = prod(chunk.sizes) * _data(item).properties.dtype.itemsize
        yield WriteResult(index=item.index, size_in_bytes=size, storage_data=chunk)
    whole = FinishedFile(path.name, written.file)
    yield WriteResult(index=MetadataIndex(path.name), size_in_bytes=written.file.bytes, storage_data=whole)


@dataclass(frozen=True)
class WrittenFile:
    """A file that is on disk: the offset and digest of each content."""

    file: File
    places: list[int]
    digests: list[str]


def write_file(path: Path, header: bytes, contents: Iterable[memoryview]) -> WrittenFile:
    """Write and flush. A second thread hashes what the first writes, at most two contents behind."""
    places, digests = [], []
    with ThreadPoolExecutor(1) as hashing, path.open("wb", buffering=0) as file:
        at = _write_all(file, memoryview(header))
        for content in contents:
            places.append(at)
            digests.append(hashing.submit(_sha256, content))
            at += _write_all(file, content)
            if len(digests) > 2:
                digests[-3].result()
        os.fsync(file.fileno())
        found = [digest.result() for digest in digests]
    digest = digest_of_file(_sha256(memoryview(header)), found)
    return WrittenFile(File(bytes=at, sha256=digest), places, found)


def _sha256(content: memoryview) -> str:
    return hashlib.sha256(content).hexdigest()


def _write_all(file: Any, content: memoryview) -> int:
    rest = content
    while rest:  # an unbuffered write may be partial, for example when the disk is full
        rest = rest[file.write(rest) :]
    return len(content)


def _manifest(run_state: RunState, metadata: Metadata, results: list[WriteResult]) -> Manifest:
    files = {r.storage_data.name: r.storage_data.file for r in results if isinstance(r.storage_data, FinishedFile)}
    chunks: dict[str, list[Chunk]] = {}
    for result in results:
        if isinstance(result.storage_data, Chunk):
            chunks.setdefault(result.index.fqn, []).append(result.storage_data)
    tensors = {}
    for name, kind in metadata.state_dict_metadata.items():
        assert isinstance(kind, TensorStorageMetadata)
        dtype = str(kind.properties.dtype).removeprefix("torch.")
        tensors[name] = Entry(dtype=dtype, shape=tuple(kind.size), chunks=tuple(chunks[name]))
    return Manifest(run_state=run_state, tensors=tensors, files=files)


def _data(item: WriteItem) -> Any:
    assert item.tensor_data is not None, "we write tensors only"
    return item.tensor_data


def _sizes(item: WriteItem) -> tuple[int, ...]:
    return tuple(_data(item).chunk.sizes)


def _key(item: WriteItem) -> str:
    """The name in the file: the tensor's name, with its offsets if it is only a part."""
    if _sizes(item) == tuple(_data(item).size):
        return item.index.fqn
    return f"{item.index.fqn}@{','.join(str(offset) for offset in _data(item).chunk.offsets)}"
