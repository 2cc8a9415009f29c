"""Record the JSON of every verb on the examples and presets, and compare two recordings field by field.

    python benchmarks/verb_json.py record before.json
    python benchmarks/verb_json.py record before.json --only 'plan *' 'layout *'
    python benchmarks/verb_json.py compare before.json after.json

PYTHONPATH chooses the source that is recorded, so one copy of this script serves both sides. A recording takes a few
minutes on two cores. Verbs that start ranks or a server run in a process of their own; all others run in this one,
which saves importing PyTorch for each.

Numbers are compared exactly. What a clock or the operating system measured is listed in MEASURED: there only the
names and types of the fields are compared, and not what lists hold. A sentence that changed while its numbers did not
is reported as wording; anything else is a change of value, and then the exit code is 1.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import os
import re
import runpy
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

ROOT = Path(__file__).resolve().parent.parent
TEMPORARY = "TEMPORARY"
"""Stands in a recording for the folder that the cases write to, and inside an argument for the same."""
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"}
PATIENCE = 1200
STOPPED = (128 + signal.SIGINT, 128 + signal.SIGTERM)
"""Exit codes of a verb that was stopped from outside, and so the recording with it."""

MEASURED = {
    "plan": ("seconds",),
    "serve": ("seconds", "html"),  # the page tells the seconds, too
    "train": (
        *("seconds", "step_ms", "samples_per_s", "peak_bytes", "records.*.step_ms", "records.*.samples_per_s"),
        *("records.*.memory_mib", "events.*.at", "events.*.seconds"),
    ),
    "compare": (
        *(f"{rows}.*.{field}" for rows in ("results", "references") for field in (
            *("step_ms", "step_ms_low", "step_ms_high", "samples_per_s", "tokens_per_s", "against_best", "round_ms"),
            *("peak_mib", "process_mib", "peak_mib_ranks", "comm_share", "comm_exposed", "bubble", "time", "timeline"),
            *("memory.rest", "ranks.*.memory.rest", "forecast.error"),
        )),
        "seconds",
    ),
    "checkpoint": ("made.at",),
    "probe": ("",),
}  # fmt: skip
"""By verb, the paths of fields that are measured: `*` is any one name or index, and what lies below is included."""

CLUSTERS = ("8xA100-40GB", "4x8xH100-80GB")
DATA = ("single", "ddp", "zero1", "zero2", "fsdp", "fsdp:grad-op", "fsdp:no-shard", "hsdp=2x2")
PIPELINES = tuple(f"pp=2:{name}" for name in ("gpipe", "1f1b", "interleaved", "zb", "zbv", "dualpipev"))
MODEL = ("tp=2", "tp=4", "op=2", "op=4", "layers=2", *PIPELINES, "pp=4:1f1b")
HYBRIDS = (
    *("fsdp=2,tp=2", "zero1=2,tp=2", "ddp=2,op=2", "ddp=2,pp=2:1f1b", "fsdp=2,pp=2:zb", "tp=2,pp=2:1f1b"),
    *("hsdp=1x2,tp=2", "ddp=2,layers=2"),
)
POLICIES = (
    *("ddp,bf16", "ddp,bf16:pure", "ddp,bf16:autocast", "ddp,fp16", "fsdp,fp16", "ddp,ac=full", "fsdp,ac=selective"),
    *("fsdp,bf16,offload=optimizer", "fsdp,bf16,offload=params", "ddp,mb=1", "fsdp,bf16,compile", "tp=2,bf16,ac=full"),
    *("zero1,bf16,engine=deepspeed", "zero2,bf16,engine=deepspeed", "fsdp,bf16,engine=deepspeed"),
    "fsdp,bf16,offload=nvme:/scratch,engine=deepspeed",
)
NAMED = (*DATA, *MODEL, *HYBRIDS, *POLICIES)
EXPORTED = (
    *("ddp=8", "ddp=8,fp16", "zero1=8,bf16", "zero2=8,bf16,offload=optimizer", "fsdp=8,bf16,ac=full", "hsdp=2x4,bf16"),
    *("fsdp=8:grad-op,bf16,mb=2", "fsdp=8:no-shard", "fsdp=4,tp=2,bf16,compile", "ddp=2,pp=4:1f1b,bf16,mb=2"),
    *("fsdp=2,tp=2,pp=2:zb,bf16", "op=8", "fsdp=8,bf16:pure,offload=params,engine=deepspeed", "layers=8", "single"),
)
TARGETS = ("accelerate", "deepspeed", "torchtitan", "slurm", "kubernetes")
COLUMNS = (
    *("row", "arch", "n_layers", "d_model", "n_heads", "n_kv_heads", "d_ff", "vocab", "seq_len", "gated_mlp", "gpu"),
    *("gpus_per_node", "n_gpus", "dp_replicate", "dp_shard", "zero_stage", "tp", "pp", "pp_schedule", "micro_batch"),
    *("grad_accum", "activation_ckpt", "sequence_parallel", "grad_dtype", "param_dtype", "source", "status"),
    *("tok_s_gpu", "peak_mem_gib", "inter_node_gbps"),
)
ROWS = (
    "a,llama-1b,16,2048,32,8,8192,128256,4096,true,H100-80GB,8,8,1,8,3,1,1,,1,4,none,,,,,ok,21000,44,",
    "b,llama-1b,16,2048,32,8,8192,128256,4096,true,H100-80GB,8,8,8,1,0,1,1,,1,4,full,,,,,ok,17000,52,",
    "c,llama-1b,16,2048,32,8,8192,128256,4096,true,H100-80GB,8,8,4,1,0,2,1,,2,4,none,true,,,,ok,15000,60,",
    "d,llama-1b,16,2048,32,8,8192,128256,4096,true,H100-80GB,8,16,2,4,1,1,2,1f1b,1,8,none,,fp32,bf16,nanotron,ok,16000,39,3200",
    "e,mpt-7b,32,4096,32,,16384,50368,2048,false,A100-40GB,8,8,1,8,3,1,1,,4,1,full,,,,llm-foundry,ok,2800,33,",
    "f,mpt-7b,32,4096,32,,16384,50368,2048,false,A100-40GB,8,8,8,1,0,1,1,,1,1,none,,,,,oom,,,",
)

Document = Any
Found = dict[str, Document]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One call of the command line."""

    words: tuple[str, ...]
    alone: bool = False
    """In a process of its own."""
    reads: tuple[str, ...] = ()
    """Files that the verb writes, to be stored by the names of their fields: `records=TEMPORARY/run/records.jsonl`."""
    name: str = ""

    @property
    def title(self) -> str:
        return self.name or " ".join(self.words)


def cases(folder: Path) -> list[Case]:
    """All cases in the order in which they run: some read what earlier ones wrote."""
    described = [*example_plans(), *layouts(), *exports(), *against(), *validations(folder), *errors(folder)]
    return [*described, *on_ranks(), *preset_plans()]


def case(*words: str, alone: bool = False, reads: Sequence[str] = (), name: str = "") -> Case:
    return Case(words=(*words, "--json"), alone=alone, reads=tuple(reads), name=name)


def preset_plans() -> Iterator[Case]:
    presets = sorted(path.name.removesuffix(".json.gz") for path in (ROOT / "src/meshwright").rglob("*.json.gz"))
    for cluster in CLUSTERS:
        for preset in presets:
            yield case("plan", f"preset:{preset}", "--on", cluster, "--fast")
    choices = ("--precision", "fp32,bf16,fp16", "--offload", "none,optimizer,params", "--compile", "--batch", "256")
    yield case("plan", "preset:gpt2-xl", "--on", "8xA100-40GB", "--fast", *choices)
    yield case("plan", "preset:llama3-8b", "--on", "8xA100-40GB", "--fast", "--no-tensor", "--no-pipeline")
    yield case("plan", "preset:llama3-405b", "--on", "2xA100-40GB", "--fast")


def example_plans() -> Iterator[Case]:
    for example in ("gpt", "cnn"):
        job = f"examples/{example}.py"
        for cluster in ("2xA100-40GB", "4xA100-40GB"):
            yield case("plan", job, "--on", cluster, "--fast", "--top", "40")
        yield case(
            *("plan", job, "--on", "4xA100-40GB", "--fast", "--top", "80", "--strategies", *NAMED),
            name=f"plan {example} named strategies",
        )
    for example in ("resnet", "hf_llama"):
        yield case("plan", f"examples/{example}.py", "--on", "4xA100-40GB", "--fast")
    for strategy in ("dp", "ddp,fp8", "zero3,bf16", "layers=2", "fsdp,bf16,offload=params", "ddp,bf16,ac=full"):
        yield case("plan", "examples/gpt.py", "--on", "2xA100-40GB", "--fast", "--strategies", strategy)
    traced = ("ddp,bf16", "fsdp,bf16", "tp=2,bf16", "pp=2:1f1b,bf16", "fsdp,bf16,ac=full")
    yield case(*("plan", "examples/gpt.py", "--on", "2xA100-40GB", "--strategies", *traced), name="plan gpt traced")
    timeline = f"{TEMPORARY}/timeline.json"
    for strategy in ("pp=4:1f1b,bf16", "pp=2:zb,ddp=2,bf16"):
        words = ("plan", "examples/gpt.py", "--on", "4xA100-40GB", "--fast", "--strategies", strategy)
        yield case(*words, "--timeline", timeline, reads=[f"timeline={timeline}"])


def layouts() -> Iterator[Case]:
    strategies = (
        *("tp=2", "op=2", "pp=2:1f1b", "pp=2:dualpipev", "fsdp=2,tp=2", "ddp=2,pp=2:zb", "tp=2,pp=2:interleaved"),
        *("layers=2", "hsdp=2x2"),
    )
    for strategy in strategies:
        yield case("layout", "examples/gpt.py", "--strategy", strategy)
    yield case("layout", "examples/gpt.py", "--strategy", "fsdp", "--ranks", "4")
    yield case("layout", "examples/cnn.py", "--strategy", "op=2")
    yield case("layout", "examples/cnn.py", "--strategy", "layers=2")
    yield case("layout", "examples/hf_llama.py", "--strategy", "tp=2,pp=2:1f1b")


def exports() -> Iterator[Case]:
    for target in TARGETS:
        for strategy in EXPORTED:
            launches = target in ("slurm", "kubernetes")
            job = ("--job", "examples/gpt.py") if launches or strategy == "ddp=8" else ()
            yield case("export", strategy, "--to", target, *job)
        yield Case(words=("export", "fsdp=4,tp=2,bf16,compile", "--to", target, "--job", "examples/gpt.py"))


def against() -> Iterator[Case]:
    """Configs of other frameworks that export wrote, read back by the planner."""
    for target, ending in (("accelerate", "yaml"), ("deepspeed", "json"), ("torchtitan", "toml")):
        for strategy in ("fsdp=8,bf16,ac=full", "zero2=8,bf16"):
            path = f"{TEMPORARY}/{target}-{strategy.partition('=')[0]}.{ending}"
            yield case("export", strategy, "--to", target, "--out", path)
            yield case("plan", "preset:gpt2-xl", "--on", "8xA100-40GB", "--fast", "--against", path)


def validations(folder: Path) -> Iterator[Case]:
    path = folder / "rows.csv"
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([COLUMNS, *(row.split(",") for row in ROWS)])
    yield case("validate", str(path))
    yield case("plan", "preset:llama3.2-1b", "--on", "8xH100-80GB", "--fast", "--calibrate", str(path))


def errors(folder: Path) -> Iterator[Case]:
    """Bad input: what is told, and the exit code."""
    (folder / "no_job.py").write_text("model = 1\n")
    (folder / "empty.csv").write_text("arch,gpu\n")
    (folder / "plans.json").write_text('{"plans": []}')
    gpt = "examples/gpt.py"
    yield case("plan", "preset:gtp2", "--on", "8xA100-40GB")
    yield case("plan", gpt, "--on", "8xA1000")
    yield case("plan", gpt, "--on", "8xA100-40GB", "--strategies", "tpp=4")
    yield case("plan", gpt, "--on", "8xA100-40GB", "--precision", "fp64")
    yield case("plan", gpt, "--on", "2xA100-40GB", "--fast", "--strategies", "ddp", "--timeline", f"{TEMPORARY}/t.html")
    yield case("plan", gpt)
    yield case("layout", gpt, "--strategy", "fsdp:full-shard")
    yield case("layout", gpt, "--strategy", "ddp,zero1")
    yield case("layout", gpt, "--strategy", "tp=3")
    yield case("layout", gpt, "--strategy", "pp=99:1f1b")
    yield case("layout", gpt, "--strategy", "ddp=3", "--ranks", "4")
    yield case("layout", "examples/cnn.py", "--strategy", "tp=2")
    yield case("layout", str(folder / "no_job.py"), "--strategy", "ddp=2")
    yield case("layout", "missing.py", "--strategy", "ddp=2")
    yield case("train", gpt, "--strategy", "hsdp=2", "--ranks", "2")
    yield case("train", gpt, "--strategy", "tp=2,op=2", "--ranks", "4")
    yield case("train", gpt, "--strategy", "tp=2", "--ranks", "3")
    yield case("train", gpt, "--ranks", "2", "--profile", "5")
    yield case("verify", gpt, "--ranks", "2", "--strategies", "tp=4")
    yield case("compare", gpt, "--ranks", "2", "--on", "missing.json")
    yield case("export", "fsdp=8", "--to", "megatron")
    yield case("export", "fsdp", "--to", "deepspeed")
    yield case("export", str(folder / "plans.json"), "--to", "deepspeed")
    yield case("validate", str(folder / "empty.csv"))
    yield case("checkpoint", "show", str(folder / "nothing"))
    yield case("serve", "--host", "0.0.0.0", "--port", "0")


def on_ranks() -> Iterator[Case]:
    """What starts processes: verify, train and its checkpoints, compare, probe."""
    gpt, two = "examples/gpt.py", ("--ranks", "2", "--device", "cpu")
    for strategy in ("ddp", "tp=2", "pp=2:1f1b"):
        yield trained(strategy, "3")
    for strategy in ("ddp", "tp=2", "pp=2:1f1b"):
        run = f"{TEMPORARY}/{strategy}"
        yield case("checkpoint", "show", run, "--tensors")
        yield case("checkpoint", "check", run, "--job", gpt)
    yield case("checkpoint", "check", f"{TEMPORARY}/ddp", "--job", "examples/cnn.py")
    weights = f"{TEMPORARY}/weights"
    yield case("checkpoint", "export", f"{TEMPORARY}/tp=2", "--to", "safetensors", "--out", weights)
    yield case("checkpoint", "export", f"{TEMPORARY}/tp=2", "--to", "hf", "--out", f"{TEMPORARY}/hf")
    yield case("checkpoint", "import", weights, "--job", gpt, "--out", f"{TEMPORARY}/imported")
    yield case("checkpoint", "show", f"{TEMPORARY}/imported")
    yield trained("fsdp", "4", "--resume", run="pp=2:1f1b")
    yield case("checkpoint", "show", f"{TEMPORARY}/pp=2:1f1b", "--tensors", name="checkpoint show resumed")
    for example, strategies in (
        ("gpt", ("ddp", "zero1", "fsdp,bf16", "tp=2", "pp=2:1f1b", "layers=2")),
        ("cnn", ("zero2", "op=2")),
    ):
        yield case("verify", f"examples/{example}.py", *two, "--strategies", *strategies, alone=True)
    few = ("--steps", "2", "--rounds", "1", "--strategies", "ddp", "pp=2:1f1b", "tp=2,bf16")
    yield case("compare", gpt, *two, *few, alone=True)
    yield case("probe", "--device", "cpu", alone=True)


def trained(strategy: str, steps: str, *more: str, run: str = "") -> Case:
    out = f"{TEMPORARY}/{run or strategy}"
    words = ("train", "examples/gpt.py", "--strategy", strategy, "--ranks", "2", "--device", "cpu", "--steps", steps)
    reads = [f"records={out}/records.jsonl", f"events={out}/events.jsonl"]
    return case(*words, "--out", out, *more, alone=True, reads=reads)


ASKED: dict[str, Document] = {
    "gpt2": {"model": "preset:gpt2", "device": "A100-40GB", "devices": 8, "batch": 64},
    "bad device": {"model": "preset:gpt2", "device": "A1000", "devices": 8},
    "bad field": {"model": "preset:gpt2", "devcies": 8},
}
"""Requests to the server, by name."""


def record(out: Path, only: Sequence[str]) -> None:
    """Run the cases and store what they said."""
    os.environ |= ENVIRONMENT
    os.chdir(ROOT)
    found: dict[str, Found] = json.loads(out.read_text()) if only and out.exists() else {}
    with tempfile.TemporaryDirectory() as folder:
        hidden = {folder: TEMPORARY, str(ROOT): "ROOT"}

        def wanted(title: str) -> bool:
            return not only or any(fnmatch(title, some) for some in only)

        def keep(title: str, run: Callable[[], Found]) -> None:
            start = time.perf_counter()
            found[title] = {"verb": title.split()[0], **hide(run(), hidden)}
            out.write_text(json.dumps(found, indent=1) + "\n")
            print(f"{time.perf_counter() - start:6.1f} s  exit {found[title]['exit']}  {title}", flush=True)

        for one in cases(Path(folder)):
            title = hide(one.title, hidden)
            if wanted(title):
                keep(title, partial(call, one, folder))
        requests = {f"serve {name}": asked for name, asked in ASKED.items() if wanted(f"serve {name}")}
        with running_server() if requests else nullcontext("") as address:
            for title, asked in requests.items():
                keep(title, partial(ask, address, asked))
    print(f"{len(found)} cases of {source()} in {out}")


def source() -> str:
    import meshwright

    return str(Path(meshwright.__file__).parent)


def hide(value: Document, names: dict[str, str]) -> Document:
    """The value with the machine's own folders replaced in every text."""
    if isinstance(value, str):
        for name, instead in names.items():
            value = value.replace(name, instead)
        return value
    if isinstance(value, list):
        return [hide(one, names) for one in value]
    if isinstance(value, dict):
        return {hide(key, names): hide(one, names) for key, one in value.items()}
    return value


def call(one: Case, folder: str) -> Found:
    words = [word.replace(TEMPORARY, folder) for word in one.words]
    code, printed, told = in_process_of_its_own(words) if one.alone else in_this_process(words)
    document, text = read_document(printed)
    for part in one.reads:
        field, _, path = part.replace(TEMPORARY, folder).partition("=")
        if isinstance(document, dict) and Path(path).exists():
            document = {**document, field: read_file(Path(path))}
    # Beside a JSON document, stderr has only progress.
    return {"exit": code, "json": document, "text": text, "errors": told.strip().splitlines() if code or text else []}


def in_this_process(words: list[str]) -> tuple[int | str, str, str]:
    printed, told, before = io.StringIO(), io.StringIO(), sys.argv
    code: int | str = 0
    sys.argv = ["meshwright", *words]
    try:
        with redirect_stdout(printed), redirect_stderr(told):
            runpy.run_module("meshwright", run_name="__main__")
    except SystemExit as done:
        code = done.code or 0
    except Exception as error:  # a defect of the verb is recorded as such
        code = f"{type(error).__name__}: {error}"
    finally:
        sys.argv = before
    if code in STOPPED:
        sys.exit(code)
    return code, printed.getvalue(), told.getvalue()


def in_process_of_its_own(words: list[str]) -> tuple[int | str, str, str]:
    command = [sys.executable, "-m", "meshwright", *words]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        return f"no answer within {PATIENCE} s", "", ""
    return done.returncode, done.stdout, done.stderr


def read_document(printed: str) -> tuple[Document, list[str]]:
    """The JSON document that was printed; else its lines."""
    try:
        return json.loads(printed), []
    except ValueError:
        return None, printed.splitlines()


def read_file(path: Path) -> Document:
    text = path.read_text()
    return [json.loads(line) for line in text.splitlines()] if path.suffix == ".jsonl" else json.loads(text)


@contextmanager
def running_server() -> Iterator[str]:
    """The address of a server that is started for the requests."""
    command = [sys.executable, "-m", "meshwright", "serve", "--port", "0", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as server:
        assert server.stdout is not None
        try:
            yield json.loads(server.stdout.readline())["url"].rstrip("/")
        finally:
            server.terminate()


def ask(address: str, asked: Document) -> Found:
    request = Request(f"{address}/api/plan", json.dumps(asked).encode(), {"Content-Type": "application/json"})
    try:
        with urlopen(request, timeout=PATIENCE) as answer:
            return {"exit": answer.status, "json": json.load(answer), "text": [], "errors": []}
    except HTTPError as error:
        return {"exit": error.code, "json": json.load(error), "text": [], "errors": []}


Place = tuple[str, ...]
"""The names and indices that lead to a value in a document."""


@dataclass(frozen=True, kw_only=True)
class Difference:
    case: str
    path: Place
    before: Document
    after: Document
    wording: bool = False

    @property
    def kind(self) -> tuple[str, ...]:
        """Differences of one kind are shown once: the verb, and the path without indices and strategies."""
        names = (re.sub(r"^(\d+|\[.*\])$", "*", name) for name in self.path)
        reworded = (pattern(self.before), pattern(self.after)) if self.wording else ()
        return self.case.split()[0], *names, *reworded


def pattern(text: str) -> str:
    """A sentence without its numbers and strategies."""
    return re.sub(r"\S*[\d=,]\S*", "#", text)


def differences(name: str, before: Found, after: Found) -> Iterator[Difference]:
    """All differences of one case."""
    measured = [tuple(filter(None, path.split("."))) for path in MEASURED.get(before["verb"], ())]
    for field in ("exit", "json", "text", "errors"):
        for path, left, right in compare_values((), before[field], after[field], measured if field == "json" else []):
            wording = is_wording(left, right)
            yield Difference(case=name, path=(field, *path), before=left, after=right, wording=wording)


def compare_values(
    path: Place, before: Document, after: Document, measured: Sequence[Place]
) -> Iterator[tuple[Place, Document, Document]]:
    if isinstance(before, dict) and isinstance(after, dict):
        yield from compare_fields(path, before, after, measured)
    elif any(is_below(path, one) for one in measured):
        if type(before) is not type(after):
            yield path, before, after
    elif isinstance(before, list) and isinstance(after, list):
        yield from compare_lists(path, before, after, measured)
    elif isinstance(before, str) and isinstance(after, str) and "\n" in before and "\n" in after:
        yield from compare_lists(path, before.splitlines(), after.splitlines(), measured)
    elif before != after or type(before) is not type(after):
        yield path, before, after


def compare_fields(
    path: Place, before: Found, after: Found, measured: Sequence[Place]
) -> Iterator[tuple[Place, Document, Document]]:
    for name in [*before, *(name for name in after if name not in before)]:
        if name in before and name in after:
            yield from compare_values((*path, name), before[name], after[name], measured)
        else:
            yield (*path, name), before.get(name, "(no such field)"), after.get(name, "(no such field)")
    if set(before) == set(after) and list(before) != list(after):
        yield (*path, "(order)"), list(before), list(after)


def compare_lists(
    path: Place, before: list[Document], after: list[Document], measured: Sequence[Place]
) -> Iterator[tuple[Place, Document, Document]]:
    """By index; rows of strategies are compared by strategy, and so is their order."""
    left, right = by_strategy(before), by_strategy(after)
    if left is not None and right is not None:
        yield from compare_fields(path, left, right, measured)
    elif len(before) != len(after):
        yield (*path, "(length)"), before, after
    else:
        for index, (one, other) in enumerate(zip(before, after, strict=True)):
            yield from compare_values((*path, str(index)), one, other, measured)


def by_strategy(rows: list[Document]) -> Found | None:
    """Rows by their strategy's text, where each has one of its own."""
    if not rows or not all(isinstance(row, dict) and "strategy" in row for row in rows):
        return None
    named = {f"[{row['strategy']}]": row for row in rows}
    return named if len(named) == len(rows) else None


def is_below(path: Place, measured: Place) -> bool:
    return len(path) >= len(measured) and all(want in ("*", name) for want, name in zip(measured, path, strict=False))


def is_wording(before: Document, after: Document) -> bool:
    """Whether two values are sentences with the same numbers in them."""
    if not (isinstance(before, str) and isinstance(after, str) and " " in before.strip() and " " in after.strip()):
        return False
    return sorted(re.findall(r"\d+(?:\.\d+)?", before)) == sorted(re.findall(r"\d+(?:\.\d+)?", after))


def compare(before: Path, after: Path, *, every: bool) -> int:
    """Print the differences of two recordings, values first; 1 if there are any beside wording."""
    left, right = json.loads(before.read_text()), json.loads(after.read_text())
    both = [name for name in left if name in right]
    for name in {**left, **right}:
        if name not in both:
            print(f"only in {before if name in left else after}: {name}")
    found = [one for name in both for one in differences(name, left[name], right[name])]
    values, words = [one for one in found if not one.wording], [one for one in found if one.wording]
    changed = {one.case for one in values}
    print(f"{len(both)} cases, {len(changed)} with changes of value ({len(values)}), {len(words)} changes of wording")
    for title, some in (("value", values), ("wording", words)):
        kinds: dict[tuple[str, ...], list[Difference]] = {}
        for one in some:
            kinds.setdefault(one.kind, []).append(one)
        for alike in kinds.values():
            show(title, alike, every=every)
    return 1 if values or len(both) < len({**left, **right}) else 0


def show(title: str, alike: list[Difference], *, every: bool) -> None:
    print(f"\n{title}, {len(alike)} in {len({one.case for one in alike})} cases")
    for one in alike if every else alike[:1]:
        print(f"  {one.case}\n    {'.'.join(one.path)}\n      - {short(one.before)}\n      + {short(one.after)}")


def short(value: Document) -> str:
    text = json.dumps(value)
    return text if len(text) < 600 else f"{text[:600]} ... ({len(text)} characters)"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    recording = verbs.add_parser("record", help="run the verbs and store their documents")
    recording.add_argument("out", type=Path)
    recording.add_argument(
        "--only", nargs="+", default=(), help="patterns of cases, as in 'plan *'; others in OUT stay as they are"
    )
    comparing = verbs.add_parser("compare", help="print the differences of two recordings")
    comparing.add_argument("before", type=Path)
    comparing.add_argument("after", type=Path)
    comparing.add_argument("--every", action="store_true", help="every difference, instead of one of each kind")
    asked = parser.parse_args()
    if asked.verb == "record":
        record(asked.out.resolve(), asked.only)
    else:
        sys.exit(compare(asked.before, asked.after, every=asked.every))


if __name__ == "__main__":
    main()
