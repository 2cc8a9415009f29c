"""The files themselves: their fields, their comments, and what cannot be written."""

import json
import shlex
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from meshwright.exchange import ExchangeError, ExportRequest, export
from meshwright.facts.strategy import Strategy

# From job_config.py of torchtitan v0.2.2, the last release that reads TOML; unknown names are errors there.
TORCHTITAN = {
    "training": {
        *("local_batch_size", "global_batch_size", "max_norm", "dtype", "mixed_precision_param", "enable_cpu_offload"),
    },
    "parallelism": {
        *("data_parallel_replicate_degree", "data_parallel_shard_degree", "fsdp_reshard_after_forward"),
        *("tensor_parallel_degree", "pipeline_parallel_degree", "pipeline_parallel_schedule"),
        *("pipeline_parallel_microbatch_size", "context_parallel_degree", "expert_parallel_degree"),
    },
    "activation_checkpoint": {"mode", "selective_ac_option"},
    "compile": {"enable"},
    "model": {"converters"},
}


def request(text: str, ranks: int = 8, **rest: Any) -> ExportRequest:
    return ExportRequest(strategy=Strategy.parse(text).resolve(ranks), ranks=ranks, **rest)


def test_deepspeed() -> None:
    text = export(request("zero2,bf16,offload=optimizer,mb=2", global_batch=64, max_norm=1.0), "deepspeed").text
    config = json.loads(text)
    assert config["train_batch_size"] == 64
    assert config["train_micro_batch_size_per_gpu"] == 2
    assert config["gradient_accumulation_steps"] == 4
    assert config["gradient_clipping"] == 1.0
    assert config["zero_optimization"] == {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    assert config["bf16"] == {"enabled": True}
    assert "fp16" not in config


def test_deepspeed_is_told_not_to_clip() -> None:
    assert json.loads(export(request("fsdp,mb=1"), "deepspeed").text)["gradient_clipping"] == 0.0


def test_accelerate_shards_and_replicates() -> None:
    config = yaml.safe_load(export(request("hsdp=2x2,tp=2,bf16,ac=full", nodes=2), "accelerate").text)
    assert config["distributed_type"] == "FSDP"
    assert (config["num_machines"], config["num_processes"]) == (2, 8)
    assert config["fsdp_config"]["fsdp_version"] == 2
    assert config["fsdp_config"]["fsdp_activation_checkpointing"] is True
    assert config["parallelism_config"] == {
        "parallelism_config_dp_replicate_size": 2,
        "parallelism_config_dp_shard_size": 2,
        "parallelism_config_tp_size": 2,
        "parallelism_config_cp_size": 1,
    }


def test_accelerate_hands_over_to_deepspeed() -> None:
    config = yaml.safe_load(export(request("zero2,bf16,mb=2", global_batch=64, max_norm=0.5), "accelerate").text)
    assert config["distributed_type"] == "DEEPSPEED"
    assert config["deepspeed_config"]["zero_stage"] == 2
    assert config["deepspeed_config"]["gradient_accumulation_steps"] == 4
    assert config["deepspeed_config"]["gradient_clipping"] == 0.5


@pytest.mark.parametrize("batch", [None, 64])
@pytest.mark.parametrize("text", ["fsdp=2,tp=2,pp=2:zbv,fp8,ac=selective,mb=1", "ddp,offload=params,compile", "single"])
def test_torchtitan_has_names_that_it_knows(text: str, batch: int | None) -> None:
    ranks = 1 if text == "single" else 8
    config = tomllib.loads(export(request(text, ranks, global_batch=batch), "torchtitan").text)
    for table, settings in config.items():
        assert settings.keys() <= TORCHTITAN[table], table


def test_torchtitan_counts_a_pipeline_s_micro_batches() -> None:
    config = tomllib.loads(export(request("fsdp=2,pp=4:1f1b,bf16,mb=2", global_batch=64), "torchtitan").text)
    assert config["training"]["local_batch_size"] == 32
    assert config["training"]["max_norm"] == float("inf")
    assert config["parallelism"]["pipeline_parallel_microbatch_size"] == 2
    assert config["parallelism"]["fsdp_reshard_after_forward"] == "default"


@pytest.mark.parametrize("to", ["accelerate", "torchtitan"])
def test_losses_stand_in_the_comments(to: str) -> None:
    exported = export(request("fsdp=4,op=2"), to)
    comments = " ".join(line.lstrip("# ") for line in exported.text.splitlines() if line.startswith("#"))
    assert exported.without_equal
    assert all(str(loss) in comments for loss in exported.without_equal)


def test_losses_stand_in_deepspeed_s_json() -> None:
    exported = export(request("fsdp=4,op=2,mb=1"), "deepspeed")
    assert json.loads(exported.text)["meshwright"]["without_equal"] == [str(loss) for loss in exported.without_equal]


def test_unequal_parts_are_refused() -> None:
    with pytest.raises(ExchangeError, match=r"global batch of 10 .* 8 data ranks .* mb=N"):
        export(request("fsdp", global_batch=10), "deepspeed")


def test_an_unknown_reader_is_answered_with_the_nearest() -> None:
    with pytest.raises(ExchangeError, match="did you mean deepspeed"):
        export(request("fsdp"), "deep-speed")


@pytest.mark.parametrize("to", ["slurm", "kubernetes", "ray", "kuberay"])
def test_a_launch_file_needs_a_job(to: str) -> None:
    with pytest.raises(ExchangeError, match="--job"):
        export(request("fsdp"), to)


def write_program(path: Path, body: str) -> None:
    path.write_text(f"#!/bin/bash\n{body}\n")
    path.chmod(0o755)


def test_slurm_calls_torchrun_on_every_node(tmp_path: Path) -> None:
    """The batch file runs, with programs in the place of Slurm's that write down how they are called."""
    launch = request("hsdp=2x8,bf16", 16, nodes=2, job="my jobs/gpt $1.py")
    script = tmp_path / "train.sbatch"
    script.write_text(export(launch, "slurm").text)
    write_program(tmp_path / "scontrol", "printf 'first\\nsecond\\n'")
    write_program(tmp_path / "srun", 'printf "%s\\n" "$@"')
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_JOB_ID": "7"}
    environment["SLURM_JOB_NUM_NODES"] = "2"
    called = subprocess.run(["bash", script], env=environment, capture_output=True, text=True, check=True).stdout
    words = called.splitlines()
    assert words[words.index("--nnodes") + 1] == "2"
    assert words[words.index("--nproc-per-node") + 1] == "8"
    assert words[words.index("--rdzv-endpoint") + 1] == "first:29500"
    assert words[words.index("train") + 1] == "my jobs/gpt $1.py"
    assert words[words.index("--strategy") + 1] == "hsdp=2x8,bf16"
    assert "#SBATCH --nodes=2\n" in script.read_text()
    assert "#SBATCH --gpus-per-node=8\n" in script.read_text()


def test_kubernetes_pods_meet_at_the_first() -> None:
    text = export(request("hsdp=2x8,bf16", 16, nodes=2, job="jobs/GPT_2.py:small"), "kubernetes").text
    service, job = yaml.safe_load_all(text)
    name = job["metadata"]["name"]
    assert name == service["metadata"]["name"] == "gpt-2"
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"] == {"job-name": name}
    assert job["spec"]["completionMode"] == "Indexed"
    assert job["spec"]["completions"] == job["spec"]["parallelism"] == 2
    pod = job["spec"]["template"]["spec"]
    assert pod["subdomain"] == name
    container = pod["containers"][0]
    command = container["command"]
    assert command[command.index("--master-addr") + 1] == f"{name}-0.{name}"
    assert command[command.index("--node-rank") + 1] == "$(NODE_RANK)"
    assert command[command.index("--strategy") + 1] == "hsdp=2x8,bf16"
    assert container["resources"] == {"limits": {"nvidia.com/gpu": 8}}


def test_dp_is_one_process() -> None:
    text = export(request("dp", 4, job="job.py"), "slurm").text
    assert "--nproc-per-node 1 " in text
    assert "--gpus-per-node=4" in text


def test_ray_scripts_start_the_job() -> None:
    request = ExportRequest(strategy=Strategy.parse("fsdp=16,bf16"), ranks=16, nodes=2, job="jobs/my job.py")
    text = export(request, "ray").text
    assert subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True).returncode == 0
    command = shlex.split(text.split("ray job submit", 1)[1].replace("\\\n", " "))
    assert command[:4] == ["--address", "${RAY_ADDRESS:-http://127.0.0.1:8265}", "--working-dir", "."]
    assert command[command.index("--") + 1 :][:5] == ["python", "-m", "meshwright", "train", "jobs/my job.py"]
    assert "--on ray --device cuda --out runs/my-job --resume" in text


def test_kuberay_has_a_worker_per_node() -> None:
    request = ExportRequest(strategy=Strategy.parse("fsdp=16,bf16"), ranks=16, nodes=2, job="job.py")
    job = yaml.safe_load(export(request, "kuberay").text)
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    (workers,) = job["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    assert workers["replicas"] == 2
    (container,) = workers["template"]["spec"]["containers"]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 8}
    assert shlex.split(job["spec"]["entrypoint"])[5:9] == ["--strategy", "fsdp=16,bf16", "--ranks", "16"]
