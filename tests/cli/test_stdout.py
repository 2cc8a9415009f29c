"""Under --json, stdout holds one document, whatever the job prints; others' warnings come once, after the result."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

NOISY = """
import os, subprocess, sys, warnings
import torch
from torch import nn
from meshwright import Job

print("NOISE: imported")

def build():
    print("NOISE: built")
    os.write(1, b"NOISE: as from C\\n")
    subprocess.run([sys.executable, "-c", "print('NOISE: of a child')"])
    warnings.warn("LOUD: a library warns")
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))

def loss(output, batch):
    print("NOISE: loss")
    return ((output - batch["y"]) ** 2).sum(), len(output)

class Data:
    def __len__(self):
        return 8
    def __getitem__(self, index):
        print("NOISE: from a worker")
        return {"x": torch.ones(4), "y": torch.ones(2)}

def sample(n):
    return {"x": torch.randn(n, 4), "y": torch.randn(n, 2)}

job = Job(model=build, inputs=lambda batch: (batch["x"],), loss=loss, data=Data(), sample=sample, global_batch=4,
    optimizer=lambda params: torch.optim.SGD(params, lr=0.1))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("noisy")
    (folder / "job.py").write_text(NOISY)
    return folder


@pytest.mark.parametrize(
    "words",
    [
        "plan job.py --on 2xA100-40GB --strategies ddp",
        pytest.param("layout job.py --strategy ddp --ranks 2", marks=pytest.mark.thorough),
        "train job.py --strategy single --steps 1 --workers 1",
        pytest.param("verify job.py --ranks 1 --strategies single --steps 1", marks=pytest.mark.thorough),
        pytest.param("compare job.py --ranks 2 --steps 1 --rounds 1 --strategies ddp", marks=pytest.mark.thorough),
        pytest.param("export ddp=2 --to deepspeed --job job.py", marks=pytest.mark.thorough),
    ],
)
def test_stdout_is_one_document(folder: Path, words: str) -> None:
    command = [sys.executable, "-m", "meshwright", *words.split(), "--json"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert isinstance(json.loads(done.stdout), dict)
    assert "NOISE: imported" in done.stderr
    if "export" not in words:  # it builds no model
        assert "NOISE: as from C" in done.stderr
        assert "NOISE: of a child" in done.stderr
        assert done.stderr.count("UserWarning: LOUD: a library warns") == 1
        assert done.stderr.rindex("NOISE") < done.stderr.index("LOUD")


@pytest.mark.thorough
def test_an_error_leaves_stdout_empty(folder: Path) -> None:
    command = [sys.executable, "-m", "meshwright", "layout", "job.py", "--strategy", "tp=7", "--json"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout) == (2, "")
    assert "LOUD" in done.stderr
