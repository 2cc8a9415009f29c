"""Numbers in pages, from the planner: `PYTHONPATH=src python docs/strategy_numbers.py` writes them between the markers

<!-- numbers: NAME -->
<!-- end -->

of docs/learn/4-zero-and-fsdp.md and docs/comparisons/strategies.md. A test compares the pages with the planner.
"""

from __future__ import annotations

import re
from pathlib import Path

from meshwright.api.job_planner import PlanOptions, open_planner
from meshwright.facts.cluster import Cluster
from meshwright.facts.plan import Plan
from meshwright.facts.strategy import Strategy
from meshwright.strategies import data_strategy
from meshwright.units import gib

DOCS = Path(__file__).parent
PAGES = (DOCS / "learn" / "4-zero-and-fsdp.md", DOCS / "comparisons" / "strategies.md")
REGION = re.compile(r"<!-- numbers: (\w+) -->\n.*?<!-- end -->", flags=re.DOTALL)

RANKS, FULL, SLOTS = 8, 4, 2
"""Ranks; bytes of an fp32 number; Adam's numbers for each parameter."""
PAPER = {"ddp": (2, 2, 12), "zero1": (2, 2, 12 / RANKS), "zero2": (2, 2 / RANKS, 12 / RANKS)}
PAPER |= {"fsdp": (2 / RANKS, 2 / RANKS, 12 / RANKS)}
"""The ZeRO paper's bytes of 16-bit parameters, 16-bit gradients, and fp32 optimizer with masters."""

MODEL, NODE, CLUSTER, BATCH = "preset:llama3.2-1b", "8xH100-80GB", "8x8xH100-80GB", 64
SIDE_BY_SIDE = (
    *("ddp", "zero1", "zero2", "fsdp:grad-op", "fsdp", "hsdp=2x4"),
    *("tp=8", "op=8", "pp=8:gpipe", "pp=8:1f1b", "pp=8:interleaved", "layers=8"),
    *("fsdp=4,tp=2", "fsdp=4,pp=2:1f1b", "tp=2,pp=4:1f1b"),
)
POLICIES = "bf16,mb=1"


def state_bytes(text: str, ranks: int = RANKS) -> dict[str, float]:
    """Bytes of states for each parameter on a rank."""
    strategy = Strategy.parse(text).resolve(ranks)
    layout = data_strategy(strategy).layout(strategy)
    update, masters = layout.update_bytes or FULL, FULL if layout.masters else 0
    return {
        "parameters": (layout.parameter_bytes or FULL) / layout.parameters,
        "gradients": update / layout.gradients,
        "optimizer": (SLOTS * update + masters) / layout.optimizer,
    }


def zero() -> list[str]:
    lines = [
        f"| on {RANKS} ranks | fp32 | bf16 with fp32 masters | times less | times less on many | "
        "the paper's bytes | times less |",
        "| --- " + "| ---: " * 6 + "|",
    ]
    for word, paper in PAPER.items():
        full, low = (sum(state_bytes(f"{word},{precision}").values()) for precision in ("fp32", "bf16"))
        most = sum(state_bytes(f"{word},bf16", ranks=2**20).values())
        ddp = sum(state_bytes("ddp,bf16").values())
        limit = "*N*" if most < 0.01 else f"{ddp / most:.1f}"
        lines.append(
            f"| `{word}` | {full:g} | {show(state_bytes(f'{word},bf16'))} = {low:g} | {ddp / low:.1f} | {limit} "
            f"| {sum(paper):g} | {16 / sum(paper):.1f} |"
        )
    return lines


def show(sizes: dict[str, float]) -> str:
    return " + ".join(f"{size:g}" for size in sizes.values())


def forecasts() -> list[str]:
    node, cluster = forecast(NODE, BATCH), forecast(CLUSTER, BATCH)
    lines = [
        "| strategy | parameters | gradients | optimizer | activations | peak, GiB | step | waits for messages "
        "| idle in the pipeline | times as fast on 64 devices |",
        "| --- " + "| ---: " * 9 + "|",
    ]
    return lines + [row(word, node.get(word), cluster.get(word)) for word in SIDE_BY_SIDE]


def forecast(cluster: str, batch: int) -> dict[str, Plan]:
    """The plans that fit, by the words of `SIDE_BY_SIDE`. On more devices a data axis of copies comes on top."""
    planner = open_planner(MODEL, PlanOptions(global_batch=batch))
    where = Cluster.parse(cluster)
    asked = {word: spread(word, where.devices) for word in SIDE_BY_SIDE}
    found = planner.search_named(where, list(asked.values()))
    plans = {str(plan.strategy): plan for plan in (*found.plans, *found.unfit)}
    return {word: plans[str(strategy)] for word, strategy in asked.items() if str(strategy) in plans}


def spread(word: str, ranks: int) -> Strategy:
    """A strategy for eight ranks, on more: as many times the data ranks."""
    strategy = Strategy.parse(f"{word},{POLICIES}")
    if ranks > RANKS:
        more = re.sub(r"(hsdp)=2x4", rf"\1={ranks // 8}x8", re.sub(r"fsdp=4", f"fsdp={ranks // 2}", word))
        strategy = Strategy.parse(f"{more},{POLICIES}")
    return strategy.resolve(ranks)


def row(word: str, node: Plan | None, cluster: Plan | None) -> str:
    if node is None:
        return f"| `{word}` |" + " |" * 3 + " | refused |" + " |" * 4
    memory, time = node.forecast.memory, node.forecast.time
    states = [gib(memory.get(cause, 0)) for cause in ("parameters", "gradients", "optimizer")]
    kept = gib(memory.get("activations", 0) + memory.get("logits", 0))
    computed = ("compute", "host", "update", "host copies", "bubble")
    waits = sum(seconds for cause, seconds in time.items() if cause not in computed)
    step = node.forecast.step
    scaling = f"{step / cluster.forecast.step:.1f}" if cluster else "refused"
    cells = [*(f"{size:.2f}" for size in (*states, kept)), f"{gib(node.peak):.1f}{'' if node.fits else ' (too much)'}"]
    cells += [f"{1e3 * step:.0f} ms", f"{waits / step:.0%}", f"{time.get('bubble', 0.0) / step:.0%}", scaling]
    return f"| `{word}` | {' | '.join(cells)} |"


TABLES = {"zero": zero, "forecasts": forecasts}


def filled(text: str) -> str:
    """A page with current numbers."""

    def table(found: re.Match[str]) -> str:
        lines = "\n".join(TABLES[found[1]]())
        return f"<!-- numbers: {found[1]} -->\n\n{lines}\n\n<!-- end -->"

    return REGION.sub(table, text)


def main() -> None:
    for page in PAGES:
        page.write_text(filled(page.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
