"""The output of the `checkpoint` verbs, for the terminal, and the bar that shows their progress."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich import progress
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from meshwright.report.tables import make_list, make_table
from meshwright.report.terms import Prose
from meshwright.units import show_bytes, show_count


def show_page(document: dict[str, Any]) -> Group:
    parts: list[RenderableType] = [_overview(document), _files(document["files"])]
    if document["optimizer"] is not None:
        parts.insert(1, _groups(document["optimizer"]))
    if "tensors" in document:
        parts.append(_tensors(document["tensors"]))
    return Group(*parts)


def check_page(document: dict[str, Any]) -> Text:
    """The verdict on an intact checkpoint; problems are raised as errors."""
    fits = ", and fits the job" if document["fits"] else ""
    return Text(f"{document['path']} is intact: complete, no unknown files, every byte as written{fits}.")


def export_page(document: dict[str, Any]) -> Group:
    count = f"{document['tensors']} tensors, {show_bytes(document['bytes'])}"
    return Group(_files(document["files"], f"{document['out']}: {count}"), *_left_out(document), *_notes(document))


def import_page(document: dict[str, Any]) -> Group:
    off, on = document["prefix"]["off"], document["prefix"]["on"]
    lines = [
        f"{document['path']}: {document['tensors']} tensors, {show_count(document['parameters'])} parameters, "
        f"{show_bytes(document['bytes'])}"
    ]
    if document["optimizer"]:
        lines.append(f"with the optimizer state of step {document['step']:,}")
    if off or on:
        lines.append(f"names at the source {f'have the prefix {off}' if off else f'lack the prefix {on}'}")
    return Group(*(Text(line) for line in lines), *_left_out(document), *_notes(document))


def _overview(document: dict[str, Any]) -> Table:
    table = make_list(Text(document["path"]), justify="left")
    ranks = f"{document['ranks']} rank{'s' * (document['ranks'] > 1)}"
    made = document["made"]
    table.add_row("step", f"{document['step']:,} ({document['samples']:,} samples), seed {document['seed']}")
    table.add_row("written by", Prose(f"{document['strategy']} on {ranks}"))
    table.add_row("", " ".join(f"{name} {made[name]}" for name in ("meshwright", "torch", "python") if name in made))
    table.add_row("at", made.get("at", "?"))
    table.add_row("model", _model(document))
    for kind in ("optimizer", "rng"):
        table.add_row(kind, show_bytes(document["bytes"][kind]))
    if document["ema"] is not None:
        decay = f"decay {document['ema']['decay']:g}, {document['ema']['updates']:,} updates"
        table.add_row("averaged weights", f"{show_bytes(document['bytes']['ema'])}, {decay}")
    table.add_row("schedule", document["schedule"] or "none")
    for alias, first in document["tied"].items():
        table.add_row("tied", Text(f"{alias} = {first}"))
    if document["hugging_face"] is not None:
        table.add_row("transformers", Text(_hugging_face(document["hugging_face"])))
    return table


def _model(document: dict[str, Any]) -> str:
    trained = "" if document["trained"] is None else f", {show_count(document['trained'])} trained"
    return f"{show_bytes(document['bytes']['model'])}, {show_count(document['parameters'])} parameters{trained}"


def _hugging_face(found: dict[str, Any]) -> str:
    place = f" at {found['prefix']}" if found["prefix"] else ""
    return f"{found['architecture'] or found['model_type']}{place}"


def _groups(optimizer: dict[str, Any]) -> Table:
    table = make_table(optimizer["class"], (), ("group", "parameters", "lr"))
    for number, group in enumerate(optimizer["groups"]):
        rate = "-" if group["lr"] is None else f"{group['lr']:.3g}"
        table.add_row(str(number), str(group["parameters"]), rate)
    return table


def _files(files: list[dict[str, Any]], title: str = "files") -> Table:
    table = make_table(Text(title), ("file",), ("size",))
    for file in files:
        table.add_row(Text(file["name"]), show_bytes(file["bytes"]))
    return table


def _tensors(tensors: list[dict[str, Any]]) -> Table:
    table = Table(title="tensors", title_justify="left")
    for column in ("name", "dtype", "shape"):
        table.add_column(column, overflow="fold")
    table.add_column("chunks", justify="right")
    for tensor in tensors:
        shape = " x ".join(map(str, tensor["shape"])) or "scalar"
        table.add_row(Text(tensor["name"]), tensor["dtype"], shape, str(tensor["chunks"]))
    return table


def _left_out(document: dict[str, Any]) -> list[Text]:
    names = document["left_out"]
    return [Text(f"left out, not part of the model: {', '.join(names)}")] if names else []


def _notes(document: dict[str, Any]) -> list[Text]:
    return [Text(note) for note in document["notes"]]


@contextmanager
def bytes_bar(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar for work on `total` bytes, on stderr if it is a terminal; yields a function to call with finished bytes."""
    console = Console(stderr=True)
    columns = (
        *(progress.SpinnerColumn(), progress.TextColumn("{task.description}"), progress.BarColumn()),
        *(progress.DownloadColumn(binary_units=True), progress.TransferSpeedColumn(), progress.TimeElapsedColumn()),
    )
    with progress.Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(what, total=total)
        yield lambda size: bar.advance(task, size)
