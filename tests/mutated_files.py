"""Files of every kind that Meshwright reads from others, and ways to spoil them, for tests and a benchmark."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from checkpoint_samples import save_in_boxes
from meshwright.checkpoint.foreign.source import open_source
from meshwright.checkpoint.integrity import inspect
from meshwright.checkpoint.manifest import DIGESTS, MANIFEST, digest_line, read_manifest
from meshwright.checkpoint.overview import check, show
from meshwright.cli.export import _picked, _read_plan
from meshwright.exchange import read_foreign
from meshwright.facts.catalogue import hardware_of
from meshwright.facts.cluster import Cluster
from meshwright.planner.measured_runs import NEEDED, read_rows
from meshwright.strategies.deepspeed.user_config import read_config, strategy_of

DEEPSPEED = {
    "train_batch_size": 64,
    "train_micro_batch_size_per_gpu": 4,
    "gradient_clipping": 1.0,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 2, "overlap_comm": True, "offload_optimizer": {"device": "cpu"}},
}
ACCELERATE = """distributed_type: FSDP
mixed_precision: bf16
num_machines: 2
num_processes: 16
fsdp_config:
  fsdp_version: 2
  fsdp_reshard_after_forward: true
  fsdp_activation_checkpointing: true
"""
ACCELERATE_FILE = """distributed_type: DEEPSPEED
num_processes: 8
deepspeed_config: {deepspeed_config_file: theirs.json, zero3_init_flag: false}
"""
TORCHTITAN = """[parallelism]
data_parallel_shard_degree = 4
tensor_parallel_degree = 2
pipeline_parallel_degree = 2
pipeline_parallel_schedule = "1F1B"
[training]
local_batch_size = 8
max_norm = 1.0
[activation_checkpoint]
mode = "full"
"""
CLUSTER = {
    "nodes": 2,
    "devices_per_node": 8,
    "device": "A100-40GB",
    "between_gbps": 400.0,
    "between_kind": "roce",
    "hardware": {"launch": 5e-6, "flops": {"bf16": 2e14}, "within": {"bandwidth": 2e11, "kind": "nvlink"}},
}
PLAN = {"job": "job.py", "cluster": "8xA100-40GB", "plans": [{"strategy": "fsdp=8,bf16"}, {"strategy": "ddp=8"}]}
ROW = dict.fromkeys(NEEDED, "2") | {"arch": "llama", "gpu": "H100", "d_model": "64", "status": "ok", "zero_stage": "1"}
CONFIG = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_embd": 8}

BOMBS = (
    b"[" * 100_000,
    b'{"a":' * 100_000,
    b"a: " + b"[" * 50_000,
    b"[" + b"[]," * 400_000 + b"[]]",
    b"a: &a [x,x,x,x,x,x,x,x,x]\n"
    + b"".join(b"%c: &%c [%b]\n" % (c, c, b",".join([b"*%c" % (c - 1)] * 9)) for c in range(98, 118)),
    b"a: &a {x: 1}\n"
    + b"".join(b"%c: &%c {<<: [%b]}\n" % (c, c, b",".join([b"*%c" % (c - 1)] * 9)) for c in range(98, 118)),
    b"a: &a [*a]",
    b"distributed_type: 0x" + b"f" * 60_000,
    b"num_processes: " + b"1:" * 50_000 + b"1",
    b"distributed_type: FSDP\nnum_processes: 2020-99-99",
    b".".join([b"a"] * 200_000) + b" = 1",
    b"a = " + b"[" * 5000,
    b"a=0x" + b"f" * 60_000,
    b'{"nodes": ' + b"9" * 5000 + b"}",
    b'{"nodes": ' + b"9" * 500 + b', "device": "A100"}',
    b'{"device": "A100", "memory_gib": 1e999}',
    b'{"zero_optimization": {"stage": "\xc2\xb2"}}',
    b'"' * 100_000,
    b"\x00" * 1000,
    b"\xff\xfe" + "{}".encode("utf-16-le"),
    b"",
)
"""Small files that once were large, slow or fatal."""
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 2**63, 10**99, 1.5, -0.0, 1e308, "", "²", "9" * 5000, "inf", "nan", "a\x00b", "\ud800"),
    *([], {}, [[]], {"": {}}, [None], {"float": "x"}, {"tensor": "x", "dtype": "float32"}, {"dict": 3}, "../x", "no"),
)


@dataclass(frozen=True)
class Kind:
    """A kind of file: one that is sound, and what reads it."""

    content: bytes
    read: Callable[[Path, bytes], object]
    """Writes the content to a file in the folder and reads it."""


def kinds(folder: Path) -> dict[str, Kind]:
    """All of them; `folder` is for what they need beside them."""
    sound = _checkpoint(folder / "sound")
    rows = (",".join(ROW) + "\n" + ",".join(ROW.values()) + "\n").encode()
    save_file({"a": torch.ones(2, 2)}, folder / "sound.safetensors")
    torch.save({"a": torch.ones(2, 2)}, folder / "sound.pt")
    index = {"weight_map": {"a": "part.safetensors"}}
    return {
        "deepspeed": Kind(_json(DEEPSPEED), _at("theirs", read_foreign)),
        "accelerate": Kind(ACCELERATE.encode(), _at("theirs", read_foreign)),
        "accelerate with a file": Kind(_json(DEEPSPEED), _read_accelerate_file),
        "torchtitan": Kind(TORCHTITAN.encode(), _at("theirs", read_foreign)),
        "--deepspeed-config": Kind(_json(DEEPSPEED), _at("theirs.json", lambda path: strategy_of(read_config(path)))),
        "cluster": Kind(_json(CLUSTER), _at("theirs.json", _read_cluster)),
        "plan": Kind(_json(PLAN), _at("theirs.json", lambda path: _picked(_read_plan(path), None))),
        "rows": Kind(rows, _at("theirs.csv", read_rows)),
        "manifest": Kind((sound / MANIFEST).read_bytes(), _read_manifest),
        "safetensors": Kind((folder / "sound.safetensors").read_bytes(), _at("theirs.safetensors", open_source)),
        "torch": Kind((folder / "sound.pt").read_bytes(), _at("theirs.pt", open_source)),
        "index": Kind(_json(index), _at("model.safetensors.index.json", lambda path: open_source(path.parent))),
        "config of transformers": Kind(_json(CONFIG), _read_hugging_face),
    }


def spoiled(content: bytes, rng: random.Random) -> bytes:
    """The content with one to three things wrong, most often one value."""
    ways = (_structure, _structure, _structure, _structure, _structure, _bytes, _cut, _number, _number, _bomb)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        content = rng.choice(ways)(content, rng)
    return content


def _json(value: Any) -> bytes:
    return json.dumps(value, indent=1).encode()


def _at(name: str, read: Callable[[Path], object]) -> Callable[[Path, bytes], object]:
    def run(folder: Path, content: bytes) -> object:
        (folder / name).write_bytes(content)
        return read(folder / name)

    return run


def _read_cluster(path: Path) -> object:
    cluster = Cluster.load(path)
    return hardware_of(cluster), str(cluster)


def _read_accelerate_file(folder: Path, content: bytes) -> object:
    (folder / "theirs.json").write_bytes(content)
    (folder / "theirs.yaml").write_text(ACCELERATE_FILE)
    return read_foreign(folder / "theirs.yaml")


def _read_hugging_face(folder: Path, content: bytes) -> object:
    (folder / "config.json").write_bytes(content)
    save_file({"a": torch.ones(2, 2)}, folder / "model.safetensors")
    return open_source(folder)


def _checkpoint(folder: Path) -> Path:
    optimizer = {
        "class": "AdamW",
        "groups": [{"names": ["a"], "values": {"dict": [["lr", 0.1], ["betas", {"tuple": [0.9, 0.99]}]]}}],
    }
    schedule = {"class": "LambdaLR", "state": {"dict": [["last_epoch", 3]]}}
    facts = {"optimizer": optimizer, "schedule": schedule, "loss_scale": {"scale": 1.0}, "tied": {"b": "a"}}
    facts["hugging_face"] = {"config": CONFIG, "prefix": "model."}
    return save_in_boxes(folder, {"model/a": torch.ones(4, 2), "optimizer/a/exp_avg": torch.ones(4, 2)}, **facts)


def _read_manifest(folder: Path, content: bytes) -> object:
    """With the digest that belongs to it: somebody who means harm can compute one, too."""
    made = folder / "step-00000001"
    if not made.exists():
        _checkpoint(made)
    (made / MANIFEST).write_bytes(content)
    (made / DIGESTS).write_text(digest_line(content.decode(errors="replace")))
    check(made)
    show(made, tensors=True)
    return inspect(made, read_manifest(made))


def _structure(content: bytes, rng: random.Random) -> bytes:
    """One value of a JSON document, or of a line, replaced, removed or repeated."""
    try:
        document = json.loads(content)
    except (ValueError, RecursionError):
        return _line(content, rng)
    places = list(_places(document))
    if not places:
        return json.dumps(rng.choice(VALUES)).encode()
    inside, key = rng.choice(places)
    change = rng.randrange(3)
    if change == 0:
        inside.pop(key)
    elif change == 1 and isinstance(inside, dict):
        inside[str(rng.choice(VALUES))] = inside[key]
    else:
        inside[key] = rng.choice(VALUES)
    return json.dumps(document).encode()


def _places(document: Any) -> Iterator[tuple[Any, Any]]:
    inner = (
        document.items() if isinstance(document, dict) else enumerate(document) if isinstance(document, list) else ()
    )
    for key, value in inner:
        yield document, key
        yield from _places(value)


def _line(content: bytes, rng: random.Random) -> bytes:
    lines = content.splitlines()
    if not lines:
        return content
    at = rng.randrange(len(lines))
    value = str(rng.choice(VALUES)).encode(errors="surrogatepass")
    separator = rng.choice((b":", b"=", b","))
    parts = lines[at].split(separator)
    parts[rng.randrange(len(parts))] = value
    lines[at] = separator.join(parts)
    return b"\n".join(lines)


def _bytes(content: bytes, rng: random.Random) -> bytes:
    found = bytearray(content)
    for _ in range(rng.randint(1, 8)):
        if found:
            found[rng.randrange(len(found))] = rng.randrange(256)
    return bytes(found)


def _cut(content: bytes, rng: random.Random) -> bytes:
    at, length = rng.randrange(len(content) + 1), rng.randrange(len(content) + 1)
    return rng.choice((content[:at], content[:at] + content[at + length :], content[:at] + content))


def _number(content: bytes, rng: random.Random) -> bytes:
    """A digit that becomes many."""
    digits = [at for at, byte in enumerate(content[:100_000]) if chr(byte).isdigit()]
    if not digits:
        return content
    at = rng.choice(digits)
    return (
        content[:at] + rng.choice((b"9" * 5000, b"9" * 18, b"1e400", b"-1", b"0.5", "²".encode())) + content[at + 1 :]
    )


def _bomb(content: bytes, rng: random.Random) -> bytes:
    bomb = rng.choice(BOMBS)
    return rng.choice((bomb, content + b"\n" + bomb))
