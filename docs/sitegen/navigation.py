"""The site's sections, and which page belongs to which.

Pages that exist and that no section names are added to their folder's section, so no page is lost. Pages that a section
names and that do not exist are left out, and `missing` lists them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

Entry = dict[str, str]

SECTIONS: dict[str, tuple[str, ...]] = {
    "Get started": ("index.md", "get-started.md", "examples.md", "notebook.md", "first-try.md"),
    "Learn": (
        "learn/README.md",
        *("learn/1-why.md", "learn/2-collectives.md", "learn/3-dp-and-ddp.md", "learn/4-zero-and-fsdp.md"),
        *("learn/5-tensor-operator-layer.md", "learn/6-pipelines.md", "learn/7-hybrids.md", "learn/8-deepspeed.md"),
        *("learn/mistakes.md", "learn/glossary.md", "learn/reading.md"),
    ),
    "Moving in": (
        "moving/README.md",
        *("moving/pytorch.md", "moving/ddp.md", "moving/fsdp1.md", "moving/fsdp2.md", "moving/accelerate.md"),
        *("moving/lightning.md", "moving/trainer.md", "moving/deepspeed.md", "moving/torchtitan.md"),
        "adopt.md",
    ),
    "How-to": (
        *("jobs.md", "data.md", "own-loops.md", "launching.md", "checkpoints.md", "preflight.md", "explain.md"),
        "doctor.md",
        *("compare.md", "exchange.md"),
    ),
    "Strategies": (
        *("strategies/README.md", "strategies/single.md", "strategies/dp.md", "strategies/ddp.md"),
        *("strategies/zero1.md", "strategies/zero2.md", "strategies/fsdp.md", "strategies/hsdp.md"),
        *("strategies/tensor.md", "strategies/operator.md", "strategies/context.md", "strategies/expert.md"),
        *("strategies/pipeline.md", "strategies/layers.md", "schedules.md", "policies.md", "deepspeed.md"),
    ),
    "Planner": ("planner.md", "decision-guide.md", "clusters.md", "rehearse.md", "serve.md"),
    "Comparisons": (
        *("comparisons/README.md", "comparisons/tools.md", "comparisons/strategies.md", "comparisons/questions.md"),
    ),
    "Reference": ("reference/api.md", "reference/cli.md", "reference/grammar.md", "reference/json.md"),
    "Explanation": ("design.md", "tracing.md", "same-training.md"),
    "Benchmarks": ("benchmarks.md", "zoo.md", "architectures.md", "registry-models.md", "real_scripts.md"),
    "Project": ("changelog.md", "contributing.md", "security.md", "site.md"),
}
FOLDERS = {"learn": "Learn", "moving": "Moving in", "strategies": "Strategies", "comparisons": "Comparisons"}
REST = "How-to"
"""The section of pages that no section names and whose folder has none."""
HIDDEN = ("source",)
"""Folders of pages that are reached by links only."""


def navigation(pages: Iterable[str]) -> dict[str, list[str]]:
    """The pages of each section, in order; sections without pages are left out."""
    there = set(pages)
    sections = {name: [page for page in named if page in there] for name, named in SECTIONS.items()}
    placed = {page for named in sections.values() for page in named}
    for page in sorted(there - placed):
        folder = page.split("/")[0]
        if folder not in HIDDEN:
            sections[FOLDERS.get(folder, REST)].append(page)
    return {name: found for name, found in sections.items() if found}


def missing(pages: Iterable[str]) -> list[str]:
    """Pages that a section names and that do not exist."""
    there = set(pages)
    return [page for named in SECTIONS.values() for page in named if page not in there]


def title_of(page: Path) -> str:
    """The page's first heading, without marks."""
    found = re.search(r"^# (.+)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return re.sub(r"[`*]|\[|\]\([^)]*\)", "", found[1]) if found else page.stem
