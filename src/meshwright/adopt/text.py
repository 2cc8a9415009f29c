"""The fixed text of a job file: its header, and the few helpers that jobs of scripts need."""

from __future__ import annotations

import textwrap

SAMPLES_IN = '''def samples_in(batch):
    """Samples of a batch: the length of its first tensor."""
    while not isinstance(batch, torch.Tensor):
        batch = next(iter(batch.values())) if hasattr(batch, "values") else batch[0]
    return len(batch)'''
EVERY_EPOCH = '''class EveryEpoch:
    """Steps a schedule once per epoch; Meshwright steps it once per optimizer step."""

    def __init__(self, schedule, steps):
        self.schedule, self.steps, self.count = schedule, steps, 0

    def step(self):
        self.count += 1
        if self.count % self.steps == 0:
            self.schedule.step()

    def state_dict(self):
        return {"count": self.count, "schedule": self.schedule.state_dict()}

    def load_state_dict(self, state):
        self.count = state["count"]
        self.schedule.load_state_dict(state["schedule"])

    def get_last_lr(self):
        return self.schedule.get_last_lr()'''
HELPERS = {"samples_in(": SAMPLES_IN, "EveryEpoch(": EVERY_EPOCH}
"""Helpers by what calls of them look like."""
WIDTH = 110


def header(
    script: str, job: str, todo: list[str], notes: list[str], *, strategy: str, seed: int | None, epochs: int | None
) -> str:
    """The docstring: what is left to do, what to know, and the commands to go on with."""
    lines = [f"The job of {script}, written by `meshwright adopt`; lines are the script's."]
    if todo:
        lines += ["", "TODO, before it trains:"]
        lines += [row for number, one in enumerate(todo, 1) for row in _wrapped(f"{number}. ", one)]
    if notes:
        lines += ["", "To know:"]
        lines += [row for one in dict.fromkeys(notes) for row in _wrapped("- ", one)]
    seeds = f" --seed {seed}" if seed is not None else ""
    lines += [
        "",
        f"meshwright verify {job} --ranks 2",
        f"meshwright train {job} --strategy {strategy} --ranks 2 --steps 100{seeds}",
    ]
    if epochs is not None:
        lines[-1] += f"  # the script trains {epochs} epoch{'s' * (epochs != 1)}"
    return '"""' + "\n".join(lines).replace("\\", "\\\\").replace('"""', "'''") + '\n"""'


def _wrapped(mark: str, text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent=mark, subsequent_indent=" " * len(mark), break_long_words=False)


def steps_per_epoch(*, drops_last: bool) -> str:
    """The helper that counts an epoch's steps as the script does."""
    words = "as the script counts them" if drops_last else "the last one with what is left"
    formula = "max(1, len(job_data()) // GLOBAL_BATCH)" if drops_last else "-(-len(job_data()) // GLOBAL_BATCH)"
    return f'def steps_per_epoch():\n    """Steps of one epoch, {words}."""\n    return {formula}'


def join(top: str, imports: list[str], constant: str, body: list[str], code: list[str]) -> str:
    """The whole file."""
    head = [top, "\n".join(_merged({*imports, "import torch"})), "from meshwright import Job", constant]
    return "\n\n".join(head) + "\n\n\n" + "\n\n\n".join([*_spaced(body), *code]) + "\n"


def _merged(imports: set[str]) -> list[str]:
    """Imports in order, with all names of a module on one line."""
    sources: dict[str, list[str]] = {}
    for one in sorted(imports):
        source, _, names = one.partition(" import ")
        sources.setdefault(source if names else one, []).extend([names] if names else [])
    merged = [f"{source} import {', '.join(names)}" if names else source for source, names in sources.items()]
    return sorted(merged, key=lambda one: (one.startswith("from"), one))


def _spaced(body: list[str]) -> list[str]:
    """Settings on adjacent lines, definitions apart."""
    found: list[str] = []
    for one in body:
        is_definition = one.startswith(("def ", "class ", "@", "async "))
        if found and not is_definition and not found[-1].startswith(("def ", "class ", "@", "async ")):
            found[-1] += "\n" + one
        else:
            found.append(one)
    return found
