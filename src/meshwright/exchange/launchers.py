"""Write launch files that run `torchrun -m meshwright train` under Slurm or Kubernetes."""

from __future__ import annotations

import re
import shlex
from typing import Any

import yaml

from meshwright.errors import ExchangeError
from meshwright.exchange.export_request import Exported, ExportRequest, comments

PORT = 29500
RESTARTS = 4
"""torchrun may need two attempts for each restart (docs/launching.md)."""
IMAGE = "IMAGE"
"""Placeholder for the user's image; Meshwright publishes none."""

OPTIONS = "Steps, saving and the rest are options of meshwright train: add them at the end."

_SLURM = """#!/bin/bash
{comments}#SBATCH --job-name={name}
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node=1
{devices}#SBATCH --signal=TERM@120

set -euo pipefail
mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")

srun --kill-on-bad-exit=1 torchrun \\
    --nnodes "$SLURM_JOB_NUM_NODES" --nproc-per-node {processes} --max-restarts {restarts} \\
    --rdzv-id "$SLURM_JOB_ID" --rdzv-backend c10d --rdzv-endpoint "${{hosts[0]}}:{port}" \\
    {train}
"""


def write_slurm(request: ExportRequest) -> Exported:
    """A batch file for `sbatch`."""
    need_job(request, "slurm")
    remarks = (
        f"sbatch FILE. {OPTIONS} Slurm's TERM, two minutes before the end, saves and stops the run; sbatch resumes it.",
    )
    text = _SLURM.format(
        comments=comments(request, (), remarks),
        name=job_name(request),
        nodes=request.nodes,
        devices=f"#SBATCH --gpus-per-node={request.per_node}\n" if request.device == "cuda" else "",
        processes=_processes(request),
        restarts=RESTARTS,
        port=PORT,
        train=" ".join(shlex.quote(word) for word in _train(request, "runs")),
    )
    return _exported("slurm", text, request)


def write_kubernetes(request: ExportRequest) -> Exported:
    """An indexed Job with a headless Service; no operator is needed."""
    need_job(request, "kubernetes")
    remarks = (
        f"Replace {IMAGE} by an image with PyTorch, meshwright and the job, and `run` by a shared volume if there are "
        f"several nodes. kubectl apply -f FILE. {OPTIONS}",
    )
    documents = [_service(request), _job(request)]
    text = comments(request, (), remarks) + yaml.safe_dump_all(documents, sort_keys=False, width=1000)
    return _exported("kubernetes", text, request)


def _exported(to: str, text: str, request: ExportRequest) -> Exported:
    return Exported(to=to, text=text, request=request, strategy=request.strategy, without_equal=())


def need_job(request: ExportRequest, to: str) -> None:
    if not request.job:
        raise ExchangeError(f"--to {to} writes a file that trains a job, but none was given; add --job.")
    if request.strategy.traits.many_devices and request.nodes > 1:
        raise ExchangeError(f"{request.strategy} runs in one process, but there are {request.nodes} nodes; name ddp.")


def _processes(request: ExportRequest) -> int:
    """Processes per node: one per device, unless one process computes on all of them."""
    return 1 if request.strategy.traits.many_devices else request.per_node


def _train(request: ExportRequest, runs: str) -> list[str]:
    """The arguments of torchrun. They resume an existing run, because both launchers restart files."""
    device = ["--device", "cpu"] if request.device == "cpu" else []
    out = ["--out", f"{runs}/{job_name(request)}", "--resume"]
    return ["-m", "meshwright", "train", request.job, "--strategy", str(request.strategy), *device, *out]


def job_name(request: ExportRequest) -> str:
    """The job's name in a form that Slurm and Kubernetes accept: lower-case letters, digits and dashes, at most 50."""
    stem = re.sub(r"\.py\b.*$", "", request.job.rsplit("/", 1)[-1])
    return re.sub(r"[^a-z0-9]+", "-", stem.lower()).strip("-")[:50].strip("-") or "train"


def _service(request: ExportRequest) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": job_name(request)},
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,  # ranks meet before their pods count as ready
            "selector": {"job-name": job_name(request)},
            "ports": [{"name": "rendezvous", "port": PORT}],
        },
    }


def _job(request: ExportRequest) -> dict[str, Any]:
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": job_name(request)},
        "spec": {
            "completionMode": "Indexed",
            "completions": request.nodes,
            "parallelism": request.nodes,
            "backoffLimit": RESTARTS * request.nodes,
            "template": {
                "spec": {
                    "subdomain": job_name(request),
                    "restartPolicy": "Never",
                    "terminationGracePeriodSeconds": 120,
                    "containers": [_container(request)],
                    "volumes": [
                        {"name": "shm", "emptyDir": {"medium": "Memory"}},
                        {"name": "run", "emptyDir": {}},
                    ],
                },
            },
        },
    }


def _container(request: ExportRequest) -> dict[str, Any]:
    index = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    container: dict[str, Any] = {
        "name": "train",
        "image": IMAGE,
        "command": ["torchrun", *_meeting(request), *_train(request, "/runs")],
        "env": [{"name": "NODE_RANK", "valueFrom": {"fieldRef": {"fieldPath": index}}}],
        "ports": [{"containerPort": PORT}],
        "volumeMounts": [
            {"name": "shm", "mountPath": "/dev/shm"},
            {"name": "run", "mountPath": "/runs"},
        ],
    }
    if request.device == "cuda":
        container["resources"] = {"limits": {"nvidia.com/gpu": request.per_node}}
    return container


def _meeting(request: ExportRequest) -> list[str]:
    """The rendezvous: the first pod of an indexed Job has a predictable name."""
    return [
        *("--nnodes", str(request.nodes), "--nproc-per-node", str(_processes(request))),
        *("--node-rank", "$(NODE_RANK)", "--max-restarts", str(RESTARTS)),
        *("--master-addr", f"{job_name(request)}-0.{job_name(request)}", "--master-port", str(PORT)),
    ]
