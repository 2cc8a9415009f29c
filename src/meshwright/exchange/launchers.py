"""Files that start `torchrun -m meshwright train` on somebody's machines: Slurm's and Kubernetes'."""

from __future__ import annotations

import re
import shlex
from typing import Any

import yaml

from meshwright.exchange.comments import comments
from meshwright.exchange.errors import ExchangeError
from meshwright.exchange.subject import Exported, Subject

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


def write_slurm(subject: Subject) -> Exported:
    """A batch file for `sbatch`."""
    _need_job(subject, "slurm")
    remarks = (
        f"sbatch FILE. {OPTIONS} Slurm's TERM, two minutes before the end, saves and stops the run, and sbatch again "
        "goes on with it.",
    )
    text = _SLURM.format(
        comments=comments(subject, (), remarks),
        name=_name(subject),
        nodes=subject.nodes,
        devices=f"#SBATCH --gpus-per-node={subject.per_node}\n" if subject.device == "cuda" else "",
        processes=_processes(subject),
        restarts=RESTARTS,
        port=PORT,
        train=" ".join(shlex.quote(word) for word in _train(subject, "runs")),
    )
    return _exported("slurm", text, subject)


def write_kubernetes(subject: Subject) -> Exported:
    """An indexed Job with a headless Service, which need no operator."""
    _need_job(subject, "kubernetes")
    remarks = (
        f"Replace {IMAGE} by an image that holds PyTorch, meshwright and the job, and `run` by a volume that all nodes "
        f"share, if there are several. kubectl apply -f FILE. {OPTIONS}",
    )
    documents = [_service(subject), _job(subject)]
    text = comments(subject, (), remarks) + yaml.safe_dump_all(documents, sort_keys=False, width=1000)
    return _exported("kubernetes", text, subject)


def _exported(to: str, text: str, subject: Subject) -> Exported:
    return Exported(to=to, text=text, subject=subject, strategy=subject.strategy, without_equal=())


def _need_job(subject: Subject, to: str) -> None:
    if not subject.job:
        raise ExchangeError(f"--to {to} writes a file that trains a job, and none was named; give it with --job.")
    if subject.strategy.traits.many_devices and subject.nodes > 1:
        raise ExchangeError(f"{subject.strategy} runs in one process, but there are {subject.nodes} nodes; name ddp.")


def _processes(subject: Subject) -> int:
    """Of a node: one a device, except where one process computes on all of them."""
    return 1 if subject.strategy.traits.many_devices else subject.per_node


def _train(subject: Subject, runs: str) -> list[str]:
    """What torchrun runs. A run that is there already is gone on with, since both launchers start files again."""
    device = ["--device", "cpu"] if subject.device == "cpu" else []
    out = ["--out", f"{runs}/{_name(subject)}", "--resume"]
    return ["-m", "meshwright", "train", subject.job, "--strategy", str(subject.strategy), *device, *out]


def _name(subject: Subject) -> str:
    """The job's name as both Slurm and Kubernetes take it: lower-case letters, digits and dashes, at most 50."""
    stem = re.sub(r"\.py\b.*$", "", subject.job.rsplit("/", 1)[-1])
    return re.sub(r"[^a-z0-9]+", "-", stem.lower()).strip("-")[:50].strip("-") or "train"


def _service(subject: Subject) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": _name(subject)},
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,  # ranks meet before their pods count as ready
            "selector": {"job-name": _name(subject)},
            "ports": [{"name": "rendezvous", "port": PORT}],
        },
    }


def _job(subject: Subject) -> dict[str, Any]:
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": _name(subject)},
        "spec": {
            "completionMode": "Indexed",
            "completions": subject.nodes,
            "parallelism": subject.nodes,
            "backoffLimit": RESTARTS * subject.nodes,
            "template": {
                "spec": {
                    "subdomain": _name(subject),
                    "restartPolicy": "Never",
                    "terminationGracePeriodSeconds": 120,
                    "containers": [_container(subject)],
                    "volumes": [
                        {"name": "shm", "emptyDir": {"medium": "Memory"}},
                        {"name": "run", "emptyDir": {}},
                    ],
                },
            },
        },
    }


def _container(subject: Subject) -> dict[str, Any]:
    index = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    container: dict[str, Any] = {
        "name": "train",
        "image": IMAGE,
        "command": ["torchrun", *_meeting(subject), *_train(subject, "/runs")],
        "env": [{"name": "NODE_RANK", "valueFrom": {"fieldRef": {"fieldPath": index}}}],
        "ports": [{"containerPort": PORT}],
        "volumeMounts": [
            {"name": "shm", "mountPath": "/dev/shm"},
            {"name": "run", "mountPath": "/runs"},
        ],
    }
    if subject.device == "cuda":
        container["resources"] = {"limits": {"nvidia.com/gpu": subject.per_node}}
    return container


def _meeting(subject: Subject) -> list[str]:
    """Where the nodes find each other: the first pod of an indexed Job has a name that is known beforehand."""
    return [
        *("--nnodes", str(subject.nodes), "--nproc-per-node", str(_processes(subject))),
        *("--node-rank", "$(NODE_RANK)", "--max-restarts", str(RESTARTS)),
        *("--master-addr", f"{_name(subject)}-0.{_name(subject)}", "--master-port", str(PORT)),
    ]
