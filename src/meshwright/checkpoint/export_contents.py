"""Which tensors an export writes, and under which names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from meshwright.checkpoint.formats import SAFETENSORS, Item
from meshwright.checkpoint.hugging_face import differing_names
from meshwright.checkpoint.manifest import MODEL, Manifest
from meshwright.errors import CheckpointError


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
    for key, names in named(manifest):
        groups = [names] if shared else [(name,) for name in names]
        items += [item_of(manifest, key, group) for group in groups]
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
    for key, names in named(manifest):
        inside = [name.removeprefix(prefix) for name in names if name.startswith(prefix)]
        if inside:
            items.append(item_of(manifest, key, (inside[0],)))
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
    keys = {name: key for key, names in named(manifest) for name in names}
    items = [item_of(manifest, keys[ours], (theirs,)) for theirs, ours in adapter["names"].items()]
    written = {item.source for item in items}
    return Content(
        items=items,
        config=adapter["config"],
        config_file="adapter_config.json",
        alone="adapter_model.safetensors",
        left_out=tuple(names[0] for key, names in named(manifest) if key not in written),
    )


def _refuse_other_names(config: Mapping[str, Any], names: list[str]) -> None:
    extra, missing = differing_names(config, names)
    if extra or missing:
        which = f"has {extra[0]}, which it does not know" if extra else f"lacks {missing[0]}"
        raise CheckpointError(
            f"{config['architectures'][0]}.from_pretrained cannot load this model as it is: it {which} "
            f"({len(extra)} extra names, {len(missing)} missing); export it to safetensors or torch."
        )


def one_file(manifest: Manifest) -> Content:
    """Each parameter once in one file, as safetensors' `load_model` wants it."""
    items = [item_of(manifest, key, names[:1]) for key, names in named(manifest)]
    return Content(items=items, alone=SAFETENSORS.alone)


def of_trainer(manifest: Manifest) -> Content:
    """The Trainer saves any model, but a transformers model under its own names."""
    return one_file(manifest) if manifest.run_state.hugging_face is None else of_hugging_face(manifest)


def named(manifest: Manifest) -> list[tuple[str, tuple[str, ...]]]:
    """The model's tensors by key, each with all of its names."""
    aliases: dict[str, list[str]] = {}
    for alias, first in manifest.run_state.tied.items():
        aliases.setdefault(first, []).append(alias)
    keys = [key for key in manifest.tensors if key.startswith(MODEL)]
    return [(key, (key[len(MODEL) :], *aliases.get(key[len(MODEL) :], ()))) for key in keys]


def item_of(manifest: Manifest, key: str, names: tuple[str, ...]) -> Item:
    entry = manifest.tensors[key]
    return Item(names=names, source=key, dtype=entry.torch_dtype, shape=entry.shape)
