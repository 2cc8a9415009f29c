"""The page of a ranking: what it shows, what it must not let through, and what it may not ask for."""

from __future__ import annotations

import html
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from meshwright.errors import OutputError
from meshwright.facts.forecast import MEMORY_CAUSES, Forecast
from meshwright.facts.plan import Plan, Ranking, Refusal, Speed
from meshwright.facts.strategy import Strategy
from meshwright.planner.explain import CAUSES, explain
from meshwright.report.charts import plotly_script, policy, scripts
from meshwright.report.plan_html import (
    SHOWN,
    kinds_of_refusals,
    memory_chart,
    memory_room,
    page,
    time_chart,
    write_page,
)
from meshwright.units import GIB
from page_charts import figures

pytest.importorskip("plotly", reason="pages need meshwright[pages]")

VOID = {"meta", "br", "wbr", "hr", "img", "link", "input"}
ATTACK = "\"'><script>alert(1)</script>&amp;"


def make_plan(text: str, *, activations: float = 10, compute: float = 0.5, **others: Any) -> Plan:
    memory = {"parameters": 4 * GIB, "activations": int(activations * GIB), "allocator": GIB}
    return Plan(
        strategy=Strategy.parse(text),
        forecast=Forecast(memory=memory, time={"compute": compute, "data": 0.1}),
        fits=True,
        speed=Speed(samples_per_s=100.0, tokens_per_s_per_device=12345.6, mfu=0.4321),
        error_bar={"memory": 0.1, "time": 0.2},
        **others,
    )


def make_document(**changes: Any) -> dict[str, Any]:
    plans = [
        make_plan("ddp=8,bf16"),
        make_plan(
            "fsdp=4,pp=2:1f1b,bf16",
            activations=8,
            compute=0.9,
            stages=(Forecast(memory={"parameters": 3 * GIB}),) * 2,
        ),
    ]
    refused = (
        Refusal(strategy="ddp=8,bf16,mb=8", reason="needs 90.5 of 37.2 GiB: 60.0 GiB of activations"),
        Refusal(strategy="ddp=8,bf16,mb=4", reason="needs 50.5 of 37.2 GiB: 30.0 GiB of logits"),
        Refusal(strategy="tp=3,bf16", reason="tp=3 does not divide 32 heads."),
        Refusal(strategy="tp=5,bf16", reason="tp=5 does not divide 32 heads."),
        Refusal(strategy="tp=7,bf16", reason="tp=7 does not divide 32 heads."),
    )
    ranking = Ranking(
        job="job.py", cluster="8xA100-40GB", plans=tuple(explain(plans)), refused=refused, candidates=4321, seconds=1.25
    )
    return ranking.to_json() | changes


class Reader(HTMLParser):
    """Elements and text of a page; fails where tags do not close in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.scripts: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        if tag == "script":
            self.scripts.append("")
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "script" in self.open:
            self.scripts[-1] += data
        elif "style" not in self.open:
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join("".join(self.words).split())

    def elements(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.found if name == tag]


def test_the_answer_stands_before_everything_else() -> None:
    text = Reader(page(make_document())).text
    answer, rest = text.split("Memory by cause", 1)
    for figure in ("ddp=8,bf16", "600 ms", "15.0 GiB", "12,346", "43.2%", "Of a step of 600 ms, computing 83%"):
        assert figure in answer
    assert "fsdp=4,pp=2:1f1b,bf16 would save 2.0 GiB but cost 67%" in rest
    assert "Its stages use 3.0, 3.0 GiB" in rest


def lengths(figure: dict[str, Any]) -> dict[float, float]:
    """By place: how long a bar is drawn."""
    found: dict[float, float] = {}
    for trace in figure["data"]:
        for x, y in zip(trace["x"], trace["y"], strict=True):
            found[y] = found.get(y, 0.0) + x
    return found


def test_bars_are_on_one_scale_and_carry_exact_figures() -> None:
    document = make_document()
    room = memory_room("8xA100-40GB")
    assert room is not None and 35 < room < 40
    memory, time = figures(page(document))
    assert [trace["name"] for trace in memory["data"]] == ["parameters", "activations", "allocator"]
    assert [trace["x"] for trace in memory["data"]] == [[4, 4], [10, 8], [1, 1]]
    assert list(lengths(memory).values()) == pytest.approx([15, 13])
    assert list(lengths(time).values()) == pytest.approx([600, 1000])
    assert time["layout"]["xaxis"]["range"] == pytest.approx([0, 1000])
    for limit, y in zip(memory["layout"]["shapes"], lengths(memory), strict=True):
        assert limit["x0"] == limit["x1"] == pytest.approx(room) and limit["line"]["dash"]
        assert limit["y0"] < y < limit["y1"]
    assert room < memory["layout"]["xaxis"]["range"][1] < 1.05 * room
    tips = [tip for trace in time["data"] for tip in trace["hovertext"]]
    assert tips[1] == "fsdp=4,pp=2:1f1b,bf16<br><b>compute 900.00 ms</b><br>90.0% of 1 s"
    text = Reader(page(document)).text
    assert "900.00 ms" in text and "10.000 GiB" in text


def test_a_bar_beyond_the_limit_stays_inside_the_page() -> None:
    document = make_document()
    document["plans"][1]["memory"]["activations"] = 100.0
    memory = figures(page(document))[0]
    assert memory["layout"]["shapes"][0]["x0"] < 50
    assert max(lengths(memory).values()) == pytest.approx(memory["layout"]["xaxis"]["range"][1])


@pytest.mark.parametrize("cluster", ["2xcpu", "local", "gone.json", "8xNothing-7GB"])
def test_an_unknown_limit_is_not_drawn(cluster: str) -> None:
    document = make_document(cluster=cluster)
    assert memory_chart(document).limit is None
    assert figures(page(document))[0]["layout"]["shapes"] == []
    assert "dashed line" not in page(document)


def test_every_cause_has_a_colour_of_its_own() -> None:
    document = make_document()
    document["plans"][0]["memory"] = {cause: 1.0 for cause in (*MEMORY_CAUSES, "something new")}
    document["plans"][0]["time"] = {cause: 1.0 for cause in (*CAUSES, "something new")}
    styles = page(document).split("</style>")[0]
    for chart, figure in zip((memory_chart(document), time_chart(document)), figures(page(document)), strict=True):
        used = list(chart.colours[""].values())
        assert len(set(used)) == len(used) == len(chart.colours[""])
        assert all(f"--{name}: #" in styles for name in used)
        assert [trace["marker"]["color"] for trace in figure["data"]] == [f"var(--{name})" for name in used]


def test_every_text_of_the_document_is_escaped() -> None:
    document = make_document(job=ATTACK, cluster=ATTACK, advice=[ATTACK])
    document["refused"].append({"strategy": ATTACK, "reason": ATTACK})
    for plan in document["plans"]:
        plan |= {"strategy": ATTACK, "why": [ATTACK], "memory": {ATTACK: 1.0}, "time": {ATTACK: 1.0}}
    text = page(document)
    found = Reader(text)
    kinds = [script.get("type") for script in found.elements("script")]
    assert kinds == ["application/json", "application/json", None, None]
    assert tuple(found.scripts[2:]) == scripts()
    assert ATTACK in html.unescape(figures(text)[0]["data"][0]["hovertext"][0])
    assert not any(name.startswith("on") for _, attributes in found.found for name in attributes)
    assert found.text.count("<script>alert(1)</script>&amp;") > 10


def test_nothing_is_asked_of_a_network() -> None:
    text = page(make_document())
    found = Reader(text)
    assert not {"src", "href", "srcset", "action"} & {name for _, attributes in found.found for name in attributes}
    own = text.replace(plotly_script(), "")
    assert len(own) < len(text) - 1_000_000
    assert "url(" not in own and "@import" not in own and "http" not in own.replace("http-equiv", "")
    policies = [meta["content"] for meta in found.elements("meta") if meta.get("http-equiv")]
    assert policies == [policy(scripts())]
    assert "'unsafe-inline'" not in policies[0].split("script-src")[1].split(";")[0]


def test_a_page_without_charts_runs_no_script() -> None:
    found = Reader(page(make_document(plans=[])))
    assert found.elements("script") == []
    assert [meta["content"] for meta in found.elements("meta") if meta.get("http-equiv")] == [policy(())]


def test_charts_can_be_reached_and_read_without_a_mouse() -> None:
    charts = [div for div in Reader(page(make_document())).elements("div") if div.get("class") == "chart"]
    assert len(charts) == 2
    assert all((chart["tabindex"], chart["role"]) == ("0", "img") for chart in charts)
    told = "a bar for each of 2 strategies: ddp=8,bf16 15.0 GiB; fsdp=4,pp=2:1f1b,bf16 13.0 GiB"
    assert charts[0]["aria-label"] == f"Memory by cause, {told}"


def test_refusals_are_grouped_by_reason() -> None:
    heads, large = kinds_of_refusals(make_document()["refused"])
    assert (heads.title, heads.count) == ("Tp=… does not divide … heads.", 3)
    assert (large.title, large.count) == ("Too large", 2)
    assert [strategy for strategy, _ in large.shown] == ["ddp=8,bf16,mb=4", "ddp=8,bf16,mb=8"]


def test_a_long_list_of_refusals_is_cut_and_says_so() -> None:
    refused = [{"strategy": f"ddp,mb={size}", "reason": "no"} for size in range(SHOWN + 1234)]
    (kind,) = kinds_of_refusals(refused)
    assert (kind.count, len(kind.shown), kind.hidden) == (SHOWN + 1234, SHOWN, 1234)
    assert "and 1,234 more" in Reader(page(make_document(refused=refused))).text


def test_where_nothing_fits_the_page_advises() -> None:
    document = make_document(plans=[], advice=["Nothing fits: the smallest is fsdp.", "2 times the nodes would fit."])
    text = Reader(page(document)).text
    assert "No strategy fits. Nothing fits: the smallest is fsdp. 2 times the nodes would fit." in text
    assert "Memory by cause" not in text and "Refused" in text


def test_a_job_without_tokens_shows_samples() -> None:
    document = make_document()
    for plan in document["plans"]:
        plan["tokens_per_s_per_device"] = None
    text = Reader(page(document)).text
    assert "100.0 samples/s" in text and "tokens/s on each device" not in text


def test_the_file_is_written(tmp_path: Path) -> None:
    document = make_document(job="caf\xe9 \udcff.py")
    write_page(document, tmp_path / "plan.html")
    text = (tmp_path / "plan.html").read_text(encoding="utf-8")
    assert "caf\xe9 &#56575;.py" in text
    assert len(text) - len(plotly_script()) < 100_000


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    path = tmp_path / "gone" / "plan.html"
    with pytest.raises(OutputError, match=r"gone/plan\.html.*Give a path in an existing"):
        write_page(make_document(), path)
