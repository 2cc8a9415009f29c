"""A strategy explained on a job: its bytes and kernels are the trace's, its times the planner's, its page valid."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import replace
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from broken_models import heads
from job_text import JOB
from meshwright.api.described_presets import describe_job
from meshwright.api.explain import Pricing, explain_strategy, usual_cluster
from meshwright.api.job_planner import Planner
from meshwright.api.parameter_shares import strategy_shares
from meshwright.cli.main import app
from meshwright.commands.preflight import ranks_of
from meshwright.describe.model import describe
from meshwright.describe.observe import make_batch
from meshwright.facts.job import Job
from meshwright.facts.model import ModelFacts
from meshwright.facts.strategy import Strategy
from meshwright.facts.trace import Message, Trace
from meshwright.facts.walk import LOSS
from meshwright.report.explain import explain_page, passes_of
from meshwright.report.explain_html import explain_html
from meshwright.tracing.step import trace_step

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "docs" / "explain"
STRATEGIES = {
    "single": "single",
    "ddp": "ddp",
    "zero1": "zero1",
    "zero2": "zero2",
    "fsdp": "fsdp",
    "hsdp": "hsdp=2x2",
    "tensor": "tp=2",
    "operator": "op=2",
    "pipeline": "pp=2:1f1b",
    "layers": "layers=2",
}
VOID = ("meta", "br", "img", "hr", "link", "input")

small = replace(heads, global_batch=4)


class Elements(HTMLParser):
    """Checks that elements are closed in the order in which they were opened."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: Counter[str] = Counter()

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.seen[tag] += 1
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@cache
def facts_of(name: str) -> tuple[Job, ModelFacts]:
    if name == "small":
        return small, describe(small)
    known = describe_job(str(ROOT / "examples" / f"{name}.py"))
    return known.job, known.facts


@cache
def explained(name: str, text: str) -> dict[str, Any]:
    job, facts = facts_of(name)
    strategy = Strategy.parse(text)
    return explain_strategy(job, facts, strategy, usual_cluster(ranks_of(strategy, None)), name=name)


def traced(name: str, text: str, rank: int) -> Trace:
    job, facts = facts_of(name)
    strategy = Strategy.parse(text)
    return trace_step(job, facts, strategy, ranks=ranks_of(strategy, None), rank=rank, whole=True)


def pricing(name: str, text: str) -> Pricing:
    job, facts = facts_of(name)
    strategy = Strategy.parse(text)
    ranks = ranks_of(strategy, None)
    planner = Planner(job, facts, job.global_batch)
    return Pricing(planner.context(usual_cluster(ranks)), strategy.resolve(ranks))


def messages(found: list[dict[str, Any]]) -> Counter[tuple[str, str, int, float]]:
    counts: Counter[tuple[str, str, int, float]] = Counter()
    for one in found:
        counts[one["kind"], one["axis"], one["ranks"], one["bytes"]] += one["count"]
    return counts


def check_walks(name: str, text: str) -> None:
    """Every walk has the trace's messages, FLOPs and peak, and the planner's seconds for them."""
    price = pricing(name, text)
    for walk in explained(name, text)["walks"]:
        trace = traced(name, text, walk["rank"])
        sent = [message for visit in walk["visits"] for message in visit["messages"]]
        assert messages(sent) == messages([vars(message) for message in trace.messages])
        assert walk["flops"] == pytest.approx(sum(one.flops * one.count for one in trace.operations))
        assert walk["peak_bytes"] == trace.peak
        assert walk["peak_held"] == trace.memory
        assert walk["compute_ms"] == pytest.approx(1e3 * sum(map(price.kernel, trace.operations)))
        assert sum(one["ms"] for one in sent) == pytest.approx(1e3 * sum(map(price.message, trace.messages)))


def check_page(document: dict[str, Any]) -> None:
    """The page is well formed, and shows each rank's figures."""
    page = explain_html(document)
    elements = Elements()
    elements.feed(page)
    assert elements.open == []
    assert elements.seen["svg"] >= 1 + len(document["walks"])
    assert not re.search(r"<(script|link|img)|https?://(?!www\.w3\.org/2000/svg)", page)
    for walk in document["walks"]:
        assert f"The step of rank {walk['rank']}" in page
        for one in passes_of(walk):
            assert all(cell in page for row in one.rows for cell in row.cells)


@pytest.mark.parametrize("text", ["single", "ddp", "zero1", "fsdp", "tp=3", "pp=2:1f1b"])
def test_walks_are_the_traces(text: str) -> None:
    check_walks("small", text)
    check_page(explained("small", text))


@pytest.mark.thorough
@pytest.mark.parametrize("text", ["zero2", "hsdp=2x2", "op=2", "layers=2", "fsdp=2,tp=3", "single,ac=full"])
def test_more_walks_are_the_traces(text: str) -> None:
    check_walks("small", text)
    check_page(explained("small", text))


@pytest.mark.thorough
@pytest.mark.parametrize("page", STRATEGIES)
@pytest.mark.parametrize("example", ["gpt", "hf_llama"])
def test_pages_of_the_examples(example: str, page: str) -> None:
    check_walks(example, STRATEGIES[page])
    check_page(explained(example, STRATEGIES[page]))


EXPERTS = "fsdp=2,ep=2"


@pytest.mark.thorough
def test_the_page_of_experts() -> None:
    check_walks("mixture", EXPERTS)
    check_page(explained("mixture", EXPERTS))
    kinds = {(one["kind"], one["axis"]) for one in explained("mixture", EXPERTS)["walks"][0]["messages"]}
    assert ("all_to_all", "expert") in kinds


@pytest.mark.parametrize("text", ["ddp=2,ep=2", EXPERTS])
def test_ranks_hold_their_own_experts(text: str) -> None:
    job, facts = facts_of("mixture")
    shares = strategy_shares(job, facts, Strategy.parse(text).resolve(4))
    block = [unit["name"] for unit in shares["units"]].index("blocks.0")
    held = [(row[block]["start"], row[block]["end"]) for row in shares["held"]]
    halves = [(0.0, 0.5), (0.5, 1.0)]
    assert held == (halves * 2 if text.startswith("ddp") else [(0.0, 0.25), (0.5, 0.75), (0.25, 0.5), (0.75, 1.0)])
    experts = sum(p.count * p.itemsize for p in facts.parameters if p.name.startswith("blocks.0.mixture.experts"))
    rest = shares["units"][block]["bytes"] - experts
    wanted = rest + experts / 2 if text.startswith("ddp") else (rest + experts) / 4
    assert [row[block]["bytes"] for row in shares["held"]] == pytest.approx([wanted] * 4)


def test_the_first_device_of_dp_does_its_share_and_the_whole_loss() -> None:
    """The kernels of one process with half of the samples, but for the loss, and the messages of nn.DataParallel."""
    document = explained("small", "dp=2")
    check_page(document)
    [walk] = document["walks"]
    assert [any(row) for row in document["holds"]["held"]] == [True, False]
    job, facts = facts_of("small")
    half = replace(job, global_batch=job.global_batch // 2)
    [share], [whole] = (
        explain_strategy(one, facts, Strategy.parse("single"), usual_cluster(1))["walks"] for one in (half, job)
    )

    def computed(found: dict[str, Any], *, loss: bool) -> list[tuple[Any, ...]]:
        visits = [visit for visit in found["visits"] if visit["kernels"] and (visit["module"] == LOSS) == loss]
        return [(visit["phase"], visit["module"], visit["flops"], visit["kernels"]) for visit in visits]

    assert computed(walk, loss=False) == computed(share, loss=False)
    assert computed(walk, loss=True) == computed(whole, loss=True)
    states = sum(parameter.count * parameter.itemsize for parameter in facts.parameters)
    sent = {(one["kind"], one["bytes"]) for visit in walk["visits"] for one in visit["messages"]}
    assert {("broadcast", states), ("reduce", states)} <= sent
    output = job.model()(*job.inputs(make_batch(job, job.global_batch)))
    gathered = output.numel() * output.element_size()
    assert {("gather", gathered), ("scatter", gathered)} <= sent


@pytest.mark.parametrize("page", [*STRATEGIES, "dp", "context", "expert"])
def test_strategy_pages_link_to_their_pictures(page: str) -> None:
    text = (ROOT / "docs" / "strategies" / f"{page}.md").read_text()
    for example in ("mixture",) if page == "expert" else ("gpt", "hf_llama"):
        assert f"(../explain/{example}-{page}.html)" in text
        elements = Elements()
        elements.feed((PAGES / f"{example}-{page}.html").read_text())
        assert elements.open == [] and elements.seen["svg"]


def test_parameters_are_gathered_where_they_are_used() -> None:
    visits = explained("small", "fsdp")["walks"][0]["visits"]
    blocks = [visit for visit in visits if visit["phase"] == "forward" and visit["module"].startswith("blocks.")]
    assert [visit["module"] for visit in blocks] == ["blocks.0", "blocks.1", "blocks.2"]
    for visit in blocks:
        assert [message["kind"] for message in visit["messages"]] == ["all_gather"]
        assert visit["gathered_bytes"] > 0 and visit["freed_bytes"] > 0
    reduced = [visit["module"] for visit in visits if any(m["kind"] == "reduce_scatter" for m in visit["messages"])]
    assert reduced == ["blocks.2", "blocks.1", "blocks.0", "token"]


def test_what_ranks_hold_adds_up_to_the_model() -> None:
    _, facts = facts_of("small")
    whole = sum(parameter.count * parameter.itemsize for parameter in facts.parameters)
    for text, copies in (("ddp", 2), ("fsdp", 1), ("pp=2:1f1b", 1), ("hsdp=2x2", 2)):
        held = explained("small", text)["holds"]["held"]
        assert sum(part["bytes"] for row in held for part in row if part) == pytest.approx(copies * whole)


def test_a_refused_alternative_says_why() -> None:
    alternatives = {one["kind"]: one for one in explained("small", "ddp")["side_by_side"]}
    assert set(alternatives) == {"data", "sharded", "tensor", "pipeline"}
    assert "3 heads" in alternatives["tensor"]["refused"]
    assert "held" in alternatives["pipeline"]


def test_a_pass_like_an_earlier_one_is_not_repeated() -> None:
    found = passes_of(explained("small", "pp=2:1f1b")["walks"][0])
    assert any(one.like for one in found)
    names = {one.name for one in found}
    assert all(one.like in names for one in found if one.like)


def test_an_unknown_group_is_priced_by_its_ranks() -> None:
    price = pricing("small", "pp=2:1f1b")
    other = Message(kind="all_reduce", bytes=1e6, axis="elsewhere", ranks=2)
    assert price.message(other) > 0
    assert price.message(replace(other, count=3)) == pytest.approx(3 * price.message(other))


def test_the_command(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(JOB)
    page = tmp_path / "step.html"
    run = CliRunner().invoke(app, ["explain", "ddp", "--job", str(tmp_path / "job.py"), "--page", str(page), "--json"])
    assert run.exit_code == 0
    document = json.loads(run.stdout)
    assert document["strategy"] == "ddp=2" and document["cluster"] == "2xH100-80GB"
    assert page.read_text() == explain_html(document)
    assert explain_page(document).renderables


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["ddp", "--page", "step.txt"], "must end in .html"),
        (["ddp", "--ranks", "2", "--on", "2xH100-80GB"], "give one of them"),
        (["tp=2", "--ranks", "3"], "3 were given"),
        (["dp,compile", "--ranks", "2"], "which defeats compile"),
        (["fsdpp"], "fsdp"),
    ],
)
def test_wrong_requests(arguments: list[str], message: str, tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(JOB)
    run = CliRunner().invoke(app, ["explain", *arguments, "--job", str(tmp_path / "job.py")])
    assert message in str(run.exception)
