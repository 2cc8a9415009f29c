"""A ranking for the terminal: the recommendation and its reason first, then the table, and what was refused."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from meshwright.facts.finding import Finding
from meshwright.report.strategy_table import ANY_WIDTH, strategy_table
from meshwright.report.tables import make_list
from meshwright.report.terms import Prose, Terms
from meshwright.units import GIB, show_bytes

REASONS = 6
"""How many kinds of refusals to list."""
TOLD = 3
"""How many alternatives are told in sentences; the table has the others' figures."""
SMALLEST = 0.1
"""GiB below which memory is shown in smaller units."""
SMALL = 78
"""Below this width the table leaves out what the recommendation's lines and --json have: peak and mfu."""


def plan_page(document: dict[str, Any]) -> RenderableType:
    plans = document["plans"]
    parts: list[RenderableType] = []
    if plans:
        parts += [_recommended(document), "", PlanTable(document), _others(plans[1:]), "", _memory(plans[0])]
    if document.get("against"):
        parts.append(_against(document["against"]))
    parts += [Prose(sentence) for sentence in document["advice"]]
    parts += [Prose(Finding.from_json(found).sentence()) for found in document.get("findings", ())]
    parts.append(_refused(document))
    return Group(*parts)


def _recommended(document: dict[str, Any]) -> RenderableType:
    """The first plan: what it is, how fast and how large it is, and why it won."""
    plan = document["plans"][0]
    tokens = plan["tokens_per_s_per_device"]
    speed = f"{tokens:,.0f} tokens/s per device" if tokens else f"{plan['samples_per_s']:,.1f} samples/s"
    figures = f"{step_time(plan['step_ms'])} per step, {speed}, {plan['reserved_gib']:.1f} GiB per device."
    return Group(
        Text(f"{document['job']} on {document['cluster']}", style="italic"),
        Prose(plan["strategy"], "bold green", lead="Recommended: "),
        Prose(f"{figures} {' '.join(plan['why'])}"),
    )


class PlanTable:
    """The ranking; time by cause has a column in a wide window, and a line below the strategy in a narrow one."""

    def __init__(self, document: dict[str, Any]) -> None:
        self._document = document

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        wide = _table(self._document, wide=True)
        fits = Measurement.get(console, options.update(max_width=ANY_WIDTH), wide).maximum <= options.max_width
        yield wide if fits else _table(self._document, wide=False, small=options.max_width < SMALL)
        yield Prose(_caption(self._document["plans"]), "dim")


def _table(document: dict[str, Any], *, wide: bool, small: bool = False) -> Table:
    by_tokens = all(plan["tokens_per_s_per_device"] for plan in document["plans"])
    speed = "tokens/s\n/device" if by_tokens else "samples/s"
    numbers = ("step", speed, "reserved\nGiB", *(() if small else ("peak\nGiB", "mfu")))
    table = strategy_table("", ("strategy",), numbers)
    if wide:
        table.add_column("time by cause")
    theirs = place_of(document)
    for place, plan in in_order(document):
        if place > len(document["plans"]):
            table.add_section()
        shares = _shares(plan["time"])
        yours = f"<- yours, number {place}" if place == theirs else ""
        table.add_row(
            Terms(plan["strategy"], "; ".join(filter(None, [yours, "" if wide else shares]))),
            step_time(plan["step_ms"]),
            f"{plan['tokens_per_s_per_device'] if by_tokens else plan['samples_per_s']:,.0f}",
            f"{plan['reserved_gib']:.1f}{'*' if plan['grade'] == 'trace' else ''}",
            *([] if small else [f"{plan['peak_gib']:.1f}", f"{plan['mfu']:.0%}"]),
            *([shares] if wide else []),
            style="green" if place == 1 else "",
        )
    return table


def _caption(plans: list[dict[str, Any]]) -> str:
    traced = any(plan["grade"] == "trace" for plan in plans)
    bars = plans[0]["error_bar"]
    notes = [f"memory within {bars['memory']:.0%}, time within {bars['time']:.0%}, in 3 of 4 cases"] if bars else []
    untested = plans[0].get("untested", ())
    known = [*(["* traced on fake tensors"] if traced else []), *notes, *kernel_words(plans[0])]
    return " ".join(["; ".join(known), *untested])


def kernel_words(plan: dict[str, Any]) -> list[str]:
    """Where the first plan's kernel times come from, if measured ones were given."""
    shares = plan.get("kernels")
    if not shares:
        return []
    words = {"exact": "measured", "interpolated": "interpolated", "catalogue": "by the catalogue"}
    listed = ", ".join(f"{shares[source]:.0%} {word}" for source, word in words.items() if shares[source] >= 0.005)
    return [f"{plan['time_grade']}: {listed}"]


def step_time(value: float) -> str:
    return f"{value / 1e3:.2f} s" if value >= 1e3 else f"{value:.0f} ms" if value >= 10 else f"{value:.1f} ms"


def _shares(time: dict[str, float]) -> str:
    total = sum(time.values()) or 1.0
    parts = sorted(time.items(), key=lambda part: -part[1])
    return ", ".join(f"{cause} {value / total:.0%}" for cause, value in parts if value / total >= 0.03)


def _others(plans: list[dict[str, Any]]) -> RenderableType:
    """What the next plans would save or cost; the rest is folded into one line."""
    told = [Prose(" ".join(plan["why"]), lead=f"{plan['strategy']}  ") for plan in plans[:TOLD]]
    left = len(plans) - len(told)
    more = (
        [Text(f"... and {left} more in the table; --json and --html have their reasons.", style="dim")] if left else []
    )
    return Group(*told, *more)


def _against(against: dict[str, Any]) -> Prose:
    """The user's own config: its rank, and what the first plan gains over it."""
    return Prose(" ".join([verdict(against), *against["notes"]]), lead=f"{against['file']} ({against['origin']})  ")


def _memory(plan: dict[str, Any]) -> RenderableType:
    table = make_list("")
    for cause, size in plan["memory"].items():
        if size > 0:
            table.add_row(cause, f"{size:.2f} GiB" if size >= SMALLEST else show_bytes(size * GIB))
    if plan["stages"]:
        peaks = ", ".join(f"{stage['peak_gib']:.1f}" for stage in plan["stages"])
        table.add_row("pipeline ranks", f"{peaks} GiB")
    if plan["host_gib"]:
        table.add_row("host memory per node", f"{plan['host_gib']:.1f} GiB")
    return Group(Prose(f"memory of {plan['strategy']}", "italic"), table)


def _refused(document: dict[str, Any]) -> Prose:
    """The number of candidates, and the most common reasons for refusing them."""
    counts = Counter(map(_kind, document["refused"]))
    head = f"{document['candidates']:,} candidates in {document['seconds']:.1f} s"
    if not counts:
        return Prose(head)
    lines = [f"  {count:,}  {reason}" for reason, count in counts.most_common(REASONS)]
    kinds = len(counts) - len(lines)
    folded = [f"  ... and {kinds} more reasons; --json has all"] if kinds else []
    return Prose("\n".join([f"{head}; {len(document['refused']):,} refused or too large:", *lines, *folded]))


def _kind(refusal: dict[str, Any]) -> str:
    """The reason in words that other strategies share."""
    reason: str = refusal["reason"].replace(refusal["strategy"], "the strategy")
    if reason.startswith("needs "):
        return "do not fit"
    return "do not fit with a smaller micro-batch either" if reason.startswith("does not fit with") else reason


def place_of(document: dict[str, Any]) -> int | None:
    """The config's rank among the plans, from 1; None if there is no config or it cannot run."""
    against = document.get("against")
    return against["rank"] if against else None


def in_order(document: dict[str, Any]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Every plan with its rank, including the user's: between two others, instead of its equal, or after the last."""
    plans, place = document["plans"], place_of(document)
    if place is None:
        yield from enumerate(plans, 1)
        return
    theirs = document["against"]["plan"]
    others = [plan for plan in plans if plan["strategy"] != theirs["strategy"]]
    before = min(place - 1, len(others))
    yield from enumerate(others[:before], 1)
    yield place, theirs
    yield from enumerate(others[before:], before + 2)


def verdict(against: dict[str, Any]) -> str:
    """The config's rank or the reason it has none, and what the first plan gains over it."""
    if against["rank"] is None:
        reason = against["reason"].rstrip(".")
        return f"{against['strategy']}: {reason}. {against['gain']}"
    return f"{against['strategy']} is number {against['rank']}. {against['gain']}"
