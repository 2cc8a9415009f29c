"""Write the job file: the script's model, inputs, loss, optimizer, schedule and data, with what is left on top."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass, field
from typing import Any

from meshwright.adopt.constants import UNKNOWN
from meshwright.adopt.draft import Draft
from meshwright.adopt.find_parts import find_parts
from meshwright.adopt.flatten import flatten
from meshwright.adopt.kind import Kind
from meshwright.adopt.left_out import note_left_out, note_random
from meshwright.adopt.model_code import share_common, write_data, write_model
from meshwright.adopt.optimizer_code import write_optimizer, write_schedule
from meshwright.adopt.script import Script, argument, last_name
from meshwright.adopt.step_code import write_step
from meshwright.adopt.strategy import strategy_of
from meshwright.adopt.text import HELPERS, header, join, steps_per_epoch
from meshwright.adopt.trainer_parts import find_trainer_parts

FALLBACK_BATCH = 32
FUNCTIONS = {"job_model", "job_data", "job_inputs", "job_loss", "job_optimizer", "job_schedule"}
DEFINED = {*FUNCTIONS, "Job", "GLOBAL_BATCH", "torch", "samples_in", "steps_per_epoch", "EveryEpoch"}
"""Names that every job file defines."""
DIVIDED = re.compile(r"(batch|accum)\w*\s*(//|/)?=.*(world_size|num_processes|ngpus|n_gpus)")
"""A batch that the script divides among its ranks."""


@dataclass(frozen=True, kw_only=True)
class WrittenJob:
    """A job file, and what a person must know about it."""

    text: str
    todo: list[str] = field(default_factory=list)
    """What must be filled in before it trains."""
    notes: list[str] = field(default_factory=list)
    """What is different, or was left out, and need not be changed."""
    strategy: str = "ddp"
    global_batch: int | None = None


def write_job(script: Script, kind: Kind, name: str) -> WrittenJob:
    flat = flatten(script, kind)
    of_trainer = find_trainer_parts(script, flat) if kind.trainer and not kind.backward else None
    draft = Draft(script, kind, flat, of_trainer or find_parts(script, flat))
    _note_shape(draft)
    batch = _global_batch(draft)
    step = write_step(draft)
    note_left_out(draft)
    note_random(draft, step.prepared)
    optimizer, schedule = write_optimizer(draft), write_schedule(draft)
    draft.share(step.needs)
    share_common(draft)
    data, collate = write_data(draft)
    code = [one for one in (write_model(draft), data, step.inputs, step.loss, optimizer, schedule) if one]
    fields = _fields(draft, collate, has_schedule=bool(schedule), has_data=bool(data))
    strategy, notes = strategy_of(script, kind)
    for note in notes:
        draft.note(note)
    pieces = draft.collector.collect([*code, fields], draft.shared, DEFINED)
    for option in sorted(pieces.options & set(flat.missing)):
        draft.leave(1, f"args.{option} has no default on the command line; give it a value.")
    for unknown in pieces.unknown:
        draft.leave(1, f"{unknown} is not defined where it can be taken from; give it a value.")
    for one in sorted(DEFINED & set(draft.collector.definitions)):
        draft.leave(
            draft.collector.definitions[one].lineno, f"{one} is a name of the job file, too; rename one of them."
        )
    for one in sorted(set(pieces.neighbours)):
        draft.note(f"{one} is imported from the script's folder: keep the job there.")
    todo = [f"line {line}: {text}" for line, text in sorted(draft.todo)]
    top = header(script.path.name, name, todo, draft.notes, strategy=strategy, seed=_seed(draft), epochs=_epochs(draft))
    helpers = [text for call, text in HELPERS.items() if any(call in one for one in code)]
    if any("steps_per_epoch(" in one for one in code):
        helpers.append(steps_per_epoch(drops_last=draft.drops_last))
    constant = f"GLOBAL_BATCH = {batch or FALLBACK_BATCH}"
    text = join(top, pieces.imports, constant, [text for _, text in pieces.body], [*helpers, *code, fields])
    return WrittenJob(text=text, todo=todo, notes=draft.notes, strategy=strategy, global_batch=batch)


def _note_shape(draft: Draft) -> None:
    """Leave to the user what no job can express."""
    parts = draft.parts
    if len(parts.optimizers) > 1:
        several = ", ".join(parts.optimizers)
        advice = "keep the loop, and use mw.parallelize for each model"
        draft.leave(draft.line, f"the script has several optimizers ({several}), and a job has one: {advice}.")
    elif len(parts.backward) > 1:
        draft.leave(draft.line, f"the script has {len(parts.backward)} backward passes; the job takes the first.")
    if parts.clips_values:
        draft.leave(draft.line, "gradients are clipped by value, which a job does not do; it clips by norm (max_norm).")
    if draft.kind.trainer and not parts.backward:
        advice = "check the optimizer and the batch, and give its schedule (linear unless it says otherwise)"
        draft.leave(draft.line, f"the loop is in {draft.kind.trainer}: {advice}.")
    for call in draft.script.calls_of("exec"):
        draft.note(f"line {call.lineno}: exec() may change settings; it is left out.")


def _global_batch(draft: Draft) -> int | None:
    """Samples of one step of one process, over accumulated batches."""
    call = draft.parts.loader_call
    size, line = _batch_size(draft), call.lineno if call is not None else 1
    if not isinstance(size, int) or size < 1:
        draft.leave(line, f"GLOBAL_BATCH: the batch size was not found; {FALLBACK_BATCH} is a guess.")
        return None
    size *= _accumulated(draft)
    if DIVIDED.search(draft.script.text):
        draft.note(f"line {line}: the script divides its batch among the ranks, so GLOBAL_BATCH is all of it.")
    elif draft.kind.by_hand or draft.kind.library:
        draft.note(f"line {line}: GLOBAL_BATCH is {size}, one rank's batch; multiply it by the ranks of the script.")
    return size


def _batch_size(draft: Draft) -> Any:
    call = draft.parts.loader_call
    if call is None:
        return draft.flat.known.get("batch_size", UNKNOWN)
    given = argument(call, 1, "batch_size")
    if given is not None:
        return draft.value(given)
    options = [draft.value(one.value) for one in call.keywords if one.arg is None]
    inside = [one["batch_size"] for one in options if isinstance(one, dict) and "batch_size" in one]
    return inside[0] if inside else UNKNOWN if options else 1


def _accumulated(draft: Draft) -> int:
    """Batches of one optimizer step."""
    count = draft.parts.accumulation
    if count is None:
        return 1
    value = draft.value(count)
    if isinstance(value, int) and value >= 1:
        return value
    draft.leave(draft.line, f"GLOBAL_BATCH: multiply it by the accumulated batches, {ast.unparse(count)}.")
    return 1


def _fields(draft: Draft, collate: str, *, has_schedule: bool, has_data: bool) -> str:
    """The `Job(...)` at the end of the file."""
    lines = ["model=job_model", "inputs=job_inputs", "loss=job_loss", "optimizer=job_optimizer"]
    lines += ["schedule=job_schedule"] if has_schedule else []
    clip = draft.parts.clip
    value = draft.value(clip)
    if clip is not None and isinstance(value, int | float) and value > 0:
        lines.append(f"max_norm={value}")
    elif clip is not None and value is UNKNOWN:
        draft.leave(clip.lineno, f"max_norm: give the value of {ast.unparse(clip)}.")
    lines += ["data=job_data"] if has_data else []
    lines += [f"collate={collate}"] if collate and collate != "None" else []
    return "job = Job(\n" + "".join(f"    {line},\n" for line in [*lines, "global_batch=GLOBAL_BATCH"]) + ")"


def _seed(draft: Draft) -> int | None:
    calls = draft.script.calls_of("manual_seed", "set_seed", "seed_everything")
    values = [draft.value(call.args[0]) for call in calls if call.args and last_name(call.func) != "Generator"]
    return next((value for value in values if isinstance(value, int)), None)


def _epochs(draft: Draft) -> int | None:
    """How often the outermost loop runs, if that is known."""
    for statement in draft.flat.statements:
        if not isinstance(statement, ast.For) or not any(node in draft.parts.backward for node in ast.walk(statement)):
            continue
        if isinstance(statement.iter, ast.Call) and last_name(statement.iter.func) == "range":
            values = [draft.value(one) for one in statement.iter.args]
            return len(range(*values)) if values and all(isinstance(one, int) for one in values) else None
    return None
