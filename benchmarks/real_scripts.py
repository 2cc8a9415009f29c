"""Public training scripts, ported to `mw.parallelize` and as jobs, beside the originals on one process.

python benchmarks/real_scripts.py CLONES [--only NAME] [--strategies ddp,fsdp] [--out docs/data/real_scripts.json]

CLONES is a folder of bare clones, CLONES/owner+name or CLONES/owner+name/repo. Nothing of the scripts is kept in this
repository: ports are edits by anchors (benchmarks/ported), data and pretrained models are made up and small.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE / "ported"))

from edits import Edit, apply, changed_lines  # noqa: E402
from of_hugging_face import CV, NLP, PEFT  # noqa: E402
from of_karpathy import LLAMA2C, NANOGPT  # noqa: E402
from of_pytorch import DCGAN, IMAGENET, T5, TORCHRUN  # noqa: E402
from script import Script  # noqa: E402

from jobs import JOBS  # noqa: E402

SCRIPTS = [NANOGPT, IMAGENET, TORCHRUN, T5, NLP, CV, PEFT, DCGAN, LLAMA2C]
OWN_LOOP = ["ddp", "fsdp", "zero1", "tp=2"]
AS_JOBS = ["ddp", "fsdp", "zero1", "tp=2", "pp=2:1f1b"]
CLOSE = 1e-5
RANKS = 2
LIMIT_S = 500


def repository(clones: Path, script: Script) -> Path:
    inner = clones / script.repository / "repo"
    return inner if inner.is_dir() else clones / script.repository


def check_out(clones: Path, script: Script, folder: Path) -> str:
    """Put the files of a script into an empty folder, and return the commit they are of."""
    git = ["git", "--git-dir", str(repository(clones, script))]
    commit = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    for root, names in (
        (script.folder, [script.main, *script.files]),
        ("", [script.library] if script.library else []),
    ):
        paths = [str(Path(root) / name) for name in names]
        if not paths:
            continue
        tree = subprocess.run([*git, "archive", "HEAD", "--", *paths], check=True, capture_output=True).stdout
        depth = len(Path(root).parts) if root else len(Path(names[0]).parts) - 1
        unpack = [
            "tar",
            "-x",
            "-C",
            str(folder),
            f"--strip-components={depth if root or script.library in names else 0}",
        ]
        subprocess.run(unpack, input=tree, check=True)
    return commit


def write(folder: Path, script: Script, *versions: Mapping[str, Sequence[Edit]]) -> dict[str, str]:
    """The script's files after edits, by name; only those that an edit names, and the main one."""
    names = {script.main, *(name for version in versions for name in version)}
    texts = {name: (folder / name).read_text() for name in names}
    for version in versions:
        texts |= {name: apply(texts[name], edits) for name, edits in version.items()}
    return texts


class Bench:
    """One script in a folder of its own."""

    def __init__(self, clones: Path, script: Script, folder: Path) -> None:
        self.script, self.folder = script, folder
        self.fetched = folder / "fetched"
        self.fetched.mkdir()
        self.commit = check_out(clones, script, self.fetched)
        script.prepare(self.fetched)
        self.texts = write(self.fetched, script, script.setting, script.plain)

    def version(self, name: str, edits: Mapping[str, Sequence[Edit]]) -> tuple[Path, int]:
        """A copy of the folder with a port in it, and its number of changed lines."""
        made = self.folder / name
        subprocess.run(["cp", "-r", str(self.fetched), str(made)], check=True)
        texts = write(self.fetched, self.script, self.script.setting, self.script.plain, edits)
        count = 0
        for file, text in texts.items():
            plain = self.texts.get(file, (self.fetched / file).read_text())
            count += changed_lines(plain, text)
            (made / file).write_text(text)
        return made, count

    def accelerate(self) -> tuple[Path, int]:
        """The script under Accelerate: our port, or as it was written."""
        if not self.script.plain:
            return self.version("accelerate", self.script.accelerate)
        made, _ = self.version("accelerate", {})
        texts = write(self.fetched, self.script, self.script.setting)
        for file, text in texts.items():
            (made / file).write_text(text)
        return made, sum(changed_lines(self.texts[file], text) for file, text in texts.items())

    def run(self, folder: Path, versions: Mapping[str, str], *, ranks: int = 1) -> dict[str, dict[str, Any]]:
        """The losses of every backward pass of each version, averaged over ranks; or its error."""
        out = self.folder / "losses.json"
        told = ";;".join(f"{name}=>{what}" for name, what in versions.items())
        environment = dict(os.environ, OMP_NUM_THREADS="1", ACCELERATE_USE_CPU="1")
        environment |= {"PYTHONPATH": str(HERE.parent / "src"), "NOTE_BATCHES": str(self.folder / "batches.pt")}
        start = [sys.executable]
        if ranks > 1:
            start += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        elif self.script.as_ranks:
            environment |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
            environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
        command = [*start, str(HERE / "ported" / "run_script.py"), str(out), str(folder), told, *self.script.arguments]
        try:
            done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT_S)
            ended = done.stderr[-2000:]
        except subprocess.TimeoutExpired:
            ended = f"not done after {LIMIT_S} s"
        single = ranks == 1 and not self.script.as_ranks
        files = [out] if single else [out.with_suffix(f".{rank}.json") for rank in range(ranks)]
        found = [json.loads(file.read_text()) if file.exists() else {} for file in files]
        return {name: _over_ranks([one.get(name, {"error": ended}) for one in found]) for name in versions}


def _over_ranks(found: list[dict[str, Any]]) -> dict[str, Any]:
    for one in found:
        if "error" in one:
            return one
    losses = [sum(each) / len(each) for each in zip(*(one["losses"] for one in found), strict=True)]
    return found[0] | {"losses": losses}


def beside(found: Mapping[str, Any], original: Mapping[str, Any]) -> dict[str, Any]:
    """How far losses are from the original's, relative to them."""
    if "error" in found:
        return {"refused" if "Refused" in found["error"][:30] else "error": found["error"].splitlines()[0][:400]}
    ours, theirs = found["losses"], original["losses"]
    if passes := found.get("passes"):  # a job's step has the passes of one step, whose losses are shares of its loss
        theirs = [sum(theirs[first : first + passes]) for first in range(0, len(theirs), passes)]
    if len(ours) != len(theirs):
        return {"error": f"{len(ours)} backward passes, and {len(theirs)} of the original"}
    return {"apart": max(abs(a - b) / max(abs(b), 1e-12) for a, b in zip(ours, theirs, strict=True))}


def measure(
    clones: Path, script: Script, strategies: Sequence[str], jobs: Sequence[str], *, with_accelerate: bool
) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(clones, script, Path(folder))
        made, _ = bench.version("original", {})
        original = bench.run(made, {"original": str(made / script.main)})["original"]
        row: dict[str, Any] = {"script": script.name, "commit": bench.commit, "passes": len(original.get("losses", []))}
        if "error" in original:
            return row | {"error": original["error"], "trace": original.get("trace", "")}
        made, row["accelerate_lines"] = bench.accelerate()
        if with_accelerate:
            found = bench.run(made, {"accelerate": str(made / script.main)})["accelerate"]
            row["accelerate"] = beside(found, original)
        versions = {}
        for strategy in strategies:
            made, row["own_loop_lines"] = bench.version(f"own-{strategy}", script.own_loop(strategy))
            versions[f"own_loop {strategy}"] = str(made / script.main)
        versions |= {f"job {strategy}": f"job:{script.name}:{strategy}" for strategy in jobs if script.name in JOBS}
        for name, found in bench.run(made, versions, ranks=RANKS).items():
            kind, strategy = name.split()
            row.setdefault(kind, {})[strategy] = beside(found, original)
            if os.environ.get("TRACE"):
                print(name, found.get("trace", ""), file=sys.stderr)
        return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("clones", type=Path)
    parser.add_argument("--only", default="", help="a part of the scripts' names")
    parser.add_argument("--strategies", default=";".join(OWN_LOOP), help="of own loops, with ; between them")
    parser.add_argument("--jobs", default=";".join(AS_JOBS), help="of jobs, with ; between them")
    parser.add_argument("--accelerate", action="store_true", help="run the ports to Accelerate, too")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    rows = []
    for script in SCRIPTS:
        if given.only.lower() in script.name.lower():
            strategies, jobs = ([one for one in text.split(";") if one] for text in (given.strategies, given.jobs))
            rows.append(measure(given.clones, script, strategies, jobs, with_accelerate=given.accelerate))
            print(json.dumps(rows[-1]), flush=True)
    if given.out is not None:
        given.out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
