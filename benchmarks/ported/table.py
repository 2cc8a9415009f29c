"""The tables of docs/real_scripts.md and docs/own-loops.md from the measured rows.

python benchmarks/ported/table.py docs/data/real_scripts.json
python benchmarks/ported/table.py docs/data/own_loop_misuse.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def cell(found: dict[str, Any] | None) -> str:
    if found is None:
        return "-"
    return f"{found['apart']:.0e}" if "apart" in found else next(iter(found))


def scripts(rows: list[dict[str, Any]], kind: str) -> list[str]:
    strategies = list(dict.fromkeys(strategy for row in rows for strategy in row.get(kind, {})))
    lines = [f"| script | {' | '.join(strategies)} |", f"| --- |{' ---: |' * len(strategies)}"]
    for row in rows:
        if kind in row:
            lines.append(f"| {row['script']} | {' | '.join(cell(row[kind].get(one)) for one in strategies)} |")
    return lines


def changed(rows: list[dict[str, Any]]) -> list[str]:
    lines = ["| script | Accelerate | `mw.parallelize` |", "| --- | ---: | ---: |"]
    measured = [row for row in rows if "own_loop_lines" in row]
    return lines + [f"| {row['script']} | {row['accelerate_lines']} | {row['own_loop_lines']} |" for row in measured]


def misuse(rows: list[dict[str, Any]]) -> list[str]:
    strategies = list(dict.fromkeys(strategy for row in rows for strategy in row["under"]))
    lines = [f"| your loop | {' | '.join(f'`{one}`' for one in strategies)} |", f"| --- |{' --- |' * len(strategies)}"]
    for row in rows:
        verdicts = " | ".join(row["under"].get(one, {}).get("verdict", "-") for one in strategies)
        lines.append(f"| {row['program'].replace('_', ' ')} | {verdicts} |")
    return lines


def main() -> None:
    rows = json.loads(Path(sys.argv[1]).read_text())
    if "program" in rows[0]:
        print("\n".join(misuse(rows)))
        return
    print("\n".join([*changed(rows), "", *scripts(rows, "own_loop"), "", *scripts(rows, "job")]))


if __name__ == "__main__":
    main()
