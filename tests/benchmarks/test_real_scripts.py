"""Scripts moved in by a few edits: public ones where a folder of clones is given, and stand-ins of ours anywhere.

MESHWRIGHT_CLONES=FOLDER pytest tests/benchmarks/test_real_scripts.py -m thorough
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

import loop_models
from rank_pool import RankPool

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "tests" / "ported_scripts"


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for folder in (ROOT / "benchmarks", ROOT / "benchmarks" / "ported"):
        monkeypatch.syspath_prepend(str(folder))
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(ROOT / "benchmarks")):
            del sys.modules[name]


def ports(strategy: str) -> dict[str, list[Any]]:
    """The edits of each script of ours."""
    edits = import_module("edits")
    first = edits.before("import torch.nn.functional as F", "import meshwright as mw")
    sample = "sample=torch.zeros(2, 8)"
    call = f'mw.parallelize(model, "{strategy}", optimizer=optimizer, '
    return {
        "trainer.py": [
            first,
            edits.after("optimizer = torch.optim", f"model, optimizer = {call}{sample})"),
            edits.swap("Trainer(model, loader,", "Trainer(model, model.divide(loader),"),
        ],
        "accumulating.py": [
            first,
            edits.after("optimizer = torch.optim", f"model, optimizer = {call}sample=torch.zeros(2, 8).long())"),
            edits.swap("(len(text) - 9, (4,))", "(len(text) - 9, (4,))[model.data_rank :: model.data_ranks]"),
        ],
        "stream.py": [
            edits.after("import random", "import meshwright as mw"),
            edits.after("optimizer = torch.optim", f"model, optimizer = {call}{sample})"),
            edits.swap("in enumerate(loader)", "in enumerate(model.divide(loader))"),
        ],
    }


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "tp=2"])
@pytest.mark.parametrize("name", ["trainer.py", "accumulating.py", "stream.py"])
def test_a_script_of_ours(two_ranks: RankPool, tmp_path: Path, name: str, strategy: str) -> None:
    edits = import_module("edits")
    plain = (SCRIPTS / name).read_text()
    names: dict[str, Any] = {}
    exec(plain, names)
    wanted = names["model"].state_dict()
    ported = edits.apply(plain, ports(strategy)[name])
    assert edits.changed_lines(plain, ported) <= 6
    for state in two_ranks(loop_models.run_script, ported, str(tmp_path)):
        for key, value in wanted.items():
            torch.testing.assert_close(state[key], value, rtol=1e-5, atol=1e-6)


def test_edits_by_anchor() -> None:
    edits = import_module("edits")
    text = "a = 1\nif a:\n    b = 2\n    c = 3\nd = 4\n"
    assert edits.apply(text, [edits.after("b = 2", "x()")]) == "a = 1\nif a:\n    b = 2\n    x()\n    c = 3\nd = 4\n"
    assert edits.apply(text, [edits.replace("if a", until="c = 3")]) == "a = 1\nd = 4\n"
    assert edits.changed_lines(text, edits.apply(text, [edits.swap("d = 4", "d = 5")])) == 2
    with pytest.raises(edits.AnchorError, match="in 2 lines"):
        edits.apply("a\na\n", [edits.swap("a", "b")])
    with pytest.raises(edits.AnchorError, match="in 0 lines"):
        edits.apply(text, [edits.swap("e = 5", "")])


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize("script", ["nanoGPT", "torchrun", "PEFT", "DCGAN", "llama2"])
def test_a_public_script(script: str, tmp_path: Path) -> None:
    clones = os.environ.get("MESHWRIGHT_CLONES")
    if not clones:
        pytest.skip("MESHWRIGHT_CLONES names no folder of clones; test_a_script_of_ours runs scripts of the same shape")
    out = tmp_path / "rows.json"
    command = [sys.executable, str(ROOT / "benchmarks" / "real_scripts.py"), clones, "--only", script]
    environment = dict(os.environ, PYTHONPATH=str(ROOT / "src"))
    subprocess.run(
        [*command, "--strategies", "ddp;fsdp", "--jobs", "ddp", "--out", str(out)], check=True, env=environment
    )
    (row,) = json.loads(out.read_text())
    for kind in ("own_loop", "job"):
        for strategy, found in row.get(kind, {}).items():
            assert found.get("apart", 1.0) < 1e-5, f"{kind} {strategy}: {found}"
    assert row["own_loop_lines"] <= 2 * row["accelerate_lines"]
