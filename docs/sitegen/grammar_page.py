"""The reference of the strategy's text, from the registered terms."""

from __future__ import annotations

from itertools import combinations

from meshwright.facts.data_axis import DATA_AXES
from meshwright.facts.model_axis import MODEL_AXES, conflict
from meshwright.schedules.families import FAMILIES
from meshwright.strategies.term_meanings import term_meanings

LEAD = """# Strategy grammar

A strategy is text: terms with commas between them, such as `fsdp,tp=2,pp=2:1f1b,bf16`. Each term appears at most
once, in any order; the canonical text has the order of this table. `Strategy.parse(text)` reads it, `str(strategy)`
prints it, and both are inverse to each other. An unknown term is an error that names the nearest valid one.

```text
strategy  = term *("," term)
term      = head ["=" value] [":" suffix]
```

A data axis without a size takes the ranks that the other axes leave. Where no data axis is named and ranks are left, it
is `ddp`. Sizes that do not multiply to the number of ranks are an error that says which would."""


def grammar_page() -> str:
    parts = [LEAD, "## Terms", _terms(), "## Together", _together(), "## Data axes", _data()]
    return "\n\n".join([*parts, "## Pipeline schedules", _schedules()]) + "\n"


def _terms() -> str:
    lines = ["| term | meaning |", "| --- | --- |"]
    for one in term_meanings():
        forms = ", ".join(f"`{form}`".replace("|", "\\|") for form in one.forms)
        lines.append(f"| {forms} | {one.meaning} |")
    return "\n".join(lines)


def _together() -> str:
    """Pairs of model axes that exclude each other; all other pairs go together."""
    pairs = list(combinations(MODEL_AXES.values(), 2))
    lines = ["| axes | together |", "| --- | --- |"]
    for one, other in pairs:
        why = conflict(one, other)
        lines.append(f"| `{one.word}`, `{other.word}` | {f'no: {why}' if why else 'yes'} |")
    return "\n".join(lines)


def _data() -> str:
    lines = ["| word | shards | ZeRO stage | other names |", "| --- | --- | --- | --- |"]
    for word, base in DATA_AXES.items():
        for suffix, traits in {"": base, **base.variants}.items():
            stage = "-" if traits.zero_stage is None else str(traits.zero_stage)
            name = f"{word}:{suffix}" if suffix else word
            others = ", ".join(f"`{alias}`" for alias in traits.aliases) if not suffix else ""
            lines.append(f"| `{name}` | {', '.join(traits.shards) or 'nothing'} | {stage} | {others} |")
    return "\n".join(lines)


def _schedules() -> str:
    lines = ["| schedule | run by PyTorch's |", "| --- | --- |"]
    return "\n".join([*lines, *(f"| `{word}` | `{family.torch_class}` |" for word, family in FAMILIES.items())])
