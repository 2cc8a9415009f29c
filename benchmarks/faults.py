"""Kill ranks of runs in training, at random moments and inside of saves, and see that nothing is lost.

    python benchmarks/faults.py --runs 50 --json docs/data/faults.json

Every run is a `meshwright train` of four CPU ranks that saves itself every three steps. A random rank gets SIGKILL,
once or twice a run: while ranks start, in the middle of training, or while a checkpoint is being written. Nobody helps
the run on. It must end with every parameter and all optimizer state, bit for bit, as the uninterrupted run of the same
strategy has them; and after every kill, what `latest` names must be a whole and sound checkpoint.
"""

from __future__ import annotations

import argparse
import atexit
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

from meshwright.checkpoint.folder import CHECKPOINTS, LATEST, find_checkpoint
from meshwright.checkpoint.integrity import find_damage
from meshwright.checkpoint.manifest import read_manifest
from meshwright.checkpoint.whole_tensors import WholeTensors

JOB = Path(__file__).with_name("faults_job.py")
STRATEGIES = ("ddp", "zero1", "zero2", "fsdp", "hsdp=2x2", "tp=2,fsdp", "pp=2:1f1b", "pp=2:interleaved,fsdp")
MOMENTS = ("start", "step", "save", "save")
RANKS, STEPS, SAVE_EVERY = 4, 45, 3
PATIENCE = 300  # seconds, for one run; on an idle machine it takes 30


@dataclass
class Kill:
    moment: str
    """What was waited for."""
    rank: int
    step: int
    """The last one that was recorded."""
    saving: bool
    """Whether a checkpoint was half written."""
    latest: str | None
    latest_sound: bool


@dataclass
class Outcome:
    strategy: str
    kills: list[Kill] = field(default_factory=list)
    ended: bool = False
    equal: bool = False
    restarts: int = 0
    seconds: float = 0.0
    said: str = ""


class Victim:
    """A run in training that can be looked at and hurt."""

    def __init__(self, strategy: str, out: Path, *words: str, temporary: Path | None = None, **changed: object) -> None:
        """`words` and `changed` are further options; `temporary` is where it may put temporary files."""
        self.out = out
        self.errors = (out.parent / f"{out.name}.log").open("a+")
        command = [sys.executable, "-m", "meshwright", "train", str(JOB), "--strategy", strategy]
        options = {"ranks": RANKS, "steps": STEPS, "out": out, "save-every": SAVE_EVERY, "max-restarts": 4} | changed
        arguments = [text for name, value in options.items() for text in (f"--{name}", str(value))]
        self.process = subprocess.Popen(
            [*command, *arguments, *words, "--device", "cpu"],
            stdout=self.errors,
            stderr=self.errors,
            env={**os.environ, **({"TMPDIR": str(temporary)} if temporary else {})},
        )
        atexit.register(self.process.kill)  # what is over does not mind

    @property
    def running(self) -> bool:
        return self.process.poll() is None

    def ranks(self) -> dict[int, int]:
        """Pids by rank, of those that are there."""
        found = {}
        for pid in _descendants(self.process.pid):
            try:
                words = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                command = Path(f"/proc/{pid}/cmdline").read_bytes()
            except OSError:
                continue
            rank = next((int(word[5:]) for word in words if word.startswith(b"RANK=")), None)
            if rank is not None and b"meshwright.launch.rank" in command:
                found.setdefault(rank, pid)
        return found

    def step(self) -> int:
        path = self.out / "records.jsonl"
        try:
            return path.read_text().count("\n")
        except OSError:
            return 0

    def saving(self) -> bool:
        return any((self.out / CHECKPOINTS).glob(".step-*.part"))

    def latest(self) -> tuple[str | None, bool]:
        """What `latest` names, and whether it is whole; retried if it moved on while it was looked at."""
        for _ in range(20):
            try:
                name = (self.out / CHECKPOINTS / LATEST).read_text().strip()
            except FileNotFoundError:
                return None, True
            folder = self.out / CHECKPOINTS / name
            try:
                sound = not find_damage(folder, read_manifest(folder))
            except Exception:  # gone, by retention, or truly hurt: `latest` tells which
                sound = False
            if sound or (self.out / CHECKPOINTS / LATEST).read_text().strip() == name:
                return name, sound
        return name, False

    def kill(self, moment: str, dice: random.Random) -> Kill | None:
        """Wait for the moment and kill a random rank; None if the run ended before it came."""
        wanted, delay = dice.randrange(1, STEPS - 4), dice.random()
        while self.running:
            ready = len(self.ranks()) == RANKS if moment == "start" else self.step() >= wanted
            if ready and moment == "start":
                time.sleep(4 * delay)
            if ready and (moment != "save" or self.saving()):
                if moment == "save":
                    time.sleep(0.03 * delay)
                ranks = self.ranks()
                if ranks:
                    rank = dice.choice(sorted(ranks))
                    step, saving = self.step(), self.saving()
                    try:
                        os.kill(ranks[rank], signal.SIGKILL)
                    except ProcessLookupError:
                        continue
                    return Kill(moment, rank, step, saving, *self.latest())
            time.sleep(0.002)
        return None


def _descendants(pid: int) -> list[int]:
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        children += [c for t in Path(f"/proc/{pid}/task").iterdir() for c in (t / "children").read_text().split()]
    except OSError:
        return []
    own = [int(child) for child in dict.fromkeys(children)]
    return own + [grandchild for child in own for grandchild in _descendants(child)]


def same_state(folder: Path, other: Path) -> bool:
    """Bit for bit, generators included."""
    ours, theirs = WholeTensors(find_checkpoint(folder)), WholeTensors(find_checkpoint(other))
    names = [set(one.manifest.tensors) for one in (ours, theirs)]
    run_state = [
        (m.run_state.step, m.run_state.samples, m.run_state.schedule) for m in (ours.manifest, theirs.manifest)
    ]
    if names[0] != names[1] or run_state[0] != run_state[1]:
        return False
    return all(torch.equal(ours.read(name), theirs.read(name)) for name in names[0])


def one_run(number: int, folder: Path, seed: int) -> Outcome:
    dice = random.Random(f"{seed}/{number}")
    strategy = STRATEGIES[number % len(STRATEGIES)]
    outcome = Outcome(strategy)
    begun = time.monotonic()
    victim = Victim(strategy, folder / f"run-{number}")
    try:
        for _ in range(2 if dice.random() < 0.3 else 1):
            kill = victim.kill(dice.choice(MOMENTS), dice)
            if kill is not None:
                outcome.kills.append(kill)
        outcome.ended = victim.process.wait(timeout=PATIENCE) == 0
    except subprocess.TimeoutExpired:
        victim.process.send_signal(signal.SIGINT)
        victim.process.wait()
    outcome.seconds = round(time.monotonic() - begun, 1)
    victim.errors.seek(0)
    said = victim.errors.read()
    outcome.restarts = said.count("; restart ")
    if outcome.ended:
        outcome.equal = same_state(victim.out, folder / f"whole-{STRATEGIES.index(strategy)}")
    if not (outcome.ended and outcome.equal):
        outcome.said = said[-3000:]
    return outcome


def whole_run(index: int, folder: Path) -> None:
    victim = Victim(STRATEGIES[index], folder / f"whole-{index}")
    if victim.process.wait(timeout=PATIENCE) != 0:
        victim.errors.seek(0)
        raise SystemExit(f"{STRATEGIES[index]} failed without being hurt:\n{victim.errors.read()[-3000:]}")


def sound(outcome: Outcome) -> bool:
    return outcome.ended and outcome.equal and all(kill.latest_sound for kill in outcome.kills)


def tell(number: int, outcome: Outcome) -> None:
    kills = ", ".join(f"rank {k.rank} at {k.moment} (step {k.step}{', saving' * k.saving})" for k in outcome.kills)
    word = "same" if sound(outcome) else "NOT THE SAME"
    print(f"[{number}] {outcome.strategy}: killed {kills or 'nobody'}: {word}, {outcome.seconds} s", file=sys.stderr)


def summarise(outcomes: list[Outcome]) -> dict[str, Any]:
    hurt = [outcome for outcome in outcomes if outcome.kills]
    return {
        "runs": len(hurt),
        "same": sum(sound(outcome) for outcome in hurt),
        "kills": sum(len(outcome.kills) for outcome in hurt),
        "kills_inside_a_save": sum(kill.saving for outcome in hurt for kill in outcome.kills),
        "kills_while_starting": sum(kill.moment == "start" for outcome in hurt for kill in outcome.kills),
        "latest_not_sound": sum(not kill.latest_sound for outcome in hurt for kill in outcome.kills),
        "runs_that_were_not_hurt": len(outcomes) - len(hurt),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--parallel", type=int, default=1, help="runs side by side")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json")
    options = parser.parse_args()
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory(prefix="faults-") as name, ThreadPoolExecutor(options.parallel) as pool:
        folder = Path(name)
        used = range(min(len(STRATEGIES), options.runs))
        list(pool.map(lambda index: whole_run(index, folder), used))
        for number, outcome in enumerate(pool.map(lambda n: one_run(n, folder, options.seed), range(options.runs))):
            outcomes.append(outcome)
            tell(number, outcome)
            if options.json:  # as it grows: a long run that is ended early leaves what it found
                machine = {"torch": torch.__version__, "python": platform.python_version(), "cores": os.cpu_count()}
                document = {**summarise(outcomes), "machine": machine, "outcomes": [asdict(o) for o in outcomes]}
                Path(options.json).write_text(json.dumps(document, indent=1) + "\n")
    found = summarise(outcomes)
    for key, value in found.items():
        print(f"{key.replace('_', ' '):26} {value}")
    sys.exit(0 if found["same"] == found["runs"] else 1)


if __name__ == "__main__":
    main()
