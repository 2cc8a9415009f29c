"""Files that start `torchrun -m meshwright train` on somebody's machines: Slurm's and Kubernetes'."""

from __future__ import annotations

import re
import shlex
from typing import Any

import yaml

from meshwright.exchange.comments import comments
from meshwright.exchange.errors import ExchangeError
from meshwright.exchange.export_request import Exported, ExportRequest

PORT = 29500
RESTARTS = 4
"""torchrun's ranks may need two attempts for each restart (docs/launching.md)."""
IMAGE = "IMAGE"
"""What the user replaces: no image of ours exists."""

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
    _need_job(request, "slurm")
    remarks = (
        f"sbatch FILE. {OPTIONS} Slurm's TERM, two minutes before the end, saves and stops the run, and sbatch again "
        "goes on with it.",
    )
    text = _SLURM.format(
        comments=comments(request, (), remarks),
        name=_name(request),
        nodes=request.nodes,
        devices=f"#SBATCH --gpus-per-node={request.per_node}\n" if request.device == "cuda" else "",
        processes=_processes(request),
        restarts=RESTARTS,
        port=PORT,
        train=" ".join(shlex.quote(word) for word in _train(request, "runs")),
    )
    return _exported("slurm", text, request)


def write_kubernetes(request: ExportRequest) -> Exported:
    """An indexed Job with a headless Service, which need no operator."""
    _need_job(request, "kubernetes")
    remarks = (
        f"Replace {IMAGE} by an image that holds PyTorch, meshwright and the job, and `run` by a volume that all nodes "
        f"share, if there are several. kubectl apply -f FILE. {OPTIONS}",
    )
    documents = [_service(request), _job(request)]
    text = comments(request, (), remarks) + yaml.safe_dump_all(documents, sort_keys=False, width=1000)
    return _exported("kubernetes", text, request)


def _exported(to: str, text: str, request: ExportRequest) -> Exported:
    return Exported(to=to, text=text, request=request, strategy=request.strategy, without_equal=())


def _need_job(request: ExportRequest, to: str) -> None:
    if not request.job:
        raise ExchangeError(f"--to {to} writes a file that trains a job, and none was named; give it with --job.")
    if request.strategy.traits.many_devices and request.nodes > 1:
        raise ExchangeError(f"{request.strategy} runs in one process, but there are {request.nodes} nodes; name ddp.")


def _processes(request: ExportRequest) -> int:
    """Of a node: one a device, except where one process computes on all of them."""
    return 1 if request.strategy.traits.many_devices else request.per_node


def _train(request: ExportRequest, runs: str) -> list[str]:
    """What torchrun runs. A run that is there already is gone on with, since both launchers start files again."""
    device = ["--device", "cpu"] if request.device == "cpu" else []
    out = ["--out", f"{runs}/{_name(request)}", "--resume"]
    return ["-m", "meshwright", "train", request.job, "--strategy", str(request.strategy), *device, *out]


def _name(request: ExportRequest) -> str:
    """The job's name as both Slurm and Kubernetes take it: lower-case letters, digits and dashes, at most 50."""
    stem = re.sub(r"\.py\b.*$", "", request.job.rsplit("/", 1)[-1])
    return re.sub(r"[^a-z0-9]+", "-", stem.lower()).strip("-")[:50].strip("-") or "train"


def _service(request: ExportRequest) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": _name(request)},
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,  # ranks meet before their pods count as ready
            "selector": {"job-name": _name(request)},
            "ports": [{"name": "rendezvous", "port": PORT}],
        },
    }


def _job(request: ExportRequest) -> dict[str, Any]:
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": _name(request)},
        "spec": {
            "completionMode": "Indexed",
            "completions": request.nodes,
            "parallelism": request.nodes,
            "backoffLimit": RESTARTS * request.nodes,
            "template": {
                "spec": {
                    "subdomain": _name(request),
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
    """Where the nodes find each other: the first pod of an indexed Job has a name that is known beforehand."""
    return [
        *("--nnodes", str(request.nodes), "--nproc-per-node", str(_processes(request))),
        *("--node-rank", "$(NODE_RANK)", "--max-restarts", str(RESTARTS)),
        *("--master-addr", f"{_name(request)}-0.{_name(request)}", "--master-port", str(PORT)),
    ]
