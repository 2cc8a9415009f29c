"""Spoil files of every kind that Meshwright reads, thousands of them, and count what is neither taken nor refused.

    python benchmarks/fuzz_readers.py --files 2000 --out docs/data/fuzz_readers.json

A file is sound if the reader takes it or raises an error of ours. Everything else counts: another exception (a
traceback for the user), a reader that takes over ten seconds, memory of over 500 MiB.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import resource
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "tests"))  # the kinds of files are the tests' own

from meshwright.errors import BadInput
from mutated_files import BOMBS, Kind, kinds, spoiled

LONGEST_S, MOST_MIB = 10, 500


class TooLong(BaseException):
    """A reader did not return in time."""


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--files", type=int, default=2000)
    arguments.add_argument("--seed", type=int, default=1)
    arguments.add_argument("--out", type=Path)
    asked = arguments.parse_args()
    signal.signal(signal.SIGPROF, _too_long)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "sound").mkdir()
        found = _run(kinds(Path(folder) / "sound"), Path(folder), asked.files, random.Random(asked.seed))
    document = {"files": asked.files, "seed": asked.seed, "python": platform.python_version(), **found}
    print(json.dumps(document, indent=1))
    if asked.out is not None:
        asked.out.write_text(json.dumps(document, indent=1) + "\n")
    return 1 if found["faults"] or found["memory_mib"] > MOST_MIB else 0


def _run(sound: dict[str, Kind], folder: Path, files: int, rng: random.Random) -> dict[str, Any]:
    base = _peak_mib()
    counts = {name: {"taken": 0, "refused": 0} for name in sound}
    faults, longest = [], 0.0
    for number in range(files):
        name = list(sound)[number % len(sound)]
        content = (
            BOMBS[number // len(sound)] if number // len(sound) < len(BOMBS) else spoiled(sound[name].content, rng)
        )
        begun = time.process_time()
        (folder / name).mkdir(exist_ok=True)
        outcome = _outcome(sound[name], folder / name, content)
        longest = max(longest, time.process_time() - begun)
        if outcome in counts[name]:
            counts[name][outcome] += 1
        else:
            faults.append({"kind": name, "number": number, "fault": outcome})
    memory = _peak_mib() - base
    return {"kinds": counts, "faults": faults, "longest_s": round(longest, 2), "memory_mib": round(memory, 1)}


def _outcome(kind: Kind, folder: Path, content: bytes) -> str:
    try:
        signal.setitimer(signal.ITIMER_PROF, LONGEST_S)  # of this process: others may be using the machine
        kind.read(folder, content)
        signal.setitimer(signal.ITIMER_PROF, 0)
    except BadInput:
        return "refused"
    except TooLong:
        return f"took longer than {LONGEST_S} s"
    except BaseException:
        return traceback.format_exc(limit=-3)
    return "taken"


def _too_long(number: int, frame: object) -> None:
    raise TooLong


def _peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    sys.exit(main())
