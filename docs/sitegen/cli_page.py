"""The reference of the command line, from the help of its verbs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import typer

from meshwright.cli.main import app


def cli_page() -> str:
    command: Any = typer.main.get_command(app)
    parts = [
        "# Command line",
        "Every verb takes `--json` (one document on stdout) and `--debug`. Exit 0: done; 1: the check or a rank "
        "failed, or nothing fits; 2: bad input. This page is made from `meshwright VERB --help`.",
    ]
    return "\n\n".join([*parts, *_verbs(command, "meshwright")]) + "\n"


def _verbs(group: Any, path: str) -> Iterator[str]:
    for name, command in sorted(group.commands.items()):
        if hasattr(command, "commands"):
            yield from _verbs(command, f"{path} {name}")
        else:
            yield _verb(command, f"{path} {name}")


def _verb(command: Any, path: str) -> str:
    lead, examples = _help(command.help or "")
    shown = [param for param in command.params if not getattr(param, "hidden", False)]
    arguments = [param for param in shown if param.param_type_name == "argument"]
    options = [param for param in shown if param.param_type_name == "option"]
    usage = " ".join([path, *(param.name.upper() for param in arguments), "[OPTIONS]"])
    parts = [f"## {path.removeprefix('meshwright ')}", *lead, f"```sh\n{usage}\n```"]
    if examples:
        parts.append("Examples:\n\n```sh\n" + "\n".join(examples) + "\n```")
    if arguments:
        parts.append(_table("argument", [(param.name.upper(), param.help or "", "") for param in arguments]))
    parts.append(_table("option", [(_names(param), param.help or "", _default(param)) for param in options]))
    notes = (command.epilog or "").split("\n\n")[0]
    return "\n\n".join([*parts, *([_plain(notes)] if notes else [])])


def _help(text: str) -> tuple[list[str], list[str]]:
    """Paragraphs, and the examples among them."""
    paragraphs = [re.sub(r"\s*\n\s*", " ", part).strip() for part in text.split("\n\n")]
    examples = [_plain(part) for part in paragraphs if part.startswith("[bold]")]
    return [_plain(part) for part in paragraphs if part and not part.startswith("[bold]")], examples


def _plain(text: str) -> str:
    return re.sub(r"\[/?(?:bold)?\]", "", text).replace("\\[", "[").replace("\n", " ")


def _names(param: Any) -> str:
    return ", ".join([*param.opts, *param.secondary_opts])


def _default(param: Any) -> str:
    value = param.default
    if callable(value) or value in (None, False, "", ()) or "UNSET" in str(value):
        return "required" if param.required else ""
    return str(value)


def _table(kind: str, rows: list[tuple[str, str, str]]) -> str:
    lines = [f"| {kind} | what it does | default |", "| --- | --- | --- |"]
    lines += [f"| `{_cell(name)}` | {_cell(_plain(text))} | {_cell(default)} |" for name, text, default in rows]
    return "\n".join(lines)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
