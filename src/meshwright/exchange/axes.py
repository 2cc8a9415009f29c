"""Read the model axes of another framework's config."""

from __future__ import annotations

from meshwright.exchange.fields import Fields
from meshwright.facts.model_axis import MODEL_AXES, AxisTerm


def read_axes(framework: str, fields: Fields, schedule: str = "") -> tuple[AxisTerm, ...]:
    """The axes of more than one rank. `schedule` applies to a staged axis."""
    found = []
    for word, traits in MODEL_AXES.items():
        if framework in traits.config_fields and (size := fields.size(traits.config_fields[framework])) > 1:
            found.append(AxisTerm(word, size, schedule if traits.staged else ""))
    return tuple(found)


def axis_fields(framework: str) -> list[str]:
    """The fields that hold the sizes of model axes."""
    return [field for traits in MODEL_AXES.values() if (field := traits.config_fields.get(framework))]
