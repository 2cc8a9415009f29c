"""Write a strategy as a job for a Ray cluster: a line for `ray job submit`, and a RayJob for KubeRay."""

from __future__ import annotations

import shlex
from typing import Any

import yaml

from meshwright.exchange.export_request import Exported, ExportRequest, comments
from meshwright.exchange.launchers import IMAGE, OPTIONS, job_name, need_job

VERSION = "2.60.0"
"""The Ray that this was tried with; the image must have the same one."""

_SUBMIT = """#!/bin/bash
{comments}set -euo pipefail

ray job submit --address "${{RAY_ADDRESS:-http://127.0.0.1:8265}}" --working-dir . -- \\
    {train}
"""


def write_ray(request: ExportRequest) -> Exported:
    """A script that submits the job to a running cluster."""
    need_job(request, "ray")
    remarks = (
        f"bash FILE, in the folder with the job; RAY_ADDRESS is the cluster's. {OPTIONS} The nodes need "
        "meshwright[ray], and `runs` must be a folder that all of them share, or add --store s3://BUCKET/RUN.",
    )
    text = _SUBMIT.format(comments=comments(request, (), remarks), train=shlex.join(_train(request, "runs")))
    return _exported("ray", text, request)


def write_kuberay(request: ExportRequest) -> Exported:
    """A RayJob: KubeRay makes the cluster, runs the job in it and removes it."""
    need_job(request, "kuberay")
    remarks = (
        f"Replace {IMAGE} by an image with Ray {VERSION}, meshwright[ray] and the job, and `run` by a volume that all "
        f"pods share. kubectl apply -f FILE. {OPTIONS}",
    )
    text = comments(request, (), remarks) + yaml.safe_dump(_ray_job(request), sort_keys=False, width=1000)
    return _exported("kuberay", text, request)


def _exported(to: str, text: str, request: ExportRequest) -> Exported:
    return Exported(to=to, text=text, request=request, strategy=request.strategy, without_equal=())


def _train(request: ExportRequest, runs: str) -> list[str]:
    """The command of the driver, which asks Ray for one worker per device."""
    return [
        *("python", "-m", "meshwright", "train", request.job, "--strategy", str(request.strategy)),
        *("--ranks", str(request.ranks), "--on", "ray", "--device", request.device),
        *("--out", f"{runs}/{job_name(request)}", "--resume"),
    ]


def _ray_job(request: ExportRequest) -> dict[str, Any]:
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayJob",
        "metadata": {"name": job_name(request)},
        "spec": {
            "entrypoint": shlex.join(_train(request, "/runs")),
            "shutdownAfterJobFinishes": True,
            "rayClusterSpec": {
                "rayVersion": VERSION,
                "headGroupSpec": {
                    "rayStartParams": {"num-cpus": "0"},  # no ranks on the head
                    "template": _pod(request, "ray-head", devices=0),
                },
                "workerGroupSpecs": [
                    {
                        "groupName": "ranks",
                        "replicas": request.nodes,
                        "minReplicas": request.nodes,
                        "maxReplicas": request.nodes,
                        "rayStartParams": {},
                        "template": _pod(request, "ray-worker", devices=request.per_node),
                    }
                ],
            },
        },
    }


def _pod(request: ExportRequest, name: str, *, devices: int) -> dict[str, Any]:
    container: dict[str, Any] = {
        "name": name,
        "image": IMAGE,
        "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}, {"name": "run", "mountPath": "/runs"}],
    }
    if devices:
        kind = "nvidia.com/gpu" if request.device == "cuda" else "cpu"
        container["resources"] = {"limits": {kind: devices}, "requests": {kind: devices}}
    volumes = [{"name": "shm", "emptyDir": {"medium": "Memory"}}, {"name": "run", "emptyDir": {}}]
    return {"spec": {"containers": [container], "volumes": volumes}}
