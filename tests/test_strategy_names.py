"""Only its own file and the grammar look at the name of a data strategy or an axis; all else asks its traits."""

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from meshwright.facts.data_axis import DATA_AXES
from meshwright.facts.model_axis import MODEL_AXES, AxisTerm
from meshwright.strategies import DATA_STRATEGIES, model_axis

PACKAGE = Path(__file__).parents[1] / "src" / "meshwright"
GRAMMAR = PACKAGE / "facts" / "grammar.py"
LOOKUPS = {"get", "index", "count", "pop", "startswith", "endswith", "removeprefix", "__contains__"}

TECHNIQUES = {**DATA_STRATEGIES, **{word: model_axis(AxisTerm(word, 2)) for word in MODEL_AXES}}
OTHER_MEANINGS = {
    ("layers", "families.py"),  # a schedule
    ("layers", "decoder.py"),  # how many a model has
    ("layers", "presets.py"),
    ("op", "read_torchtitan.py"),  # a way to choose what is recomputed
    ("tp", "measured_runs.py"),  # columns of a table
    ("pp", "measured_runs.py"),
}
SCRIPTS = PACKAGE / "adopt"
"""There the words stand for what users' scripts do with other libraries."""
OWN_FILES = {word: Path(inspect.getfile(type(technique))) for word, technique in TECHNIQUES.items()}
OWNERS = {
    name: OWN_FILES[word] for word, traits in DATA_AXES.items() for name in (word, *traits.aliases, *traits.variants)
} | {word: OWN_FILES[word] for word in MODEL_AXES}
TEXT = re.compile(rf"({'|'.join(OWNERS)})(?:[=:,].*)?")


def asked(node: ast.AST) -> list[ast.expr]:
    """The expressions by which a node compares, lists or looks something up."""
    match node:
        case ast.Compare():
            return [node.left, *node.comparators]
        case ast.Tuple() | ast.List() | ast.Set():
            return list(node.elts)
        case ast.Dict():
            return [key for key in node.keys if key is not None]
        case ast.Subscript():
            return [node.slice]
        case ast.MatchValue():
            return [node.value]
        case ast.Call(func=ast.Attribute(attr=name)) if name in LOOKUPS:
            return list(node.args)
    return []


def names_in(source: str, file: Path) -> Iterator[str]:
    """A line for each name of a data strategy or an axis that is looked at outside of its own file."""
    for node in ast.walk(ast.parse(source)):
        for value in asked(node):
            text = value.value if isinstance(value, ast.Constant) and isinstance(value.value, str) else ""
            found = TEXT.fullmatch(text)
            if found and file not in (OWNERS[found[1]], GRAMMAR) and (text, file.name) not in OTHER_MEANINGS:
                yield f"{file.name}:{value.lineno} looks at {text!r}; ask its traits"


def test_only_its_own_file_and_the_grammar_look_at_a_name() -> None:
    files = sorted(file for file in PACKAGE.rglob("*.py") if SCRIPTS not in file.parents)
    assert [line for file in files for line in names_in(file.read_text(), file)] == []


@pytest.mark.parametrize(
    "source",
    [
        'strategy.data == "dp"',
        '"fsdp" != strategy.data',
        'strategy.data in ("fsdp", "hsdp")',
        'strategy.data not in {None, "single"}',
        'SHARDED = ("zero1", "fsdp:grad-op")',
        'STAGES = {"ddp": 0}',
        'DATA_STRATEGIES["ddp"]',
        'stages.get("zero3", 0)',
        'text.startswith("hsdp=")',
        'strategy.variant == "no-shard"',
        'term.word == "tp"',
        'any(term.word in ("pp", "layers") for term in strategy.axes)',
        'SIZES = {"op": 2}',
        'match strategy.data:\n    case "zero2" | None:\n        pass',
    ],
)
def test_a_name_is_found(source: str) -> None:
    assert list(names_in(source, PACKAGE / "planner" / "search.py"))


@pytest.mark.parametrize("source", ['Strategy(data="single")', 'strategy.precision == "bf16"', '{"data": "ddp"}'])
def test_other_words_pass(source: str) -> None:
    assert list(names_in(source, PACKAGE / "planner" / "search.py")) == []


def test_its_own_file_may() -> None:
    assert list(names_in('strategy.variant == "no-shard"', OWN_FILES["fsdp"])) == []
    assert list(names_in('strategy.data == "ddp"', OWN_FILES["fsdp"]))
