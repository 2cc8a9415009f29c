"""Export a checkpoint's weights to files for other tools: safetensors, torch, or a Hugging Face folder."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch

from meshwright.checkpoint.folder import atomic_folder, find_checkpoint, reading, refuse_taken
from meshwright.checkpoint.formats import SAFETENSORS, TORCH, Format, Item, index_of, pack
from meshwright.checkpoint.hugging_face import differing_names
from meshwright.checkpoint.integrity import inspect, raise_damage
from meshwright.checkpoint.manifest import EMA, MODEL, Manifest, read_manifest
from meshwright.checkpoint.progress import Progress, silent
from meshwright.checkpoint.storage import write_durably
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
    shard_size: str = SHARD_SIZE,
    dtype: str | None = None,
    ema: bool = False,
    progress: Progress = silent,
) -> dict[str, Any]:
    """Write the model's weights into the new folder `out`, after checking everything; with `ema`, the averaged ones."""
    (form, content_of), limit = _choose("--to", to, _TARGETS), _size(shard_size)
    cast = (
        None
        if dtype is None
        else _choose("--dtype", dtype, {WORDS[one]: one for one in sorted(DTYPES.values(), key=WORDS.__getitem__)})
    )
    with reading(path):
        folder = find_checkpoint(path)
        manifest = read_manifest(folder)
    content = content_of(manifest)
    if ema:
        content = replace(content, items=_averaged(manifest, content.items))
    content = replace(content, items=[_as_dtype(item, cast) for item in content.items])
    with reading(out):
        refuse_taken(out)
    if out.resolve().is_relative_to(folder.resolve()):
        raise OutputError(f"{out} is inside the checkpoint {folder}; give a path outside it.")
    with reading(folder):
        raise_damage(folder, inspect(folder, manifest, progress))
    packed = [content.items] if content.alone else pack(content.items, limit)
    names = [content.alone] if content.alone else form.file_names(len(packed))
    shards = dict(zip(names, packed, strict=True))
    sizes = _write(out, shards, form, content, WholeTensors(folder, manifest), progress)
    return {
        **{"path": str(folder), "to": to, "out": str(out), "dtype": dtype, "ema": ema},
        "tensors": sum(len(item.names) for item in content.items),
        "bytes": sum(size for _, size in sizes),
        "files": [{"name": name, "bytes": size} for name, size in sizes],
        "left_out": list(content.left_out),
    }


@dataclass(frozen=True, kw_only=True)
class Content:
    """What an export writes."""

    items: list[Item]
    config: Mapping[str, Any] | None = None
    """The config of a transformers model or of a peft adapter."""
    config_file: str = "config.json"
    alone: str = ""
    """The name of the single file, if everything must go into one."""
    left_out: tuple[str, ...] = ()
    """Names of tensors that are not exported."""


def all_names(manifest: Manifest, *, shared: bool) -> Content:
    """Every name of the model's `state_dict`, tied ones too, so that `load_state_dict` accepts it."""
    items: list[Item] = []
    for key, names in _named(manifest):
        groups = [names] if shared else [(name,) for name in names]
        items += [_item(manifest, key, group) for group in groups]
    return Content(items=items)


def of_hugging_face(manifest: Manifest) -> Content:
    """Each parameter once, under its transformers name."""
    found = manifest.run_state.hugging_face
    if found is None:
        raise CheckpointError(
            "This checkpoint is not of a transformers model, so it cannot be exported to hf; "
            "export it to safetensors or torch."
        )
    if found.get("adapter") is not None:
        return _of_adapter(manifest, found["adapter"])
    prefix = f"{found['prefix']}." if found["prefix"] else ""
    items, left_out = [], []
    for key, names in _named(manifest):
        inside = [name.removeprefix(prefix) for name in names if name.startswith(prefix)]
        if inside:
            items.append(_item(manifest, key, (inside[0],)))
        else:
            left_out.append(names[0])
    _refuse_other_names(found["config"], [item.names[0] for item in items])
    return Content(items=items, config=found["config"], left_out=tuple(left_out))


def _of_adapter(manifest: Manifest, adapter: Mapping[str, Any]) -> Content:
    """What peft's `save_pretrained` writes: only the adapter, without its base model."""
    if not adapter["names"]:
        raise CheckpointError(
            f"This checkpoint has the peft adapters {', '.join(adapter['adapters']) or 'none'}, "
            "but hf takes exactly one that peft can save; export it to safetensors or torch."
        )
    keys = {name: key for key, names in _named(manifest) for name in names}
    items = [_item(manifest, keys[ours], (theirs,)) for theirs, ours in adapter["names"].items()]
    written = {item.source for item in items}
    return Content(
        items=items,
        config=adapter["config"],
        config_file="adapter_config.json",
        alone="adapter_model.safetensors",
        left_out=tuple(names[0] for key, names in _named(manifest) if key not in written),
    )


def _refuse_other_names(config: Mapping[str, Any], names: list[str]) -> None:
    extra, missing = differing_names(config, names)
    if extra or missing:
        which = f"has {extra[0]}, which it does not know" if extra else f"lacks {missing[0]}"
        raise CheckpointError(
            f"{config['architectures'][0]}.from_pretrained cannot load this model as it is: it {which} "
            f"({len(extra)} extra names, {len(missing)} missing); export it to safetensors or torch."
        )


_TARGETS: dict[str, tuple[Format, Callable[[Manifest], Content]]] = {
    "safetensors": (SAFETENSORS, lambda manifest: all_names(manifest, shared=SAFETENSORS.shares)),
    "torch": (TORCH, lambda manifest: all_names(manifest, shared=TORCH.shares)),
    "hf": (SAFETENSORS, of_hugging_face),
}


def _choose(option: str, word: str, choices: Mapping[str, Any]) -> Any:
    if word in choices:
        return choices[word]
    near = get_close_matches(word, choices, n=1)
    advice = f"; did you mean {near[0]!r}?" if near else "."
    raise BadInput(f"{option} must be one of {', '.join(choices)}, not {word!r}{advice}")


def _size(text: str) -> int:
    try:
        size = parse_bytes(text)
    except ValueError as error:
        raise BadInput(f"--shard-size: {error}") from None
    if size < 1:
        raise BadInput(f"--shard-size must be at least one byte, not {text!r}.")
    return size


def _named(manifest: Manifest) -> list[tuple[str, tuple[str, ...]]]:
    """The model's tensors by key, each with all of its names."""
    aliases: dict[str, list[str]] = {}
    for alias, first in manifest.run_state.tied.items():
        aliases.setdefault(first, []).append(alias)
    keys = [key for key in manifest.tensors if key.startswith(MODEL)]
    return [(key, (key[len(MODEL) :], *aliases.get(key[len(MODEL) :], ()))) for key in keys]


def _item(manifest: Manifest, key: str, names: tuple[str, ...]) -> Item:
    entry = manifest.tensors[key]
    return Item(names=names, source=key, dtype=entry.torch_dtype, shape=entry.shape)


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
    out: Path, shards: dict[str, list[Item]], form: Format, content: Content, tensors: WholeTensors, progress: Progress
) -> list[tuple[str, int]]:
    """Write all files; return their names and sizes."""
    total = sum(item.bytes for items in shards.values() for item in items)
    with atomic_folder(out) as temporary, progress(f"writing {out.name}", total) as advance:
        for name, items in shards.items():
            form.write(temporary / name, items, lambda item: _read(tensors, item), advance)
        if len(shards) > 1:
            write_durably(temporary / form.index, index_of(shards))
        if content.config is not None:
            text = _config(content.config, shards, of_adapter=bool(content.alone))
            write_durably(temporary / content.config_file, text)
        return [(path.name, path.stat().st_size) for path in sorted(temporary.iterdir())]


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
