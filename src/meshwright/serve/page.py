"""The web page: settings, the equivalent command, and space for the answer.

Its own scripts are inline. plotly is a separate file whose name changes with its content, so that a browser loads it
once.
"""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path
from typing import Any

from markupsafe import Markup

from meshwright.facts.catalogue import catalogue_names
from meshwright.facts.links import BETWEEN_KINDS
from meshwright.jobs.presets import PRESETS, Text
from meshwright.report.charts import charts_script, plotly_script, policy
from meshwright.report.html import environment
from meshwright.serve.models import JOB, Models
from meshwright.serve.request import DEFAULTS, LIMITS, WORDS

FIRST_PRESET, FIRST_DEVICE = "llama3-8b", "H100-80GB"
SCRIPT = Path(__file__).parent / "page.js"
POLICIES = {"precision": "Precision", "ac": "Activation checkpointing", "offload": "Offload"}
FLAGS = {"tensor": ("Tensor axis", True), "pipeline": ("Pipeline", True), "compile": ("torch.compile", False)}


class Page:
    """Renders the page for the models that may be planned."""

    def __init__(self, models: Models) -> None:
        self._models = models

    @property
    def policy(self) -> str:
        """Content security policy: run the page's own scripts and styles, call this server, and nothing else."""
        more = ("connect-src 'self'", "frame-ancestors 'none'")
        return policy((charts_script(), _script()), script="'self'", more=more)

    def render(self) -> str:
        """The page as text; configs are searched again each time."""
        return (
            environment("serve", "report")
            .get_template("page.html")
            .render(
                job=self._models.job,
                job_word=JOB,
                presets={name: _defaults(preset) for name, preset in PRESETS.items()},
                configs=self._models.configs(),
                folder=self._models.folder,
                devices=catalogue_names(),
                links=BETWEEN_KINDS,
                limits=LIMITS,
                policies=[(name, title, WORDS[name], DEFAULTS[name]) for name, title in POLICIES.items()],
                flags=FLAGS,
                first=(FIRST_PRESET, FIRST_DEVICE),
                scripts=(Markup(charts_script()), Markup(_script())),
                plotly=plotly_path(),
            )
        )


def _defaults(preset: Any) -> dict[str, Any]:
    """The batch and sequence length that a preset uses by default."""
    return {"batch": preset.batch, "seq": preset.shape.length if isinstance(preset, Text) else ""}


@cache
def plotly_path() -> str:
    """The URL path of plotly's script."""
    return f"/plotly-{hashlib.sha256(plotly_script().encode()).hexdigest()[:16]}.js"


@cache
def _script() -> str:
    return SCRIPT.read_text(encoding="utf-8")
