"""Attack runs in training: kill ranks, launchers and all at once, write to one folder twice, hang, leave silently.

    python benchmarks/attack.py --kills 6 --parallel 2 --json docs/data/attack.json

Runs are `meshwright train` of two and four CPU ranks, over loopback, and all end by themselves or with this program.
Only processes that it started are killed. A killed launcher is started again here, with `--resume`, as a scheduler
does. A run must end bit for bit as the undisturbed one of the same strategy and ranks, all generators included; after
every kill of a launcher, no process, temporary folder or shared memory of it may be left ten seconds later.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from faults import JOB, PATIENCE, Victim, same_state

STRATEGIES = ("ddp", "fsdp", "zero1", "tp=2", "pp=2:1f1b")
RANKS = (2, 4)
STEPS = 60
TARGETS = ("rank", "launcher", "all", "rank in a save", "launcher in a save", "rank at the start")
LEFT_AFTER_S = 10.0
WRITERS = 20
HANGS = {
    "forward": ("Rank 1 has been silent", "in spoil"),
    "dataset": ("Rank 1 has been silent", "in spoil"),
    "stop": ("Rank 1 has been silent", "does not answer"),
    "exit 7": ("Rank 1 ended with exit code 7",),
    "exit 0": ("Rank 1 ended with exit code 0",),
}
"""What happens to rank 1 in its tenth step, and what has to be said of it."""


@dataclass
class Killed:
    strategy: str
    ranks: int
    kills: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    """What was still there ten seconds after a launcher was killed."""
    taken_over: int = 0
    """Locks of killed launchers that the next start took over."""
    equal: bool = False
    said: str = ""


def attack(strategy: str, ranks: int, kills: int, folder: Path, dice: random.Random) -> Killed:
    """One run, hurt so many times, beside one that was not."""
    name = f"{strategy.replace(':', '-')}-{ranks}"
    found = Killed(strategy, ranks)
    temporary = folder / f"{name}-tmp"
    temporary.mkdir()
    options: dict[str, Any] = {"ranks": ranks, "steps": STEPS, "max-restarts": kills + 4}
    whole = Victim(strategy, folder / f"{name}-whole", temporary=temporary, **options)
    whole.process.wait(PATIENCE)
    kept = set(temporary.iterdir())  # torch's own caches, which every run leaves
    victim = Victim(strategy, folder / name, temporary=temporary, **options)
    for number in range(kills):
        target = TARGETS[(number + dice.randrange(len(TARGETS))) % len(TARGETS)] if number else "launcher"
        wanted = int((number + dice.random()) * (STEPS - 8) / kills) + 1
        if not wait_for_moment(victim, target, wanted, ranks, dice):
            break
        found.kills.append(target)
        if hurt(victim, target, dice):
            found.left += leftovers(temporary, kept)
            victim = Victim(strategy, folder / name, "--resume", temporary=temporary, **options)
    try:
        ended = victim.process.wait(PATIENCE) == 0
    except subprocess.TimeoutExpired:
        ended = False
        victim.process.kill()
    victim.errors.seek(0)
    said = victim.errors.read()
    found.taken_over = said.count("taking over its lock")
    found.equal = ended and same_state(victim.out, whole.out)
    found.said = "" if found.equal else said[-3000:]
    return found


def wait_for_moment(victim: Victim, target: str, wanted: int, ranks: int, dice: random.Random) -> bool:
    """Whether the moment came before the run ended."""
    deadline = time.monotonic() + PATIENCE
    while victim.running and time.monotonic() < deadline:
        started = len(victim.ranks()) == ranks
        if "start" in target and started:
            time.sleep(3 * dice.random())
            return victim.running
        if started and victim.step() >= wanted and ("save" not in target or victim.saving()):
            return True
        time.sleep(0.002)
    return False


def hurt(victim: Victim, target: str, dice: random.Random) -> bool:
    """Kill; True if the launcher was killed, so that somebody has to start it again."""
    ranks, launcher = list(victim.ranks().values()), victim.process.pid
    if "launcher" in target:
        pids = [launcher]
    else:
        pids = [*ranks, launcher] if target == "all" else [dice.choice(ranks)] if ranks else []
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    if launcher in pids:
        victim.process.wait()
    return launcher in pids


def leftovers(temporary: Path, kept: set[Path]) -> list[str]:
    """What is left of a killed launcher, once it has had its ten seconds."""
    deadline = time.monotonic() + LEFT_AFTER_S
    while (found := [*_processes(temporary), *map(str, set(temporary.iterdir()) - kept), *_shared_memory()]) and (
        time.monotonic() < deadline
    ):
        time.sleep(0.1)
    return found


def _processes(temporary: Path) -> list[str]:
    mark = f"TMPDIR={temporary}".encode()
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if mark in (entry / "environ").read_bytes().split(b"\0"):
                found.append((entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()[:200])
        except OSError:
            continue
    return found


def _shared_memory() -> list[str]:
    """Torch's names hold the pid; those of processes that live are theirs."""
    names = [path.name for path in Path("/dev/shm").glob("torch_*")]
    return [name for name in names if not Path(f"/proc/{name.split('_')[1]}").exists()]


def two_writers(count: int, parallel: int, folder: Path) -> dict[str, Any]:
    """A run, and others that are told the same folder while it trains."""
    holder = Victim("ddp", folder / "owned", ranks=2, steps=1_000_000)
    while not holder.step() and holder.running:
        time.sleep(0.05)

    def second(number: int) -> bool:
        command = [sys.executable, "-m", "meshwright", "train", str(JOB), "--device", "cpu", "--resume"]
        options = ["--strategy", "ddp", "--ranks", "2", "--steps", "5", "--out", str(holder.out)]
        done = subprocess.run([*command, *options], capture_output=True, text=True, timeout=PATIENCE)
        return done.returncode == 2 and f"process {holder.process.pid}," in done.stderr

    with ThreadPoolExecutor(parallel) as pool:
        refused = sum(pool.map(second, range(count)))
    undisturbed = holder.running
    holder.process.send_signal(signal.SIGTERM)
    holder.process.wait(PATIENCE)
    return {"tried": count, "refused_by_name": refused, "holder_undisturbed": undisturbed}


def hang(how: str, folder: Path) -> dict[str, Any]:
    """One run whose rank 1 hangs or leaves."""
    job = folder / f"{how.replace(' ', '_')}_job.py"
    job.write_text(JOB.read_text() + SPOILED.format(how=how))
    command = [sys.executable, "-m", "meshwright", "train", str(job), "--device", "cpu", "--patience", "10"]
    begun = time.monotonic()
    words = ["--ranks", "2", "--steps", "40"]
    done = subprocess.run([*command, *words], capture_output=True, text=True, timeout=PATIENCE)
    last = done.stderr.strip().splitlines()[-1]
    named = all(part in last for part in HANGS[how])
    return {"how": how, "named": named, "said": last, "seconds": round(time.monotonic() - begun, 1)}


SPOILED = """
import os, signal, time
from dataclasses import replace

HOW, CALLS = {how!r}, [0]

def spoil(samples):
    if os.environ.get("RANK") != "1":
        return
    CALLS[0] += samples
    if CALLS[0] < 10 * 12:
        return
    if HOW.startswith("exit"):
        os._exit(int(HOW[5:]))
    if HOW == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(10_000)

class SpoiledData(MadeUp):
    def __getitem__(self, index):
        if HOW == "dataset":
            spoil(1)
        return super().__getitem__(index)

class Spoiled(Model):
    def forward(self, x):
        if HOW != "dataset":
            spoil(12)
        return super().forward(x)

job = replace(job, model=Spoiled, data=SpoiledData)
"""


def sound_run(number: int, folder: Path) -> bool:
    """A run with compiled code and saves, of which nothing may be said but that it is done."""
    victim = Victim("ddp,compile", folder / f"sound-{number}", ranks=2, steps=12)
    ended = victim.process.wait(2 * PATIENCE) == 0
    victim.errors.seek(0)
    return ended and "silent" not in victim.errors.read()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=6, help="of each of ten runs")
    parser.add_argument("--hangs", type=int, default=1, help="0: none of them")
    parser.add_argument("--writers", type=int, default=WRITERS)
    parser.add_argument("--sound", type=int, default=20, help="runs with compiled code that nothing happens to")
    parser.add_argument("--parallel", type=int, default=1, help="runs side by side")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    machine = {"torch": torch.__version__, "python": platform.python_version(), "cores": os.cpu_count()}
    document: dict[str, Any] = {"machine": machine, "kills": 0, "runs": [], "hangs": []}

    def tell(found: Any) -> None:
        print(json.dumps(found), file=sys.stderr, flush=True)
        if asked.json is not None:  # as it grows: an attack that is ended early leaves what it found
            asked.json.write_text(json.dumps(document, indent=1) + "\n")

    with tempfile.TemporaryDirectory(prefix="attack-") as name, ThreadPoolExecutor(asked.parallel) as pool:
        folder = Path(name)
        for found in pool.map(lambda how: hang(how, folder), HANGS if asked.hangs else ()):
            document["hangs"].append(found)
            tell(found)
        if asked.writers:
            document["two_writers"] = two_writers(asked.writers, asked.parallel, folder)
            tell(document["two_writers"])
        plans = [(strategy, ranks) for ranks in RANKS for strategy in STRATEGIES] if asked.kills else []
        for killed in pool.map(
            lambda plan: attack(*plan, asked.kills, folder, random.Random(f"{asked.seed}/{plan}")), plans
        ):
            document["runs"].append(asdict(killed))
            document["kills"] += len(killed.kills)
            tell(asdict(killed))
        silent = sum(pool.map(lambda number: sound_run(number, folder), range(asked.sound)))
        document["sound_runs"] = {"tried": asked.sound, "silent": silent}
        tell(document["sound_runs"])
    sys.exit(0 if is_sound(document) else 1)


def is_sound(document: dict[str, Any]) -> bool:
    writers = document.get("two_writers", {"tried": 0, "refused_by_name": 0})
    return (
        all(run["equal"] and not run["left"] for run in document["runs"])
        and all(found["named"] for found in document["hangs"])
        and writers["tried"] == writers["refused_by_name"]
        and document["sound_runs"]["tried"] == document["sound_runs"]["silent"]
    )


if __name__ == "__main__":
    main()
