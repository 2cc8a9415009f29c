"""Loops over a loader that is made in the loop's own line."""

import re
from pathlib import Path

import pytest

from meshwright.adopt.adopt import adopt
from meshwright.jobs.load import load_job
from page_blocks import ROOT, side

SCRIPT = """
import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset

x = torch.rand(256, 8)
data = TensorDataset(x, x.sum(1, keepdim=True))
model = nn.Linear(8, 1)
optimizer = optim.SGD(model.parameters(), lr=0.1)
for LOOP:
    optimizer.zero_grad()
    loss = F.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
"""


@pytest.mark.parametrize(
    "loop",
    [
        "x, y in DataLoader(data, batch_size=64)",
        "i, (x, y) in enumerate(DataLoader(data, 64, shuffle=True))",
        "x, y in torch.utils.data.DataLoader(dataset=data, batch_size=64)",
    ],
)
def test_its_data_are_the_job_s(loop: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT.replace("LOOP", loop))
    written = adopt(tmp_path / "script.py", name="job.py").job
    assert (written.todo, written.global_batch) == ([], 64)
    (tmp_path / "job.py").write_text(written.text)
    assert len(load_job(str(tmp_path / "job.py")).dataset()) == 256


def test_the_loop_of_the_readme(tmp_path: Path) -> None:
    (diff,) = re.findall(r"```diff\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    (tmp_path / "script.py").write_text(side(diff, "-"))
    written = adopt(tmp_path / "script.py", name="job.py").job
    assert (written.todo, written.global_batch) == ([], 64)
