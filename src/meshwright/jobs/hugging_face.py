"""A job from a config of Hugging Face transformers: `hf:DIR` or `hf:config.json`, with `:seq=TOKENS,batch=SAMPLES`.

Only the config is read. The model is built from it without weights, its samples are made up from the sizes in the
config, and nothing is downloaded. No other module imports transformers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import AdamW

from meshwright.errors import JobError, one_line
from meshwright.facts.job import Job
from meshwright.jobs.options import Options, split_options

BATCH = 64
LONGEST = 2048
"""The most tokens of a sample, unless `seq` is given."""
_UNBOUNDED = 512
"""Tokens of a sample of a model without a maximum number of positions."""
_POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", "max_target_positions")
_SIDE = 224

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Task:
    """A training task: the models for it, their samples and their loss."""

    mapping: str
    """The table in transformers that maps a config class to a model class."""
    source: str
    """The name of the model's input."""
    sample: Callable[[Any, int, int], Batch]
    """From config, samples and tokens to the model's arguments, and the labels under "answers"."""
    loss: Callable[[Any, Batch], tuple[Tensor, int]]


def hugging_face_job(text: str) -> Job:
    """The job for `DIR`, a folder with a config.json, or for the config file itself."""
    name, options = split_options(text)
    transformers = _transformers(name)
    config = _config(transformers, Path(name))
    task, kind = _choose(transformers, config, name)
    length = _length(config, options, name)
    return Job(
        model=lambda: kind(config),
        inputs=lambda batch: {key: value for key, value in batch.items() if key != "answers"},
        loss=task.loss,
        optimizer=lambda params: AdamW(params, lr=1e-4),
        max_norm=1.0,
        sample=lambda n: task.sample(config, n, length),
        global_batch=options.batch or BATCH,
    )


def _transformers(name: str) -> ModuleType:
    try:
        import transformers
    except ImportError as error:
        raise JobError(
            f"hf:{name} needs the package transformers, which is not installed; run `pip install transformers`, "
            "or give a preset or a Python file."
        ) from error
    return transformers


def _config(transformers: Any, path: Path) -> Any:
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise JobError(f"There is no config {file}; give hf: a folder with a config.json, or the file itself.")
    try:
        config = transformers.AutoConfig.from_pretrained(str(file), local_files_only=True, trust_remote_code=False)
    except Exception as error:
        raise JobError(
            f"{file} is not a config that transformers {transformers.__version__} can read: {one_line(error)}"
        ) from error
    if getattr(config, "use_cache", False):
        config.use_cache = False  # the cache of keys and values for generation, which training does not use
    return config


def _choose(transformers: Any, config: Any, name: str) -> tuple[Task, Callable[[Any], nn.Module]]:
    """The task and the class of the model: the one that the config names, or the first that accepts the config."""
    found = [(task, kind) for task in TASKS for kind in _kinds(transformers, task, config)]
    fitting = [(task, kind) for task, kind in found if kind.__name__ in (config.architectures or ())]
    if not fitting and getattr(config, "is_encoder_decoder", False):
        fitting = [(task, kind) for task, kind in found if task is TRANSLATION]
    for task, kind in (*fitting, *found):
        if getattr(kind, "main_input_name", task.source) == task.source:
            return task, kind
    raise JobError(
        f"hf:{name} is a {type(config).__name__}, and transformers has no model for it that maps tokens or images "
        "to logits. Write a Python file with a job."
    )


def _kinds(transformers: Any, task: Task, config: Any) -> tuple[Any, ...]:
    found = getattr(transformers, task.mapping).get(type(config), ())
    return found if isinstance(found, tuple) else (found,)


def _length(config: Any, options: Options, name: str) -> int:
    """Tokens of a sample."""
    inner = config.get_text_config()
    known = [getattr(inner, word) for word in _POSITIONS if isinstance(getattr(inner, word, None), int)]
    positions = known[0] if known and known[0] > 0 else None
    if options.seq is not None and positions is not None and options.seq > positions:
        raise JobError(f"hf:{name} has {positions} positions, but seq={options.seq} was given; use fewer.")
    if options.seq is not None:
        return options.seq
    length = min(positions or _UNBOUNDED, LONGEST)
    # Some models count positions that no token uses: RoBERTa has 514 for 512 tokens.
    return length - length % 8 if length > 8 else length


def _tokens(config: Any, *size: int) -> Tensor:
    return torch.randint(config.get_text_config().vocab_size, size)


def _sample_text(config: Any, n: int, length: int) -> Batch:
    text = _tokens(config, n, length + 1)
    return {"input_ids": text[:, :-1], "answers": text[:, 1:]}


def _sample_pairs(config: Any, n: int, length: int) -> Batch:
    text = _tokens(config, n, length + 1)
    return {"input_ids": _tokens(config, n, length), "decoder_input_ids": text[:, :-1], "answers": text[:, 1:]}


def _sample_masked(config: Any, n: int, length: int) -> Batch:
    y = _tokens(config, n, length)
    x = torch.where(torch.rand(n, length) < 0.15, torch.zeros_like(y), y)
    return {"input_ids": x, "answers": y}


def _sample_images(config: Any, n: int, length: int) -> Batch:
    side = getattr(config, "image_size", None) or _SIDE
    height, width = side if isinstance(side, list | tuple) else (side, side)
    images = torch.randn(n, getattr(config, "num_channels", 3), height, width)
    return {"pixel_values": images, "answers": torch.randint(config.num_labels, (n,))}


def _sample_classes(config: Any, n: int, length: int) -> Batch:
    return {"input_ids": _tokens(config, n, length), "answers": torch.randint(config.num_labels, (n,))}


def _every_place(output: Any, batch: Batch) -> tuple[Tensor, int]:
    """Cross entropy summed over positions. The model's own loss would shift the labels, which are shifted already."""
    y = batch["answers"]
    return F.cross_entropy(output.logits.flatten(0, 1), y.flatten(), reduction="sum"), y.numel()


def _every_sample(output: Any, batch: Batch) -> tuple[Tensor, int]:
    return F.cross_entropy(output.logits, batch["answers"], reduction="sum"), len(batch["answers"])


TRANSLATION = Task("MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING", "input_ids", _sample_pairs, _every_place)
TASKS = (
    Task("MODEL_FOR_CAUSAL_LM_MAPPING", "input_ids", _sample_text, _every_place),
    TRANSLATION,
    Task("MODEL_FOR_MASKED_LM_MAPPING", "input_ids", _sample_masked, _every_place),
    Task("MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING", "pixel_values", _sample_images, _every_sample),
    Task("MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING", "input_ids", _sample_classes, _every_sample),
)
