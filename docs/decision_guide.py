"""Draw the decision guide: the planner's choices by model size and device memory, compared with rules of thumb.

python docs/decision_guide.py                        # writes docs/decision-guide.md, in some minutes
python docs/decision_guide.py --models gpt2 --print  # some of it, on the terminal
"""

from __future__ import annotations

import argparse
import re
import textwrap
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from meshwright.api.job_planner import Planner, PlanOptions
from meshwright.describe.model import describe
from meshwright.facts.catalogue import hardware_of
from meshwright.facts.cluster import Cluster
from meshwright.facts.plan import Plan
from meshwright.facts.strategy import Strategy
from meshwright.jobs.load import load_job
from meshwright.planner.account import usable
from meshwright.planner.candidates import Allowed, candidates
from meshwright.planner.explain import CAUSES
from meshwright.planner.search import TIE, SearchResult, best_of_each_kind, choose, search
from meshwright.units import gib, show_count, show_seconds

COMMAND = "python docs/decision_guide.py"
INTRODUCTION = """# Which strategy? A guide by model and memory

What the planner would choose, and where it disagrees with the usual rules of thumb. Written by `{command}` from
forecasts, not from runs: closed forms, which are within 10 % of published runs in memory and within 20 % in time, in
three of four cases. For your own model, run `meshwright plan JOB --on CLUSTER`.

Eight devices of one node; AdamW; a step of {tokens:,} tokens, in samples of 1,024 tokens (GPT-2) or 2,048. bf16 with
fp32 masters, and fp16 on V100, which has no bf16. All data, tensor and pipeline axes, recomputing and offloading of the
optimizer are searched; nothing is compiled. Of the plans within {tie} of the fastest, the simplest is chosen. The
memory available to tensors is {rooms}.

## By model size and number of devices

![The first choice of each model on 1 to 512 H100](decision-guide.svg)

Drawn by `python docs/decision_chart.py` for H100-80GB, in nodes of eight above eight devices, with the same rules
and a step of 4,194,304 tokens. From top to bottom, less and less of the states fits on one device, so they are
sharded over more of them, then recomputed and offloaded. From left to right the links between nodes come in, and
the share of a device becomes small: `hsdp` keeps the gathers within nodes, and `ddp` returns where a step has so
few samples for a device that reducing fp32 gradients once is cheapest.

## The first choice on eight devices

Each cell has the axes and policies, the time of a step and the reserved memory of a device, and a comparison with the
next simpler strategy: how much longer its step takes, or how much memory it needs at least."""
FILE = Path(__file__).parent / "decision-guide.md"
TOKENS = 2**19
"""Tokens of one step, for every model."""
MODELS = {
    "gpt2": 1024,
    "gpt2-large": 1024,
    "llama3.2-1b": 2048,
    "gpt2-xl": 1024,
    "llama3.2-3b": 2048,
    "llama2-7b": 2048,
    "llama3-8b": 2048,
    "llama2-13b": 2048,
    "yi-34b": 2048,
    "llama3-70b": 2048,
    "mistral-large-123b": 2048,
}
"""Presets with the tokens of a sample."""
LADDER = ("ddp", "zero1", "zero2", "fsdp")
"""Data strategies on their own, each holding less than the one before."""


@dataclass(frozen=True, kw_only=True)
class Device:
    name: str
    memory: int
    """GB, as it is sold."""
    precision: str = "bf16"

    @property
    def cluster(self) -> Cluster:
        return Cluster.parse(f"8x{self.name}")

    @property
    def room(self) -> float:
        """GiB that tensors can have."""
        return gib(usable(hardware_of(self.cluster)))


DEVICES = (
    Device(name="V100-16GB", memory=16, precision="fp16"),
    Device(name="RTX-4090", memory=24),
    Device(name="A100-40GB", memory=40),
    Device(name="A100-80GB", memory=80),
    Device(name="H200-141GB", memory=141),
)


@dataclass(frozen=True, kw_only=True)
class Rule:
    """A rule of thumb, and what obeys it."""

    models: str
    below: float
    """Parameters up to which it is said, from where the rule before it ends."""
    says: str
    obeys: Callable[[Strategy], bool]
    memory: int = 0
    """GB of a device from which on it is said."""


RULES = (
    Rule(
        models="under 1B, on 40 GB",
        below=1e9,
        says="DDP",
        memory=40,
        obeys=lambda s: rung(s) == "ddp" and s.recompute == "none" and not s.offload,
    ),
    Rule(
        models="1B to 3B",
        below=3e9,
        says="DDP with activation checkpointing",
        obeys=lambda s: rung(s) == "ddp" and s.recompute != "none" and not s.offload,
    ),
    Rule(models="3B to 7B", below=7e9, says="FSDP", obeys=lambda s: rung(s) == "fsdp" and not s.offload),
    Rule(
        models="7B to 13B, on 80 GB",
        below=13e9,
        says="FSDP, full shard",
        memory=80,
        obeys=lambda s: rung(s) == "fsdp" and not s.variant and not s.offload,
    ),
    Rule(
        models="13B and more",
        below=float("inf"),
        says="FSDP with offload, or tensor parallelism",
        obeys=lambda s: (rung(s) == "fsdp" and bool(s.offload)) or s.inner_ranks > 1,
    ),
)


def rung(strategy: Strategy) -> str:
    """The data strategy where nothing divides the model; empty where something does."""
    return "" if strategy.axes else strategy.data or "single"


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A model, described once."""

    name: str
    parameters: int
    planner: Planner

    @classmethod
    def of(cls, name: str) -> Subject:
        job = load_job(f"preset:{name}:seq={MODELS[name]},batch={TOKENS // MODELS[name]}")
        facts = describe(job)
        parameters = sum(parameter.count for parameter in facts.parameters)
        return cls(name=name, parameters=parameters, planner=Planner(job, facts, job.global_batch))

    @property
    def rule(self) -> Rule:
        return next(rule for rule in RULES if self.parameters < rule.below)


@dataclass(frozen=True, kw_only=True)
class Cell:
    """What the planner finds for a model on eight devices."""

    subject: Subject
    device: Device
    first: Plan | None
    why: str
    disagreement: str
    """A sentence; empty where the rule of thumb says the same, or says nothing of these devices."""

    def __str__(self) -> str:
        return f"{self.subject.name} on {self.device.name}"


def fill(subject: Subject, device: Device) -> Cell:
    found = subject.planner.search(device.cluster, PlanOptions(allowed=allowed(device), fast=True))
    context = subject.planner.context(device.cluster)
    first = next(iter(choose(context, best_of_each_kind(context, found.plans))), None)
    return Cell(
        subject=subject,
        device=device,
        first=first,
        why=why(first, found) if first else f"the smallest needs {least(found, lambda _: True):.0f} GiB",
        disagreement=disagreement(subject, device, first) if device.memory >= subject.rule.memory else "",
    )


def allowed(device: Device) -> Allowed:
    return Allowed(precisions=(device.precision,))


def why(first: Plan, found: SearchResult) -> str:
    """What keeps the next plainer strategy from being the first."""
    strategy = first.strategy
    if strategy.offload:
        return held_against(first, found, "without offload", lambda s: not s.offload)
    if not rung(strategy):
        return held_against(first, found, "fsdp alone", lambda s: rung(s) == "fsdp" and not s.offload)
    plainer = next((word for word in reversed(LADDER[: LADDER.index(rung(strategy))])), "")
    if plainer:
        return held_against(first, found, plainer, lambda s: rung(s) == plainer and not s.offload)
    if strategy.recompute == "none":
        return "all fits on each device"
    return held_against(first, found, "ac=none", lambda s: rung(s) == "ddp" and s.recompute == "none")


def held_against(first: Plan, found: SearchResult, name: str, takes: Callable[[Strategy], bool]) -> str:
    """How the fastest of others fares, in a few words."""
    best = fastest(found, takes)
    if best is None:
        return f"{name}: at least {least(found, takes):.0f} GiB"
    longer = best.forecast.step / first.forecast.step - 1
    if longer > TIE:
        return f"{name}: {percent(longer)} slower"
    return f"{name}: as fast, with less memory left" if best.forecast.peak > first.forecast.peak else f"{name}: as fast"


def fastest(found: SearchResult, takes: Callable[[Strategy], bool]) -> Plan | None:
    return next((plan for plan in found.plans if takes(plan.strategy)), None)


def least(found: SearchResult, takes: Callable[[Strategy], bool]) -> float:
    """GiB of the smallest of those that do not fit."""
    return min((gib(plan.forecast.peak) for plan in found.unfit if takes(plan.strategy)), default=float("nan"))


def disagreement(subject: Subject, device: Device, first: Plan | None) -> str:
    """What becomes of the rule of thumb here, where the planner does not say the same."""
    rule, planner = subject.rule, subject.planner
    if first is None or rule.obeys(first.strategy):
        return ""
    every = candidates(planner.facts, device.cluster, planner.global_batch, allowed(device))
    found = search(planner.context(device.cluster), [strategy for strategy in every if rule.obeys(strategy)])
    chosen = f"the planner takes {show_plan(first)}"
    if not found.plans:
        return f"{rule.says} needs {least(found, rule.obeys):.1f} of {device.room:.1f} GiB; {chosen}."
    best = found.plans[0]
    return f"{chosen}; {show_plan(best)}, the rule's best, {comparison(best, first)}."


def comparison(plan: Plan, first: Plan) -> str:
    longer = plan.forecast.step / first.forecast.step - 1
    saved = gib(first.forecast.peak - plan.forecast.peak)
    memory = f"holds {abs(saved):.1f} GiB {'less' if saved > 0 else 'more'}"
    if longer <= TIE:
        return f"is equally fast within the error bar and {memory}"
    change = plan.forecast - first.forecast
    cause, seconds = max(change.time.items(), key=lambda part: part[1])
    return f"takes {percent(longer)} longer ({show_seconds(seconds)} more of {CAUSES.get(cause, cause)}) and {memory}"


def show_plan(plan: Plan) -> str:
    return f"`{plan.strategy}` ({show_seconds(plan.forecast.step)}, {gib(plan.forecast.peak):.1f} GiB)"


def write(cells: list[Cell]) -> str:
    return "\n".join([introduction(), *table(cells), "", rules(cells)]) + "\n"


def introduction() -> str:
    rooms = ", ".join(f"{device.room:.1f} GiB on {device.name}" for device in DEVICES)
    text = INTRODUCTION.format(command=COMMAND, tokens=TOKENS, tie=percent(TIE), rooms=rooms)
    return "\n\n".join(paragraph(part) for part in text.split("\n\n")) + "\n"


def paragraph(text: str, indent: str = "") -> str:
    """Wrap like other pages; code in backticks is not split."""
    joined = re.sub(r"`[^`]*`", lambda code: code[0].replace(" ", "\0"), " ".join(text.split()))
    filled = textwrap.fill(joined, 120, subsequent_indent=indent, break_on_hyphens=False, break_long_words=False)
    return filled.replace("\0", " ")


def percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def table(cells: list[Cell]) -> list[str]:
    heads = [f"{device.memory} GB ({device.name}, {device.precision})" for device in DEVICES]
    lines = [f"| model | {' | '.join(heads)} |", "| --- " * (len(heads) + 1) + "|"]
    for subject in subjects(cells):
        row = [show_cell(cell) for cell in cells if cell.subject is subject]
        lines.append(f"| {subject.name}<br>{show_count(subject.parameters)} | {' | '.join(row)} |")
    return lines


def subjects(cells: Iterable[Cell]) -> list[Subject]:
    return list({cell.subject.name: cell.subject for cell in cells}.values())


def show_cell(cell: Cell) -> str:
    plan = cell.first
    if plan is None:
        return f"nothing fits<br>{cell.why}"
    terms = str(plan.strategy).split(",")
    place = terms.index(cell.device.precision)
    figures = f"{show_seconds(plan.forecast.step)}, {gib(plan.forecast.peak):.1f} GiB"
    host = f", {plan.host_gib:,.0f} GiB of the host" if plan.host_gib else ""
    return f"`{','.join(terms[:place])}`<br>`{','.join(terms[place + 1 :])}`<br>{figures}{host}<br>{cell.why}"


def rules(cells: list[Cell]) -> str:
    parts = ["## Compared with the rules of thumb"]
    for rule in RULES:
        concerned = [cell for cell in cells if cell.subject.rule is rule and cell.device.memory >= rule.memory]
        if concerned:
            parts += [paragraph(verdict(rule, concerned)), "\n".join(disagreements(concerned))]
    return "\n\n".join(part for part in parts if part)


def verdict(rule: Rule, concerned: list[Cell]) -> str:
    """The rule, and where it holds."""
    unfit = [str(cell) for cell in concerned if cell.first is None]
    agreed = [str(cell) for cell in concerned if cell.first and not cell.disagreement]
    some = f": {', '.join(agreed)}" if agreed else ""
    nothing = f" Nothing fits for {', '.join(unfit)}." if unfit else ""
    title = f"**{rule.models[:1].upper()}{rule.models[1:]}: {rule.says}.**"
    return f"{title} The planner agrees in {len(agreed)} of {len(concerned) - len(unfit)}{some}.{nothing}"


def disagreements(concerned: list[Cell]) -> list[str]:
    return [paragraph(f"- {cell}: {cell.disagreement}", indent="  ") for cell in concerned if cell.disagreement]


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw the decision guide.")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS), help="only these")
    parser.add_argument("--print", action="store_true", help="to the terminal instead of the file")
    options = parser.parse_args()
    cells = []
    for name in options.models:
        subject = Subject.of(name)
        cells += [fill(subject, device) for device in DEVICES]
    if options.print:
        print(write(cells))
    else:
        FILE.write_text(write(cells), encoding="utf-8")


if __name__ == "__main__":
    main()
