"""Write the functions that build a job's model and data."""

from __future__ import annotations

import ast

from meshwright.adopt.draft import Draft, function, raising
from meshwright.adopt.script import keyword, last_name
from meshwright.adopt.slices import read_names, stored_names, touched_names

LOOKS = ("eval", "test", "valid", "print", "count", "log", "summary", "info", "visual")
"""Parts of the names of functions that look at a model and leave it as it is."""
SAMPLERS = ("DistributedSampler", "RandomSampler", "None")
"""What a job does itself: spread and shuffle all samples."""


def share_common(draft: Draft) -> None:
    """Make settings of what both model and data need, and of what functions and classes of the script read."""
    model, data = set(_model_places(draft)), set(_data_places(draft))
    prelude = draft.parts.prelude
    draft.shared |= {one for one in model & data if draft.parts.model not in stored_names(prelude[one])}
    reads = {name for one in model | data for name in read_names(prelude[one])}
    reads |= read_names(draft.dataset) if draft.dataset is not None else set()
    for name in sorted(reads & set(draft.collector.definitions)):
        draft.share(read_names(draft.collector.definitions[name]) - {name})
    # A statement that makes the model and something that the data need runs in both places.
    both = [one for one in model & data if draft.parts.model in stored_names(prelude[one])]
    for one in both:
        draft.shared |= {one, *draft.collector.slicer.of(read_names(prelude[one]), given=draft.given)}


def write_model(draft: Draft) -> str:
    model = draft.parts.model
    if not model:
        draft.leave(1, "model: what the optimizer updates was not found; build the model.")
        return raising("job_model", "")
    places = _model_places(draft)
    prelude = draft.parts.prelude
    if not any(model in stored_names(prelude[one]) for one in places):
        draft.leave(1, f"model: where {model} is made was not found; build it.")
        return raising("job_model", "")
    own = [one for one in places if one not in draft.shared or model in stored_names(prelude[one])]
    return function("job_model", "", [prelude[one] for one in own], f"return {model}")


def _model_places(draft: Draft) -> list[int]:
    model = draft.parts.model
    others = draft.given - {model}
    return draft.collector.slicer.of({model} - {""}, given=others, keep=lambda one: _builds(draft, one))


def _builds(draft: Draft, statement: ast.stmt) -> bool:
    """Whether a statement makes the model what it is, and does not resume, evaluate or describe it."""
    model = draft.parts.model
    if isinstance(statement, ast.If) and "load_state_dict" in ast.unparse(statement):
        draft.note(f"line {statement.lineno}: resuming is left out; `checkpoint import` and train --resume do that.")
        return False
    if not isinstance(statement, ast.Expr) or not isinstance(statement.value, ast.Call):
        return True
    call = statement.value
    owner = ast.unparse(call.func.value) if isinstance(call.func, ast.Attribute) else ""
    if model not in touched_names(statement) or owner.split(".")[0] == model:
        return True
    is_look = any(word in last_name(call.func).lower() for word in LOOKS)
    return not is_look and not draft.given & (read_names(call) - {model})


def write_data(draft: Draft) -> tuple[str, str]:
    """The function that builds the data, and the collate function as an expression; empty if there is none."""
    dataset, call = draft.dataset, draft.parts.loader_call
    if dataset is None or call is None:
        wanted = "give a map-style dataset whose samples are what job_inputs and job_loss take"
        draft.leave(draft.line, f"data: the script does not iterate over a DataLoader; {wanted}.")
        return "", ""
    if keyword(call, "batch_sampler") is not None:
        draft.leave(call.lineno, "data: a batch_sampler chooses the script's batches; a job shuffles all samples.")
    sampler = keyword(call, "sampler")
    if sampler is not None and not _is_usual(draft, sampler):
        draft.leave(call.lineno, f"data: the sampler {ast.unparse(sampler)} is left out; a job shuffles all samples.")
    if draft.drops_last:
        draft.note(
            f"line {call.lineno}: drop_last=True is left out; an epoch ends with a smaller batch, weighted right."
        )
    collate = keyword(call, "collate_fn")
    if collate is not None:
        draft.share(read_names(collate))
    own = [draft.parts.prelude[one] for one in _data_places(draft) if one not in draft.shared]
    text = function("job_data", "", own, f"return {ast.unparse(dataset)}")
    return text, "" if collate is None else ast.unparse(collate)


def _data_places(draft: Draft) -> list[int]:
    reads = read_names(draft.dataset) if draft.dataset is not None else set()
    return draft.collector.slicer.of(reads, given=draft.given - {draft.parts.model})


def _is_usual(draft: Draft, sampler: ast.expr) -> bool:
    name = ast.unparse(sampler)
    statements = [node for one in draft.parts.prelude for node in ast.walk(one)]
    sources = [one.value for one in statements if isinstance(one, ast.Assign) and ast.unparse(one.targets[0]) == name]
    return any(word in ast.unparse(one) for one in [sampler, *sources] for word in SAMPLERS)
