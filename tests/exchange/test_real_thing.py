"""Exports loaded by those that they were written for."""

import importlib.util
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from meshwright.exchange import ExportRequest, export
from meshwright.facts.strategy import Strategy

SCRIPT = """
import sys
import torch
from accelerate import Accelerator

accelerator = Accelerator(cpu=True)
torch.manual_seed(0)
model = torch.nn.Linear(4, 4)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
share = torch.full((2, 4), float(accelerator.process_index))
accelerator.backward(model(share).sum())
optimizer.step()
weight = accelerator.unwrap_model(model).weight.sum().item()
with open(f"{sys.argv[1]}/{accelerator.process_index}", "w") as file:
    print(type(model).__name__, accelerator.num_processes, f"{weight:.6f}", file=file)
"""
PLUGIN = """
import os, sys
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_multi_gpu_env

arguments = launch_command_parser().parse_args(["--config_file", sys.argv[1], "script.py"])
arguments, *_ = _validate_launch_command(arguments)
os.environ.update(prepare_multi_gpu_env(arguments))

from accelerate import FullyShardedDataParallelPlugin
from accelerate.parallelism_config import ParallelismConfig

plugin, sizes = FullyShardedDataParallelPlugin(), ParallelismConfig()
assert arguments.use_fsdp and arguments.mixed_precision == "bf16" and arguments.num_processes == 8, arguments
assert plugin.fsdp_version == 2 and plugin.reshard_after_forward is True
assert plugin.activation_checkpointing and type(plugin.cpu_offload).__name__ == "CPUOffloadPolicy", plugin
assert (sizes.dp_replicate_size, sizes.dp_shard_size, sizes.tp_size) == (2, 2, 2), sizes
"""
DEEPSPEED = """
import json, os, sys
import torch
import deepspeed

config = json.load(open(sys.argv[1]))
# Else it compiles an extension for sums in shared memory first.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
deepspeed.init_distributed("gloo")
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
dtype = next(engine.module.parameters()).dtype
for _ in range(engine.gradient_accumulation_steps()):
    engine.backward(engine(torch.ones(engine.train_micro_batch_size_per_gpu(), 8, dtype=dtype)).float().sum())
    engine.step()
clipping = engine.gradient_clipping()
print("found", engine.zero_optimization_stage(), engine.train_batch_size(), clipping, engine.global_steps, dtype)
"""


def run(*command: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    settings = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    return subprocess.run(command, env=settings, capture_output=True, text=True, check=False, timeout=120)


def write(path: Path, text: str, to: str, ranks: int, **rest: Any) -> Path:
    path.write_text(export(ExportRequest(strategy=Strategy.parse(text).resolve(ranks), ranks=ranks, **rest), to).text)
    return path


@pytest.mark.slow
@pytest.mark.thorough
def test_accelerate_launches_ddp_on_two_cpu_ranks(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    config = write(tmp_path / "accelerate.yaml", "ddp", "accelerate", 2, device="cpu")
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    launch = (sys.executable, "-m", "accelerate.commands.launch", "--config_file", config, "--main_process_port", "0")
    found = run(*launch, script, tmp_path)
    assert found.returncode == 0, found.stderr
    first, second = ((tmp_path / rank).read_text() for rank in "01")
    assert first.startswith("DistributedDataParallel 2 ")
    assert first == second  # their gradients were averaged


def test_accelerate_makes_its_plugin_of_fsdp(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    text = "hsdp=2x2,tp=2,bf16,ac=full,offload=params"
    config = write(tmp_path / "accelerate.yaml", text, "accelerate", 8)
    found = run(sys.executable, "-c", PLUGIN, config)
    assert found.returncode == 0, found.stderr


@pytest.mark.parametrize(
    "text", ["single", "ddp", "tp=8,bf16", "fsdp,fp8,compile", "zero2,bf16", "fsdp,engine=deepspeed"]
)
def test_accelerate_loads_every_kind(text: str, tmp_path: Path) -> None:
    """Accelerate refuses a file with a key that it does not know."""
    config_args = pytest.importorskip("accelerate.commands.config.config_args")
    path = write(tmp_path / "accelerate.yaml", text, "accelerate", 1 if text == "single" else 8)
    assert config_args.load_config_from_file(str(path)).num_processes in (1, 8)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "stage", "dtype"),
    [
        ("zero2,bf16,offload=optimizer,mb=2", 2, "bfloat16"),
        pytest.param("zero1,mb=2", 1, "float32", marks=pytest.mark.thorough),
        pytest.param("fsdp,bf16:pure,mb=4", 3, "bfloat16", marks=pytest.mark.thorough),
        pytest.param("single,mb=4", 0, "float32", marks=pytest.mark.thorough),
    ],
)
def test_deepspeed_initializes(text: str, stage: int, dtype: str, tmp_path: Path) -> None:
    spec = importlib.util.find_spec("deepspeed")
    if spec is None or spec.origin is None:  # a folder of that name among the tests is importable, too
        pytest.skip("DeepSpeed is not installed")
    config = write(tmp_path / "deepspeed.json", text, "deepspeed", 1, global_batch=4, max_norm=0.5)
    assert "meshwright" in json.loads(config.read_text())  # a key that DeepSpeed does not know
    place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    found = run(sys.executable, "-c", DEEPSPEED, config, DS_ACCELERATOR="cpu", **place)
    assert found.returncode == 0, found.stderr
    assert f"found {stage} 4 0.5 1 torch.{dtype}" in found.stdout


def free_port() -> str:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return str(server.getsockname()[1])


@pytest.mark.slow
@pytest.mark.thorough
def test_slurm_s_file_trains(tmp_path: Path) -> None:
    """A Slurm of one node: srun runs what it is given, and torchrun starts two ranks on the CPU."""
    gpt = Path(__file__).parents[2] / "examples" / "gpt.py"
    script = write(tmp_path / "train.sbatch", "zero1", "slurm", 2, device="cpu", job=str(gpt))
    for name, body in {"scontrol": "echo localhost", "srun": 'shift; exec "$@" --steps 1 --json'}.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    script.write_text(script.read_text().replace(":29500", f":{free_port()}"))
    slurm = {"SLURM_JOB_NODELIST": "localhost", "SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "1"}
    path = f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    found = subprocess.run(
        ["bash", script],
        env={**os.environ, **slurm, "PATH": path, "OMP_NUM_THREADS": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=150,
    )
    assert found.returncode == 0, found.stderr
    summary = json.loads(found.stdout)
    assert (summary["strategy"], summary["ranks"], summary["steps"]) == ("zero1=2", 2, 1)
