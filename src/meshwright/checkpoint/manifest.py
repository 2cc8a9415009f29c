"""`checkpoint.json`: what a checkpoint holds, in global coordinates, and the digests of its files.

Tensors are keyed `model/NAME`, `optimizer/NAME/KEY`, `ema/NAME` and `rng/RANK/KIND`, where NAME is the unsplit model's.
Each chunk has its own digest, so damage is reported by tensor; a file's digest covers those of its header and chunks.
Next to it, `checkpoint.sha256` holds the digest of `checkpoint.json` itself, in the format of `sha256sum -c`.
"""

from __future__ import annotations

import hashlib
import json
import platform
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

import torch

from meshwright import version
from meshwright.checkpoint.json_state import decode, read_dataclass
from meshwright.errors import CheckpointError, DamagedCheckpoint, Unreadable, WrongCheckpoint, one_line
from meshwright.facts.position import DataPosition
from meshwright.reading import Limits, parse_json, read_text, shown
from meshwright.units import GIB

FORMAT, VERSION = "meshwright checkpoint", 1
MANIFEST, DIGESTS = "checkpoint.json", "checkpoint.sha256"
MODEL, OPTIMIZER, EMA, RNG = "model/", "optimizer/", "ema/", "rng/"
LIMITS = Limits(bytes=GIB, values=50_000_000, finite=False)
"""A thousand ranks write a million chunks; each field's type is checked separately."""
_DIGEST = re.compile("[0-9a-f]{64}")
_FINGERPRINT = re.compile("[0-9a-f]{16}")


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """A box of a tensor: its position in the tensor, and the position of its bytes in a file."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    at: int
    """Bytes from the start of the file."""
    sha256: str
    """Digest of its bytes."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One whole tensor and its chunks."""

    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)  # type: ignore[no-any-return]

    @property
    def bytes(self) -> int:
        return prod(self.shape) * self.torch_dtype.itemsize

    def bytes_of(self, chunk: Chunk) -> int:
        return prod(chunk.sizes) * self.torch_dtype.itemsize


@dataclass(frozen=True, kw_only=True)
class File:
    """Expected size and digest of a data file."""

    bytes: int
    sha256: str
    """Made by `digest_of_file`."""


@dataclass(frozen=True, kw_only=True)
class RunState:
    """The run's state other than tensors."""

    step: int
    samples: int
    """The global sample index at which the run continues."""
    seed: int
    strategy: str
    ranks: int
    tied: Mapping[str, str] = field(default_factory=dict)
    """Further names of tied parameters, each mapped to the first, under which the tensor is stored."""
    hugging_face: Mapping[str, Any] | None = None
    """The config of a transformers model, and its prefix in the job's model."""
    optimizer: Mapping[str, Any] | None = None
    """Class and groups; None if only weights are stored."""
    schedule: Mapping[str, Any] | None = None
    loss_scale: Mapping[str, float] | None = None
    data: Mapping[str, Any] | None = None
    """The place in the current epoch, and the dataset's own state; None if only `samples` is known."""
    ema: Mapping[str, Any] | None = None
    """Decay and number of updates of the averaged weights; None if there are none."""
    loop: Mapping[str, Any] | None = None
    """What the training loop keeps: evaluations so far, and the best of them for an early stop."""
    frozen: Mapping[str, str] | None = None
    """Fingerprints of frozen parameters that are not stored, because the job makes them; None if all are stored."""
    made: Mapping[str, str] = field(default_factory=lambda: made_now())
    """Versions and time of writing."""

    @property
    def position(self) -> DataPosition:
        """Where the run continues in its data."""
        if self.data is None:
            return DataPosition(samples=self.samples)
        state = self.data["state"]
        return DataPosition(**{**self.data, "samples": self.samples, "state": None if state is None else decode(state)})


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """A checkpoint without its tensor data."""

    run_state: RunState
    tensors: Mapping[str, Entry]
    files: Mapping[str, File]

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.files.values())

    def text(self) -> str:
        tensors = {name: asdict(entry) for name, entry in self.tensors.items()}
        files = {name: asdict(file) for name, file in self.files.items()}
        values = asdict(self.run_state)
        for late in ("ema", "loop", "frozen"):  # versions that do not know these fields read checkpoints without them
            if values[late] is None:
                del values[late]
        document = {"format": FORMAT, "version": VERSION, **values, "files": files, "tensors": tensors}
        return json.dumps(document, indent=1) + "\n"

    def chunks_in(self, file: str) -> list[tuple[str, Entry, Chunk]]:
        """Tensors and their chunks, in file order."""
        # An empty chunk starts where the next one does.
        return sorted(self._chunks_by_file.get(file, ()), key=lambda one: (one[2].at, prod(one[2].sizes)))

    @cached_property
    def _chunks_by_file(self) -> dict[str, list[tuple[str, Entry, Chunk]]]:
        """Cached: searching all chunks for each file would take a day for a thousand ranks."""
        found: dict[str, list[tuple[str, Entry, Chunk]]] = {}
        for name, entry in self.tensors.items():
            for chunk in entry.chunks:
                found.setdefault(chunk.file, []).append((name, entry, chunk))
        return found


def digest_of_file(header: str, chunks: Iterable[str]) -> str:
    """Digest of a file from those of its header and chunks in order, so that every byte is hashed once."""
    return hashlib.sha256("".join((header, *chunks)).encode()).hexdigest()


def digest_line(text: str) -> str:
    """The text of `checkpoint.sha256` for this `checkpoint.json`."""
    return f"{hashlib.sha256(text.encode()).hexdigest()}  {MANIFEST}\n"


def read_manifest(folder: Path) -> Manifest:
    """Read and check `checkpoint.json`; its data files are not read."""
    text = _read(folder / MANIFEST)
    digests = _read(folder / DIGESTS)
    try:
        document = parse_json(text, LIMITS)
        kind, number = document.pop("format"), document.pop("version")
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise _damaged(folder, f"it is not a manifest ({one_line(error).rstrip('.')})") from None
    if kind != FORMAT:
        raise _damaged(folder, f"its format is {shown(kind)}")
    if type(number) is int and number > VERSION:
        raise WrongCheckpoint(
            f"{folder / MANIFEST} has format version {number}; this Meshwright ({version.VERSION}) reads versions up "
            f"to {VERSION}; use a newer Meshwright."
        )
    if type(number) is not int or number != VERSION:
        raise _damaged(folder, f"its format version is {shown(number)}")
    try:
        manifest = _from_document(document)
    except (ValueError, KeyError, AttributeError, TypeError, RuntimeError, OverflowError, IndexError) as error:
        raise _damaged(folder, f"a field is missing or invalid ({error})") from None
    if digests != digest_line(text):
        raise _damaged(folder, f"it does not match {DIGESTS} next to it (one of the two was changed)")
    return manifest


def made_now() -> dict[str, str]:
    """The versions and time to record in a checkpoint."""
    return {
        "meshwright": version.VERSION,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _from_document(document: dict[str, Any]) -> Manifest:
    tensors = {name: _entry(entry) for name, entry in document.pop("tensors").items()}
    files = {name: read_dataclass(File, file) for name, file in document.pop("files").items()}
    for name in files:
        if Path(name).name != name:
            raise ValueError(f"{name!r} is not a plain file name")
    chunks = [chunk for entry in tensors.values() for chunk in entry.chunks]
    for digest in (*(file.sha256 for file in files.values()), *(chunk.sha256 for chunk in chunks)):
        if not _DIGEST.fullmatch(digest):
            raise ValueError(f"{digest!r} is not a SHA-256 digest")
    unknown = [chunk.file for chunk in chunks if chunk.file not in files]
    if unknown:
        raise ValueError(f"{unknown[0]!r} is not among its files")
    run_state = read_dataclass(RunState, document)
    _check_values(run_state)
    return Manifest(run_state=run_state, tensors=tensors, files=files)


def _entry(entry: dict[str, Any]) -> Entry:
    chunks = [read_dataclass(Chunk, chunk) for chunk in entry["chunks"]]
    made = read_dataclass(Entry, {**entry, "chunks": chunks})
    if not isinstance(getattr(torch, made.dtype, None), torch.dtype):
        raise ValueError(f"{made.dtype!r} is not a dtype")
    return made


@dataclass(frozen=True, kw_only=True)
class _Group:
    names: tuple[str, ...]
    values: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class _HuggingFace:
    """A transformers model's description of itself."""

    config: Mapping[str, Any]
    prefix: str
    adapter: Mapping[str, Any] | None = None
    """For a peft model: its adapters, and the config and names of the adapter if there is just one."""


@dataclass(frozen=True, kw_only=True)
class _Data:
    epoch: int
    within: int
    digest: int | None
    state: Mapping[str, Any] | None


@dataclass(frozen=True, kw_only=True)
class _Ema:
    """How the averaged weights were made."""

    decay: float
    updates: int


def _check_values(run_state: RunState) -> None:
    """Check what the field types cannot express."""
    if run_state.step < 0 or run_state.samples < 0 or run_state.ranks < 1:
        raise ValueError(f"it has step {run_state.step}, {run_state.samples} samples and {run_state.ranks} ranks")
    if run_state.optimizer is not None:
        groups = [read_dataclass(_Group, group) for group in run_state.optimizer["groups"]]
        _check_encoded(run_state.optimizer["class"], *(group.values for group in groups))
        for group in groups:
            _check_rate(decode(group.values).get("lr"))
    if run_state.hugging_face is not None:
        read_dataclass(_HuggingFace, run_state.hugging_face)
    if run_state.data is not None:
        data = read_dataclass(_Data, run_state.data)
        if data.epoch < 0 or data.within < 0 or not isinstance(decode(data.state), dict | None):
            raise ValueError(f"its data are at epoch {data.epoch}, item {data.within}")
    if run_state.schedule is not None:
        _check_encoded(run_state.schedule["class"], run_state.schedule["state"])
    if run_state.ema is not None:
        read_dataclass(_Ema, run_state.ema)
    if run_state.loop is not None:
        _check_encoded("loop", run_state.loop)
    for name, fingerprint in (run_state.frozen or {}).items():
        dtype, _, digits = fingerprint.partition(":")
        if not isinstance(getattr(torch, dtype, None), torch.dtype) or not _FINGERPRINT.fullmatch(digits):
            raise ValueError(f"the fingerprint of {name} is {shown(fingerprint)}")


def _check_rate(rate: Any) -> None:
    if not (rate is None or isinstance(rate, int | float) or (torch.is_tensor(rate) and rate.numel() == 1)):
        raise ValueError(f"a learning rate is {shown(rate)}")


def _check_encoded(name: Any, *states: Any) -> None:
    """Refuse anything but a class name and states that `encode` made."""
    if not isinstance(name, str) or not all(isinstance(decode(state), dict) for state in states):
        raise ValueError(f"the state of {name!r} is malformed")


def _read(path: Path) -> str:
    try:
        return read_text(path, LIMITS.bytes)
    except Unreadable as error:
        if error.missing and path.name != DIGESTS and not any(path.parent.glob("*.safetensors")):
            raise CheckpointError(f"{path.parent} is not a checkpoint: it has no {path.name}.") from None
        problem = "missing" if error.missing else f"damaged: {error.why}"
        raise DamagedCheckpoint(f"{path} is {problem}.") from None


def _damaged(folder: Path, what: str) -> DamagedCheckpoint:
    return DamagedCheckpoint(f"{folder / MANIFEST} is damaged: {what}.")
