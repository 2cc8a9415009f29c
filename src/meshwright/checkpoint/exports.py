"""Export a checkpoint to files for other tools: its weights, or the whole training."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from meshwright.checkpoint.export_contents import Content, named
from meshwright.checkpoint.export_targets import Target, choose, notes_of, target_of
from meshwright.checkpoint.folder import atomic_folder, find_checkpoint, reading, refuse_taken
from meshwright.checkpoint.formats import Item, index_of, pack
from meshwright.checkpoint.integrity import inspect, raise_damage
from meshwright.checkpoint.manifest import EMA, MODEL, Manifest, read_manifest
from meshwright.checkpoint.progress import Progress, silent
from meshwright.checkpoint.storage import write_durably
from meshwright.checkpoint.training_documents import TrainingDocuments
from meshwright.checkpoint.whole_tensors import WholeTensors
from meshwright.describe.dtypes import DTYPES, WORDS
from meshwright.errors import BadInput, CheckpointError, OutputError
from meshwright.units import parse_bytes

SHARD_SIZE = "5GB"


def export(
    path: Path,
    out: Path,
    *,
    to: str,
    training: bool = False,
    prefix: str = "",
    shard_size: str = SHARD_SIZE,
    dtype: str | None = None,
    ema: bool = False,
    progress: Progress = silent,
) -> dict[str, Any]:
    """Write a checkpoint into the new folder `out`, after checking everything; with `ema`, the averaged weights.

    `training` adds the optimizer, the schedule and the step to a kind that can do without; `prefix` goes in front of
    the names of a kind that is read by a wrapper of the model.
    """
    target, limit = target_of(to, training=training, prefix=prefix, dtype=dtype), _size(shard_size)
    cast = (
        None
        if dtype is None
        else choose("--dtype", dtype, {WORDS[one]: one for one in sorted(DTYPES.values(), key=WORDS.__getitem__)})
    )
    with reading(path):
        folder = find_checkpoint(path)
        manifest = read_manifest(folder)
    content = target.content(manifest)
    if ema:
        content = replace(content, items=_averaged(manifest, content.items))
    content = replace(content, items=[_as_dtype(item, cast) for item in content.items])
    with reading(out):
        refuse_taken(out)
    if out.resolve().is_relative_to(folder.resolve()):
        raise OutputError(f"{out} is inside the checkpoint {folder}; give a path outside it.")
    with reading(folder):
        raise_damage(folder, inspect(folder, manifest, progress))
    form = target.form
    packed = [content.items] if content.alone else pack(content.items, limit)
    names = [content.alone] if content.alone else form.file_names(len(packed))
    shards = dict(zip(names, packed, strict=True))
    documents = TrainingDocuments(folder, manifest, prefix) if target.training else None
    sizes = _write(out, shards, target, content, WholeTensors(folder, manifest), progress, documents)
    return {
        **{"path": str(folder), "to": to, "out": str(out), "dtype": dtype, "ema": ema},
        "step": manifest.run_state.step,
        "optimizer": target.training is not None and manifest.run_state.optimizer is not None,
        "tensors": sum(len(item.names) for item in content.items) or sum(len(n) for _, n in named(manifest)),
        "bytes": sum(size for _, size in sizes),
        "files": [{"name": name, "bytes": size} for name, size in sizes],
        "left_out": [*content.left_out, *(manifest.run_state.frozen or ())],
        "notes": list(notes_of(manifest.run_state, target)),
    }


def _size(text: str) -> int:
    try:
        size = parse_bytes(text)
    except ValueError as error:
        raise BadInput(f"--shard-size: {error}") from None
    if size < 1:
        raise BadInput(f"--shard-size must be at least one byte, not {text!r}.")
    return size


def _averaged(manifest: Manifest, items: list[Item]) -> list[Item]:
    """The averaged weights in the place of the trained ones. Buffers and frozen parameters have no average."""
    if manifest.run_state.ema is None:
        raise CheckpointError("--ema was given, but this checkpoint has no averaged weights; train with Job(ema=...).")
    averages = {item.source: EMA + item.source.removeprefix(MODEL) for item in items}
    return [
        replace(item, source=averages[item.source]) if averages[item.source] in manifest.tensors else item
        for item in items
    ]


def _as_dtype(item: Item, dtype: torch.dtype | None) -> Item:
    """Cast floating-point items; integers and booleans keep their dtype."""
    return item if dtype is None or not item.dtype.is_floating_point else replace(item, dtype=dtype)


def _write(
    out: Path,
    shards: dict[str, list[Item]],
    target: Target,
    content: Content,
    tensors: WholeTensors,
    progress: Progress,
    documents: TrainingDocuments | None,
) -> list[tuple[str, int]]:
    """Write all files; return their names and sizes."""
    form = target.form
    total = sum(item.bytes for items in shards.values() for item in items)
    with atomic_folder(out) as temporary, progress(f"writing {out.name}", total) as advance:
        for name, items in shards.items():
            form.write(temporary / name, items, lambda item: _read(tensors, item), advance)
        if len(shards) > 1:
            write_durably(temporary / form.index, index_of(shards))
        if content.config is not None:
            text = _config(content.config, shards, of_adapter=bool(content.alone))
            write_durably(temporary / content.config_file, text)
        if target.training is not None and documents is not None:
            target.training(temporary, documents)
        files = sorted(path for path in temporary.rglob("*") if path.is_file())
        return [(str(path.relative_to(temporary)), path.stat().st_size) for path in files]


def _read(tensors: WholeTensors, item: Item) -> torch.Tensor:
    found = tensors.read(item.source)
    if found.dtype == item.dtype:
        return found
    cast = found.to(item.dtype)
    if torch.finfo(item.dtype).max < torch.finfo(found.dtype).max and cast.isfinite().sum() != found.isfinite().sum():
        raise CheckpointError(f"{item.names[0]} has values too large for {item.dtype}; choose another dtype.")
    return cast


def _config(config: Mapping[str, Any], shards: dict[str, list[Item]], *, of_adapter: bool) -> str:
    """The config with the dtype that was written: transformers loads the weights in that dtype."""
    if not of_adapter:
        dtypes = [item.dtype for items in shards.values() for item in items if item.dtype.is_floating_point]
        config = {key: value for key, value in config.items() if key not in ("dtype", "torch_dtype")}
        config |= {"dtype": str(dtypes[0]).removeprefix("torch.")} if dtypes else {}
    return json.dumps(config, indent=2, sort_keys=True) + "\n"
