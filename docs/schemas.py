"""JSON Schemas of what verbs print with --json, from real documents: `python docs/schemas.py` writes them anew.

A field is required if every recorded document has it, and may be anything if it is null in all of them. Fields named in
MAPS hold values by name (causes, axes), so their names are not part of the schema.
"""

from __future__ import annotations

import csv
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "tests"))  # the README's job is read and run as its test does
sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))  # and rows are those of a recording

from verb_json import COLUMNS, ROWS

from page_blocks import ROOT, blocks, environment, side
from page_runner import run_script_alone, run_verb

SCHEMAS = ROOT / "docs" / "schemas"
MAPS = (
    "memory",
    "time",
    "mesh",
    "tensor_plan",
    "peaks",
    "held",
    "peak_held",
    "flops",
    "parts",
    "sources",
    "groups",
    "kernels",
)
MAPS_OF_MAPS = ("groups",)
PLAN = ("plan", "job.py", "--on", "4xA100-40GB", "--fast")
PIPELINE = ("--strategies", "zero1=2,pp=2:1f1b,bf16,mb=8", "fsdp,bf16")
TWO = ("--ranks", "2", "--device", "cpu")
REHEARSE = ("rehearse", "job.py", "--strategy", "ddp", "--world", "2", "--device", "cpu", "--steps", "1")
SHOWN_AT_ONCE = "serve"
"""The verb that prints its document when it starts, and then goes on."""
OWN_PROCESS = ("compare", "probe", "rehearse", "train", "verify")
"""Verbs that start processes."""
COMMANDS: dict[str, tuple[tuple[str, ...], ...]] = {
    "adopt": (("adopt", "loop.py"), ("adopt", "loop.py", "--out", "adopted.py")),
    "checkpoint show": (("checkpoint", "show", "saved"), ("checkpoint", "show", "saved", "--tensors")),
    "checkpoint check": (
        ("checkpoint", "check", "saved", "--job", "job.py"),
        ("checkpoint", "check", "damaged"),
    ),
    "checkpoint export": (
        ("checkpoint", "export", "saved", "--to", "safetensors", "--out", "weights"),
        ("checkpoint", "export", "saved", "--to", "torch", "--training", "--out", "script"),
    ),
    "checkpoint import": (
        ("checkpoint", "import", "weights", "--out", "imported"),
        ("checkpoint", "import", "script/checkpoint.pt", "--job", "job.py", "--out", "continued"),
    ),
    "compare": (("compare", "job.py", *TWO, "--steps", "2", "--rounds", "1", "--strategies", "ddp", "pp=2:1f1b"),),
    "explain": (("explain", "fsdp", "--job", "job.py"), ("explain", "tp=2,pp=2:1f1b", "--job", "job.py")),
    "export": (
        ("export", "hsdp=2x4,bf16,ac=full", "--to", "torchtitan"),
        ("export", "fsdp,bf16,mb=2", "--to", "deepspeed", "--ranks", "8", "--job", "job.py", "--out", "written.json"),
    ),
    "layout": (
        ("layout", "job.py", "--strategy", "fsdp=2"),
        ("layout", "job.py", "--strategy", "tp=2,pp=2:1f1b"),
    ),
    "plan": (
        (*PLAN, *PIPELINE),
        (*PLAN, "--strategies", "ddp,bf16", "--against", "ds.json"),
        ("plan", "preset:gpt2", "--on", "4xA100-40GB", "--fast", "--strategies", "ddp,bf16,mb=4", "fsdp=3"),
    ),
    "plan --largest": ((*PLAN, "--largest", "--strategies", "ddp,bf16"),),
    "plan --sweep": ((*PLAN, "--sweep", "devices=2,4", "--strategies", "ddp,bf16", "fsdp,bf16"),),
    "preflight": (("preflight", "job.py", "--strategy", "fsdp,bf16"), ("preflight", "job.py")),
    "probe": (("probe", "--device", "cpu"), ("probe", *TWO)),
    "rehearse": (REHEARSE, (*REHEARSE, "--memory", "1MiB")),
    "rehearse --tune": ((*REHEARSE, "--tune", "--memory", "1GiB", "--trials", "2"),),
    "serve": (("serve", "--port", "0"),),
    "train": (
        ("train", "job.py", "--strategy", "single", "--ranks", "1", "--steps", "3", "--device", "cpu"),
        ("train", "job.py", "--strategy", "ddp", *TWO, "--steps", "3", "--out", "run"),
    ),
    "validate": (("validate", "rows.csv"),),
    "verify": (("verify", "job.py", *TWO, "--strategies", "ddp", "--steps", "1"),),
}
"""For each title, the commands whose documents it describes, in the order in which they can run."""
CONFIG = {"train_micro_batch_size_per_gpu": 8, "zero_optimization": {"stage": 2}, "bf16": {"enabled": True}}
SAVE = """import meshwright as mw
from job import job

with mw.setup(job, "single") as run:
    for batch in run.batches(steps=1):
        run.step(batch)
    run.save("saved")
"""


def prepare(folder: Path) -> None:
    """The files that the commands read."""
    (diff,) = blocks("README.md", "diff")
    (folder / "job.py").write_text(side(diff, "+"))
    (folder / "loop.py").write_text(side(diff, "-"))
    (folder / "ds.json").write_text(json.dumps(CONFIG))
    with (folder / "rows.csv").open("w", newline="") as file:
        csv.writer(file).writerows([COLUMNS, *(row.split(",") for row in ROWS)])
    (folder / "save.py").write_text(SAVE)
    run_script_alone(["save.py"], folder, {})
    shutil.copytree(folder / "saved", folder / "damaged")
    data = next((folder / "damaged").glob("*.safetensors"))
    data.write_bytes(data.read_bytes()[:-1] + b"?")


def document(command: Iterable[str], folder: Path) -> Any:
    """What a command prints with --json, also if it exits with 1."""
    words = [*command, "--json"]
    if words[0] == SHOWN_AT_ONCE:
        return _first_document(words, folder)
    if words[0] not in OWN_PROCESS:
        return json.loads(run_verb(["meshwright", *words], folder, may_fail=True))
    call = [sys.executable, "-m", "meshwright", *words]
    done = subprocess.run(call, cwd=folder, capture_output=True, text=True, check=False, env=environment())
    if not done.stdout:
        raise RuntimeError(f"{' '.join(words)}\n{done.stderr}")
    return json.loads(done.stdout)


def _first_document(words: list[str], folder: Path) -> Any:
    call = [sys.executable, "-m", "meshwright", *words]
    with subprocess.Popen(call, cwd=folder, stdout=subprocess.PIPE, text=True, env=environment()) as server:
        assert server.stdout is not None
        try:
            return json.loads(server.stdout.readline())
        finally:
            server.terminate()


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
    if not inner:
        return shape
    return {**shape, "additionalProperties": _field(MAPS[0], inner) if name in MAPS_OF_MAPS else schema_of(inner)}


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
            path = SCHEMAS / f"{title.replace(' --', '-').replace(' ', '-')}.json"
            path.write_text(
                json.dumps({**head, "description": f"meshwright {title} ... --json", **found}, indent=1) + "\n"
            )
            print(path.name, flush=True)


if __name__ == "__main__":
    main()
