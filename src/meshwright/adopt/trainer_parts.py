"""The parts of a training whose loop is in transformers' Trainer, from what the Trainer is given."""

from __future__ import annotations

import ast

from meshwright.adopt.flatten import Flat
from meshwright.adopt.kind import TRAINERS
from meshwright.adopt.parts import Parts
from meshwright.adopt.script import Script, keyword, last_name
from meshwright.adopt.slices import stored_names

SOURCES = ("transformers", "trl")
DEFAULTS = {"learning_rate": "5e-05", "weight_decay": "0.0", "per_device_train_batch_size": "8", "max_grad_norm": "1.0"}
"""What TrainingArguments takes where a script says nothing."""


def find_trainer_parts(script: Script, flat: Flat) -> Parts | None:
    """The parts, or None if the script does not give a Trainer a model and data by name."""
    for place, statement in enumerate(flat.statements):
        for call in (node for node in ast.walk(statement) if isinstance(node, ast.Call)):
            if last_name(call.func) in TRAINERS and script.dotted(call.func).split(".")[0] in SOURCES:
                return _parts(script, flat.statements[:place], call)
    return None


def _parts(script: Script, prelude: list[ast.stmt], call: ast.Call) -> Parts | None:
    model, data = keyword(call, "model"), keyword(call, "train_dataset")
    if not isinstance(model, ast.Name) or data is None or not any(model.id in stored_names(one) for one in prelude):
        return None
    options = _options(prelude, keyword(call, "args"))
    values = {name: options.get(name, _parsed(text)) for name, text in DEFAULTS.items()}
    parts = Parts(prelude=prelude, model=model.id, clip=values["max_grad_norm"])
    parts.accumulation = options.get("gradient_accumulation_steps")
    loader = _parsed("DataLoader()")
    optimizer = _parsed(f"torch.optim.AdamW({model.id}.parameters())")
    assert isinstance(loader, ast.Call) and isinstance(optimizer, ast.Call)
    collate = keyword(call, "data_collator")
    loader.args = [data]
    loader.keywords = [ast.keyword(arg="batch_size", value=values["per_device_train_batch_size"])]
    loader.keywords += [ast.keyword(arg="collate_fn", value=collate)] if collate is not None else []
    names = {"lr": "learning_rate", "weight_decay": "weight_decay"}
    optimizer.keywords = [ast.keyword(arg=name, value=values[source]) for name, source in names.items()]
    for made in (loader, optimizer):
        made.lineno = call.lineno
    parts.loader_call, parts.optimizers = loader, {"optimizer": optimizer}
    return parts


def _options(prelude: list[ast.stmt], given: ast.expr | None) -> dict[str, ast.expr]:
    """The options of TrainingArguments(...), in the call or before it."""
    if isinstance(given, ast.Name):
        made = [one for one in prelude if isinstance(one, ast.Assign) and ast.unparse(one.targets[0]) == given.id]
        given = made[-1].value if made else None
    return {one.arg: one.value for one in given.keywords if one.arg} if isinstance(given, ast.Call) else {}


def _parsed(text: str) -> ast.expr:
    return ast.parse(text, mode="eval").body
