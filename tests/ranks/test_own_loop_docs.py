"""The scripts of docs/own-loops.md: the diff turns one into the other, and both train the same weights."""

import re
from pathlib import Path

import pytest
import torch

import loop_models
from rank_pool import RankPool

PAGE = (Path(__file__).parents[2] / "docs" / "own-loops.md").read_text()
BEFORE = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)[0]
DIFF = re.findall(r"```diff\n(.*?)```", PAGE, flags=re.DOTALL)[0].splitlines()


def side(sign: str) -> str:
    return "".join(f"{line[1:]}\n" for line in DIFF if line[0] in (sign, " "))


def test_the_diff_starts_from_the_script() -> None:
    assert side("-") == BEFORE


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "zero1"])
def test_both_scripts_train_the_same(
    two_ranks: RankPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, strategy: str
) -> None:
    monkeypatch.chdir(tmp_path)
    exec(BEFORE, {})
    wanted = torch.load(tmp_path / "weights.pt", weights_only=True)
    for state in two_ranks(loop_models.run_script, side("+").replace('"fsdp"', f'"{strategy}"'), str(tmp_path)):
        for name, value in wanted.items():
            torch.testing.assert_close(state[name], value, rtol=1e-5, atol=1e-6)
