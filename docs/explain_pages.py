"""Write the pages of docs/explain: every strategy of docs/strategies on examples, as `meshwright explain` does.

python docs/explain_pages.py             # all pages
python docs/explain_pages.py hf_llama    # those of one example
python docs/explain_pages.py gpt-tensor hf_llama-tensor
"""

from __future__ import annotations

import sys
from pathlib import Path

from meshwright.api.described_presets import describe_job
from meshwright.api.explain import explain_strategy, usual_cluster
from meshwright.commands.preflight import ranks_of
from meshwright.facts.strategy import Strategy
from meshwright.report.explain_html import write_explanation

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "explain"
DENSE = {
    "single": "single",
    "dp": "dp=2",
    "ddp": "ddp",
    "zero1": "zero1",
    "zero2": "zero2",
    "fsdp": "fsdp",
    "hsdp": "hsdp=2x2",
    "tensor": "tp=2",
    "operator": "op=2",
    "context": "cp=2",
    "pipeline": "pp=2:1f1b",
    "layers": "layers=2",
}
"""By the page of docs/strategies."""
EXAMPLES = {"gpt": DENSE, "hf_llama": DENSE, "mixture": {"expert": "fsdp=2,ep=2"}}
"""The strategies that each example is drawn under."""


def main(wanted: tuple[str, ...]) -> None:
    FOLDER.mkdir(exist_ok=True)
    for example, strategies in EXAMPLES.items():
        pages = {name: text for name, text in strategies.items() if f"{example}-{name}".startswith(wanted)}
        if pages:
            write_pages(example, pages)


def write_pages(example: str, pages: dict[str, str]) -> None:
    file = f"examples/{example}.py"
    known = describe_job(str(ROOT / file))
    for page, text in pages.items():
        strategy = Strategy.parse(text)
        cluster = usual_cluster(ranks_of(strategy, None))
        document = explain_strategy(known.job, known.facts, strategy, cluster, name=file)
        write_explanation(document, FOLDER / f"{example}-{page}.html")
        print(f"{example}-{page}.html", flush=True)


if __name__ == "__main__":
    main(tuple(sys.argv[1:]) or tuple(EXAMPLES))
