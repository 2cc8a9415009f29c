"""Write the job file: the script's model, inputs, loss, optimizer, schedule and data, with what is left to do on top."""

from __future__ import annotations

import ast
import copy
import re
from dataclasses import dataclass, field
from typing import Any

from meshwright.adopt.constants import UNKNOWN, evaluate
from meshwright.adopt.flatten import Flat, flatten
from meshwright.adopt.kind import Kind
from meshwright.adopt.parts import Parts, find_parts
from meshwright.adopt.pieces import Collector
from meshwright.adopt.script import Script, argument, is_true, keyword, last_name
from meshwright.adopt.slices import read_names, stored_names, touched_names
from meshwright.adopt.step_code import write_step
from meshwright.adopt.strategy import strategy_of
from meshwright.adopt.text import EVERY_EPOCH, SAMPLES_IN, STEPS_PER_EPOCH, header, join

FALLBACK_BATCH = 32
LOOKS = ("eval", "test", "valid", "print", "count", "log", "summary", "info", "visual")


@dataclass
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
    return _Writer(script, kind).write(name)


class _Parameters(ast.NodeTransformer):
    """`model.parameters()` as what the job's optimizer gets."""

    def __init__(self, model: str) -> None:
        self._model = model

    def visit_Call(self, node: ast.Call) -> Any:
        self.generic_visit(node)
        if (
            isinstance(node.func, ast.Attribute)
            and node.func.attr in ("parameters", "named_parameters")
            and not node.args
        ):
            named = node.func.attr == "named_parameters"
            if ast.unparse(node.func.value) == self._model:
                return ast.parse("params.named()" if named else "params", mode="eval").body
            text = ast.unparse(node.func.value)
            if text.startswith(f"{self._model}."):
                prefix = text.removeprefix(f"{self._model}.") + "."
                item = f"(n.removeprefix({prefix!r}), p)" if named else "p"
                return ast.parse(f"[{item} for n, p in params.named() if n.startswith({prefix!r})]", mode="eval").body
        return node


class _Lengths(ast.NodeTransformer):
    """`len(loader)` as the steps of an epoch."""

    def __init__(self, loader: str) -> None:
        self._loader, self.found = loader, False

    def visit_Call(self, node: ast.Call) -> Any:
        self.generic_visit(node)
        if last_name(node.func) == "len" and node.args and ast.unparse(node.args[0]) == self._loader and self._loader:
            self.found = True
            return ast.parse("steps_per_epoch()", mode="eval").body
        return node


class _Writer:
    def __init__(self, script: Script, kind: Kind) -> None:
        self.script, self.kind = script, kind
        self.flat: Flat = flatten(script, kind)
        self.parts: Parts = find_parts(script, self.flat)
        self.todo: list[tuple[int, str]] = []
        self.notes: list[str] = []
        given = {self.parts.model, self.parts.loader, self.parts.schedule, *self.parts.optimizers} - {""}
        self.collector = Collector(script, self.flat, self.parts, given)
        self.shared: set[int] = set()
        """Places of statements that become settings of the job file."""
        self.code: list[str] = []

    def write(self, name: str) -> WrittenJob:
        self._refuse_shapes()
        batch = self._batch()
        step = write_step(self.script, self.parts, self._todo, self.notes.append) if self.parts.model else None
        for carried in sorted(step.carried) if step else []:
            self._todo(
                self.parts.backward[0].lineno,
                f"{carried} is carried from one batch to the next; a job's batches are independent.",
            )
        optimizer, schedule = self._optimizer(), self._schedule()
        self.shared |= self.collector.settings({one for one in (step.needs if step else set())})
        data, collate = self._data()
        model = self._model()
        functions = [
            model,
            data,
            step.inputs if step else _raising("inputs", "batch"),
            step.loss if step else _raising("loss", "output, batch"),
        ]
        functions += [optimizer, schedule]
        fields = self._fields(collate, schedule, data)
        strategy, more = strategy_of(self.script, self.kind)
        self.notes += more
        code = [one for one in [*self.code, *functions] if one]
        helpers = [
            text
            for name_, text in (
                ("samples_in(", SAMPLES_IN),
                ("steps_per_epoch(", STEPS_PER_EPOCH[self._drops()]),
                ("EveryEpoch(", EVERY_EPOCH),
            )
            if any(name_ in one for one in code)
        ]
        defined = {
            "build",
            "data",
            "inputs",
            "loss",
            "optimizer",
            "schedule",
            "Job",
            "GLOBAL_BATCH",
            "torch",
            "samples_in",
            "steps_per_epoch",
            "EveryEpoch",
            self.parts.model,
        }
        pieces = self.collector.collect([*code, fields], self.shared, defined)
        for option in sorted(pieces.options & set(self.flat.missing)):
            self._todo(1, f"args.{option} has no default on the command line; give it a value.")
        for unknown in pieces.unknown:
            self._todo(1, f"{unknown} is not defined where it can be taken from; give it a value.")
        for one in sorted(set(pieces.neighbours)):
            self.notes.append(f"{one} is imported from the script's folder: keep the job there.")
        todo = [f"line {line}: {text}" for line, text in sorted(set(self.todo))]
        body = [text for _, text in pieces.body]
        top = header(
            self.script.path.name, name, todo, self.notes, strategy=strategy, seed=self._seed(), epochs=self._epochs()
        )
        text = join(top, pieces.imports, [f"GLOBAL_BATCH = {batch or FALLBACK_BATCH}"], body, helpers, code, fields)
        return WrittenJob(text=text, todo=todo, notes=self.notes, strategy=strategy, global_batch=batch)

    def _todo(self, line: int, text: str) -> None:
        self.todo.append((line, text))

    def _value(self, node: ast.AST | None) -> Any:
        return UNKNOWN if node is None else evaluate(node, self.flat.known, self.script.dotted)

    def _refuse_shapes(self) -> None:
        parts = self.parts
        line = parts.backward[0].lineno if parts.backward else 1
        if len(parts.optimizers) > 1:
            several = ", ".join(parts.optimizers)
            self._todo(
                line,
                f"the script has several optimizers ({several}), and a job has one: keep the loop and use mw.parallelize for each model.",
            )
        elif len(parts.backward) > 1:
            self._todo(line, f"the script has {len(parts.backward)} backward passes; the job takes the first.")
        if parts.clips_values:
            self._todo(line, "gradients are clipped by value, which a job does not do; it clips by norm (max_norm).")
        for call in self.script.calls_of("exec"):
            self.notes.append(f"line {call.lineno}: exec() may change settings; it is left out.")

    def _batch(self) -> int | None:
        """Samples of one step of one process, times accumulated batches."""
        call = self.parts.loader_call
        size: Any = UNKNOWN
        if call is not None:
            given = argument(call, 1, "batch_size")
            spread = [self._value(one.value) for one in call.keywords if one.arg is None]
            inside = [one["batch_size"] for one in spread if isinstance(one, dict) and "batch_size" in one]
            size = self._value(given) if given is not None else inside[0] if inside else 1 if not spread else UNKNOWN
        elif isinstance(self.flat.known.get("batch_size"), int):
            size = self.flat.known["batch_size"]
        line = call.lineno if call is not None else 1
        if not isinstance(size, int):
            self._todo(line, f"GLOBAL_BATCH: the batch size was not found; {FALLBACK_BATCH} is a guess.")
            return None
        times = self._accumulation()
        if re.search(r"(batch|accum)\w*\s*(//|/)?=.*(world_size|num_processes|ngpus|n_gpus)", self.script.text):
            self.notes.append(
                f"line {line}: the script divides its batch among the ranks, so GLOBAL_BATCH is all of it."
            )
        elif self.kind.by_hand or self.kind.library:
            self.notes.append(
                f"line {line}: the script's batch of {size} is one rank's; GLOBAL_BATCH is {size * times}, that of one rank. Multiply it by the ranks that the script ran on."
            )
        return size * times

    def _accumulation(self) -> int:
        if self.parts.accumulation is None:
            return 1
        value = self._value(self.parts.accumulation)
        if isinstance(value, int) and value >= 1:
            return value
        self._todo(
            self.parts.backward[0].lineno,
            f"GLOBAL_BATCH: multiply it by the accumulated batches, {ast.unparse(self.parts.accumulation)}.",
        )
        return 1

    def _model(self) -> str:
        model = self.parts.model
        if not model:
            self._todo(1, "build: the model that the optimizer updates was not found.")
            return _raising("build", "")
        others = self.collector.given - {model}
        places = self.collector.slicer.of({model}, given=others, keep=lambda one: self._builds(one, model))
        if not any(model in stored_names(self.parts.prelude[one]) for one in places):
            self._todo(1, f"build: where {model} is made was not found.")
            return _raising("build", "")
        data = set(self._data_places)
        self.shared |= {one for one in places if one in data and model not in stored_names(self.parts.prelude[one])}
        self.shared |= self.collector.settings(
            {name for one in places for name in self._function_reads(one)} - stored_in(self.parts.prelude, places)
        )
        own = [self.parts.prelude[one] for one in places if one not in self.shared]
        return _function("build", "", own, f"return {model}")

    def _function_reads(self, place: int) -> set[str]:
        return {name for name in read_names(self.parts.prelude[place]) if name in self.collector.definitions}

    def _builds(self, statement: ast.stmt, model: str) -> bool:
        """Whether a statement makes the model what it is, and does not resume, evaluate or describe it."""
        if isinstance(statement, ast.If) and any("load_state_dict" in ast.unparse(one) for one in (statement,)):
            self.notes.append(
                f"line {statement.lineno}: resuming is left out; `checkpoint import` and train --resume do that."
            )
            return False
        if (
            isinstance(statement, ast.Expr)
            and isinstance(statement.value, ast.Call)
            and model in touched_names(statement)
        ):
            call = statement.value
            owner = ast.unparse(call.func.value) if isinstance(call.func, ast.Attribute) else ""
            is_own = owner.split(".")[0] == model
            if not is_own and (
                any(word in last_name(call.func).lower() for word in LOOKS)
                or self.collector.given & (read_names(call) - {model})
            ):
                return False
        return True

    @property
    def _data_places(self) -> list[int]:
        dataset = self._dataset()
        return [] if dataset is None else self.collector.slicer.of(read_names(dataset), given=self.collector.given)

    def _dataset(self) -> ast.expr | None:
        call = self.parts.loader_call
        return None if call is None else argument(call, 0, "dataset")

    def _data(self) -> tuple[str, str]:
        dataset, call = self._dataset(), self.parts.loader_call
        if dataset is None or call is None:
            where = self.parts.backward[0].lineno if self.parts.backward else 1
            self._todo(
                where,
                "data: the script does not iterate over a DataLoader; give a map-style dataset whose samples are what `inputs` and `loss` take.",
            )
            return "", ""
        if keyword(call, "batch_sampler") is not None:
            self._todo(
                call.lineno,
                "data: the script's batch_sampler chooses the batches; a job's batches are GLOBAL_BATCH shuffled samples.",
            )
        sampler = keyword(call, "sampler")
        if (
            sampler is not None
            and not _is_distributed(self.parts.prelude, sampler)
            and not (isinstance(sampler, ast.Constant) and sampler.value is None)
        ):
            self._todo(
                call.lineno, f"data: the sampler {ast.unparse(sampler)} is left out; a job shuffles all samples."
            )
        if self._drops():
            self.notes.append(
                f"line {call.lineno}: drop_last=True is left out; an epoch ends with a smaller batch, which is weighted right."
            )
        collate, text = keyword(call, "collate_fn"), ""
        if collate is not None:
            self.shared |= self.collector.settings(read_names(collate))
            text = ast.unparse(collate)
        own = [
            self.parts.prelude[one]
            for one in self._data_places
            if one not in self.shared and not self._is_of_model(one)
        ]
        self.shared |= self.collector.settings(
            {name for one in own for name in read_names(one) if name in self.collector.definitions}
        ) - set(self._data_places)
        return _function("data", "", own, f"return {ast.unparse(dataset)}"), text

    def _is_of_model(self, place: int) -> bool:
        """Whether the model needs a statement as well, which then becomes a setting."""
        others = self.collector.given - {self.parts.model}
        if self.parts.model and place in self.collector.slicer.of({self.parts.model}, given=others):
            self.shared |= {place} | set(
                self.collector.slicer.of(stored_names(self.parts.prelude[place]), given=self.collector.given)
            )
            return True
        return False

    def _drops(self) -> bool:
        return self.parts.loader_call is not None and is_true(keyword(self.parts.loader_call, "drop_last"))

    def _optimizer(self) -> str:
        model = self.parts.model
        if not self.parts.optimizers:
            made = self.parts.made_by_model
            text = f"{ast.unparse(made)} is a method of the model" if made is not None else "it was not found"
            self._todo(
                made.lineno if made is not None else 1,
                f"optimizer: {text}; build the optimizer from `params`, and from params.named() for groups.",
            )
            return _raising("optimizer", "params")
        name, call = list(self.parts.optimizers.items())[-1]
        places = self.collector.slicer.of(read_names(call) - {model}, given=self.collector.given)
        prelude = self.parts.prelude
        own = [one for one in places if _depends(prelude, one, places, model)]
        self.shared |= set(places) - set(own)
        self.shared |= self.collector.settings(
            {other for one in own for other in read_names(prelude[one])} - stored_in(prelude, own)
        )
        rewritten = [_Parameters(model).visit(copy.deepcopy(prelude[one])) for one in own]
        made = _Parameters(model).visit(copy.deepcopy(call))
        if last_name(made.func) == "ZeroRedundancyOptimizer":
            made = _plain_optimizer(made)
        made.keywords = [one for one in made.keywords if one.arg != "fused" or not is_true(one.value)]
        text = _function("optimizer", "params", rewritten, f"return {ast.unparse(made)}")
        if model in {name for one in ast.parse(text).body for name in read_names(one)}:
            self._todo(call.lineno, f"optimizer: it reads {model} itself; take what it needs from `params`.")
        return text

    def _schedule(self) -> str:
        call = self.parts.schedule_call
        if call is None or not self.parts.optimizers:
            return self._manual_schedule()
        if last_name(call.func) == "ReduceLROnPlateau":
            self._todo(
                call.lineno,
                "schedule: ReduceLROnPlateau follows a validation loss; a job steps it with the training loss.",
            )
        optimizer = next(iter(self.parts.optimizers))
        lengths = _Lengths(self.parts.loader)
        names = read_names(call) - {optimizer}
        places = self.collector.slicer.of(names, given=self.collector.given)
        own = [one for one in places if self.parts.loader and self.parts.loader in read_names(self.parts.prelude[one])]
        own += [one for one in places if one not in own and read_names(self.parts.prelude[one]) & {optimizer}]
        self.shared |= set(places) - set(own)
        self.shared |= self.collector.settings({name for name in names if name in self.collector.definitions})
        body = [lengths.visit(copy.deepcopy(self.parts.prelude[one])) for one in sorted(own)]
        made = ast.unparse(lengths.visit(copy.deepcopy(call)))
        if self.parts.by_epoch:
            made = f"EveryEpoch({made}, steps_per_epoch())"
        return _function("schedule", optimizer, body, f"return {made}")

    def _manual_schedule(self) -> str:
        """`group["lr"] = lr` in the loop: a function of the step, if one is called."""
        everything = [node for one in self.flat.statements for node in ast.walk(one)]
        sets = [
            one
            for one in everything
            if isinstance(one, ast.Assign)
            and isinstance(one.targets[0], ast.Subscript)
            and ast.unparse(one.targets[0].slice) in ("'lr'",)
        ]
        if not sets:
            return ""
        value = ast.unparse(sets[0].value)
        sources = [
            one.value for one in everything if isinstance(one, ast.Assign) and ast.unparse(one.targets[0]) == value
        ]
        calls = [
            node
            for one in [sets[0].value, *sources]
            for node in ast.walk(one)
            if isinstance(node, ast.Call) and last_name(node.func) in self.script.functions
        ]
        if not calls or len(calls[0].args) != 1 or calls[0].keywords:
            self._todo(
                sets[0].lineno,
                "schedule: the loop sets the learning rate itself; give a schedule that is stepped once per step.",
            )
            return ""
        function = ast.unparse(calls[0].func)
        self.shared |= self.collector.settings({function})
        self.notes.append(f"line {sets[0].lineno}: the learning rate is {function}(step), with steps counted from 0.")
        body = 'base = optimizer.param_groups[0]["lr"]'
        return f"def schedule(optimizer):\n    {body}\n    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: {function}(step) / base)"

    def _fields(self, collate: str, schedule: str, data: str) -> str:
        lines = ["model=build", "inputs=inputs", "loss=loss", "optimizer=optimizer"]
        lines += ["schedule=schedule"] if schedule else []
        if self.parts.clip is not None:
            value = self._value(self.parts.clip)
            if isinstance(value, int | float) and value > 0:
                lines.append(f"max_norm={value}")
            elif value is UNKNOWN:
                self._todo(self.parts.clip.lineno, f"max_norm: give the value of {ast.unparse(self.parts.clip)}.")
        lines += ["data=data"] if data else []
        lines += [f"collate={collate}"] if collate and collate != "None" else []
        return "job = Job(\n" + "".join(f"    {line},\n" for line in [*lines, "global_batch=GLOBAL_BATCH"]) + ")"

    def _seed(self) -> int | None:
        for call in self.script.calls_of("manual_seed", "set_seed", "seed_everything"):
            value = self._value(call.args[0]) if call.args else UNKNOWN
            if isinstance(value, int):
                return value
        return None

    def _epochs(self) -> int | None:
        for statement in self.flat.statements:
            if (
                isinstance(statement, ast.For)
                and self.parts.backward
                and any(node is self.parts.backward[0] for node in ast.walk(statement))
            ):
                if isinstance(statement.iter, ast.Call) and last_name(statement.iter.func) == "range":
                    values = [self._value(one) for one in statement.iter.args]
                    if values and all(isinstance(one, int) for one in values):
                        return len(range(*values[:3]))
        return None


def stored_in(prelude: list[ast.stmt], places: list[int]) -> set[str]:
    return {name for one in places for name in stored_names(prelude[one])}


def _depends(prelude: list[ast.stmt], place: int, places: list[int], model: str) -> bool:
    """Whether a statement reads the model, itself or through earlier ones."""
    tainted = {model}
    for one in places:
        if read_names(prelude[one]) & tainted:
            tainted |= stored_names(prelude[one])
            if one == place:
                return True
    return False


def _plain_optimizer(call: ast.Call) -> ast.Call:
    """The optimizer inside ZeroRedundancyOptimizer(params, optimizer_class=..., ...)."""
    made = argument(call, 1, "optimizer_class")
    assert made is not None
    rest = [
        one
        for one in call.keywords
        if one.arg not in ("optimizer_class", "process_group", "parameters_as_bucket_view", "overlap_with_ddp")
    ]
    return ast.Call(func=made, args=call.args[:1], keywords=rest)


def _is_distributed(prelude: list[ast.stmt], sampler: ast.expr) -> bool:
    sources = [
        one.value
        for one in prelude
        if isinstance(one, ast.Assign) and ast.unparse(one.targets[0]) == ast.unparse(sampler)
    ]
    return any(
        word in ast.unparse(one)
        for one in [sampler, *sources]
        for word in ("DistributedSampler", "RandomSampler", "None")
    )


def _function(name: str, parameters: str, body: list[ast.stmt], ending: str) -> str:
    lines = [line for one in body for line in ast.unparse(ast.fix_missing_locations(one)).splitlines()]
    return "\n".join([f"def {name}({parameters}):", *(f"    {line}" for line in lines), f"    {ending}"])


def _raising(name: str, parameters: str) -> str:
    return f'def {name}({parameters}):\n    raise NotImplementedError("TODO: see the list at the top of this file")'
