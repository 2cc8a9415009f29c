"""JSON Schemas of what verbs print with --json, from real documents: `python docs/schemas.py` writes them anew.

A field is required if every recorded document has it, and may be anything if it is null in all of them. Fields named in
MAPS hold values by name (causes, axes), so their names are not part of the schema.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "tests"))  # the README's job is read as its test reads it

from page_blocks import blocks, environment, side

SCHEMAS = Path(__file__).parent / "schemas"
MAPS = ("memory", "time", "mesh", "tensor_plan", "peaks")
PLAN = ("plan", "job.py", "--on", "4xA100-40GB", "--fast")
PIPELINE = ("--strategies", "zero1=2,pp=2:1f1b,bf16,mb=8", "fsdp,bf16")
COMMANDS: dict[str, tuple[tuple[str, ...], ...]] = {
    "plan": (
        (*PLAN, *PIPELINE),
        (*PLAN, "--strategies", "ddp,bf16", "--against", "ds.json"),
        ("plan", "preset:gpt2", "--on", "4xA100-40GB", "--fast", "--strategies", "ddp,bf16,mb=4", "fsdp=3"),
    ),
    "plan --largest": ((*PLAN, "--largest", "--strategies", "ddp,bf16"),),
    "plan --sweep": ((*PLAN, "--sweep", "devices=2,4", "--strategies", "ddp,bf16", "fsdp,bf16"),),
    "layout": (
        ("layout", "job.py", "--strategy", "fsdp=2"),
        ("layout", "job.py", "--strategy", "tp=2,pp=2:1f1b"),
    ),
    "preflight": (("preflight", "job.py", "--strategy", "fsdp,bf16"), ("preflight", "job.py")),
    "train": (
        ("train", "job.py", "--strategy", "single", "--ranks", "1", "--steps", "3", "--device", "cpu"),
        ("train", "job.py", "--strategy", "ddp", "--ranks", "2", "--steps", "3", "--device", "cpu", "--out", "run"),
    ),
    "verify": (("verify", "job.py", "--ranks", "2", "--strategies", "ddp", "--steps", "1", "--device", "cpu"),),
    "checkpoint show": (("checkpoint", "show", "run"),),
}
"""For each title, the commands whose documents it describes."""
CONFIG = {"train_micro_batch_size_per_gpu": 8, "zero_optimization": {"stage": 2}, "bf16": {"enabled": True}}


def prepare(folder: Path) -> None:
    """The files that the commands read."""
    (folder / "job.py").write_text(side(blocks("README.md", "diff")[0], "+"))
    (folder / "ds.json").write_text(json.dumps(CONFIG))


def document(command: Iterable[str], folder: Path) -> Any:
    """What a command prints with --json."""
    words = [sys.executable, "-m", "meshwright", *command, "--json"]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=False, env=environment())
    if not done.stdout:
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr}")
    return json.loads(done.stdout)


def schema_of(values: list[Any]) -> dict[str, Any]:
    """The schema that all of these values have."""
    kinds = sorted({_kind(value) for value in values})
    if kinds == ["null"]:
        return {}  # nothing is known of it but that it may be missing
    found: dict[str, Any] = {"type": kinds[0] if len(kinds) == 1 else kinds}
    objects = [value for value in values if isinstance(value, dict)]
    if objects:
        names = list(dict.fromkeys(name for one in objects for name in one))
        found["properties"] = {name: _field(name, [one[name] for one in objects if name in one]) for name in names}
        found["required"] = [name for name in names if all(name in one for one in objects)]
    items = [item for value in values if isinstance(value, list) for item in value]
    if items:
        found["items"] = schema_of(items)
    return found


def _field(name: str, values: list[Any]) -> dict[str, Any]:
    maps = [value for value in values if isinstance(value, dict)]
    if name not in MAPS or not maps:
        return schema_of(values)
    kinds = sorted({_kind(value) for value in values})
    inner = [one for value in maps for one in value.values()]
    shape = {"type": kinds[0] if len(kinds) == 1 else kinds}
    return {**shape, "additionalProperties": schema_of(inner)} if inner else shape


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return "number"
    return {str: "string", list: "array", dict: "object"}[type(value)]


def main() -> None:
    SCHEMAS.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder)
        for title in sys.argv[1:] or COMMANDS:
            commands = COMMANDS[title]
            found = schema_of([document(command, folder) for command in commands])
            head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": title}
            shown = f"meshwright {' '.join(commands[0][:2])} ... --json"
            path = SCHEMAS / f"{title.replace(' --', '-').replace(' ', '-')}.json"
            path.write_text(json.dumps({**head, "description": shown, **found}, indent=1) + "\n")
            print(path.name, flush=True)


if __name__ == "__main__":
    main()
