"""A run whose checkpoints are in an S3-like store: killed in the middle, its node lost, resumed from the store."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from checkpoint_contents import weights_after
from meshwright.checkpoint.manifest import DIGESTS
from meshwright.checkpoint.object_store import ObjectStore

JOB = Path(__file__).parents[1] / "ray_job.py"
STEPS, LIMIT_SECONDS = 20, 240
FILE = "rank-00000.safetensors"


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectStore]:
    pytest.importorskip("s3fs", reason="s3fs is not installed: pip install 'meshwright[store]'")
    server = pytest.importorskip("moto.server", reason="moto is not installed: pip install 'moto[server]'")
    running = server.ThreadedMotoServer(port=0)
    running.start()
    host, port = running.get_host_and_port()
    for name, value in {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)
    import boto3

    boto3.client("s3").create_bucket(Bucket="bucket")
    yield ObjectStore("s3://bucket/run")
    running.stop()


def start(out: Path, *words: object, job: str = "job") -> subprocess.Popen[str]:
    options = ("--steps", STEPS, "--save-every", 5, "--device", "cpu", "--out", out, *words)
    command = [sys.executable, "-m", "meshwright", "train", f"{JOB}:{job}", *map(str, options)]
    return subprocess.Popen(command, start_new_session=True, text=True, stderr=subprocess.PIPE)


def finish(run: subprocess.Popen[str]) -> str:
    told = run.communicate(timeout=LIMIT_SECONDS)[1]
    assert run.returncode == 0, told
    return told


@pytest.mark.slow
def test_killed_and_resumed(store: ObjectStore, tmp_path: Path) -> None:
    ranks = ("--strategy", "fsdp", "--ranks", 2, "--store", store.url)
    killed = start(tmp_path / "lost", *ranks, job="slow")
    deadline = time.monotonic() + LIMIT_SECONDS
    while not store.complete():
        assert killed.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.communicate()
    assert store.complete()[-1] < f"step-{STEPS:08d}"

    told = finish(start(tmp_path / "second", *ranks, "--resume"))  # on a node that has nothing
    assert "resumed at step" in told
    finish(start(tmp_path / "alone", "--strategy", "single"))
    resumed, alone = (weights_after(STEPS, tmp_path / name) for name in ("second", "alone"))
    torch.testing.assert_close(resumed, alone, rtol=1e-4, atol=1e-5)

    newest = store.complete()[-1]
    spoilt = bytearray(store._files.cat_file(f"{store._root}/{newest}/{FILE}"))
    spoilt[-5] ^= 1
    store._files.pipe_file(f"{store._root}/{newest}/{FILE}", bytes(spoilt))
    told = finish(start(tmp_path / "third", *ranks, "--resume"))
    assert f"The checkpoint {store.url}/{newest} is damaged: {FILE}" in told
    assert "resumed at step 15" in told
    assert DIGESTS in store.files_of(newest)  # saved anew
