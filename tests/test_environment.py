"""Who started this process is read from its environment alone."""

import ast
import os
from pathlib import Path

import pytest

from meshwright.environment import (
    LaunchedRank,
    announce,
    environment_for_ranks,
    first_host,
    launched,
    own_rank,
    restart_count,
)

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "head",
    "MASTER_PORT": "29500",
}
SLURM = {
    "SLURM_JOB_ID": "1234567",
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    "SLURM_STEP_NODELIST": "node[03-04]",
}


def without(environment: dict[str, str], *keys: str) -> dict[str, str]:
    return {key: value for key, value in environment.items() if key not in keys}


def test_torchrun() -> None:
    assert launched(TORCHRUN) == LaunchedRank(rank=5, ranks=8, local_rank=1, local_ranks=4)


def test_kubernetes() -> None:
    """A PyTorchJob runs one process a pod and says nothing of local ranks."""
    environment = without(TORCHRUN, "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    assert launched(environment) == LaunchedRank(rank=5, ranks=8, local_rank=0, local_ranks=1)


def test_torchrun_inside_of_slurm() -> None:
    """The inner launcher is the one that counts."""
    assert launched(SLURM | TORCHRUN) == launched(TORCHRUN)


def test_slurm() -> None:
    assert launched(SLURM) == LaunchedRank(
        rank=5, ranks=8, local_rank=1, local_ranks=4, meeting_point=("node03", 20000 + 4567)
    )


def test_slurm_ranks_agree_on_where_to_meet() -> None:
    places = [launched(SLURM | {"SLURM_PROCID": str(rank)}) for rank in range(8)]
    assert len({place.meeting_point for place in places if place}) == 1


def test_slurm_with_a_meeting_point_of_the_user() -> None:
    place = launched(SLURM | {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "4000"})
    assert place is not None
    assert place.meeting_point == ("10.0.0.1", 4000)


def test_slurm_on_one_node() -> None:
    place = launched(without(SLURM, "SLURM_STEP_TASKS_PER_NODE", "SLURM_JOB_ID"))
    assert place is not None
    assert place.local_ranks == 8
    assert place.meeting_point == ("node03", 20000)


@pytest.mark.parametrize(
    "environment",
    [{}, without(TORCHRUN, "RANK"), without(TORCHRUN, "MASTER_ADDR"), without(SLURM, "SLURM_STEP_NODELIST")],
)
def test_nobody(environment: dict[str, str]) -> None:
    """Also inside of a Slurm allocation, but outside of srun."""
    assert launched(environment) is None


@pytest.mark.parametrize(
    ("nodes", "host"),
    [
        ("node03", "node03"),
        ("node03,node04", "node03"),
        ("node[03-07,12],other", "node03"),
        ("gpu-a[1,3]", "gpu-a1"),
        ("other,node[03-07]", "other"),
        ("queue-dy-p4-[1-2]", "queue-dy-p4-1"),
        ("10.0.0.7", "10.0.0.7"),
        ("node[1-2]-ib", "node1-ib"),
        ("rack[1-2]node[3-4]", "rack1node3"),
    ],
)
def test_first_host(nodes: str, host: str) -> None:
    assert first_host(nodes) == host


def test_announce_tells_torch_where_to_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    for key in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(key, "")
        monkeypatch.delenv(key)
    place = launched(SLURM)
    assert place is not None
    announce(place)
    assert (os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]) == ("node03", "24567")


def test_announce_leaves_torchrun_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "head")
    place = launched(TORCHRUN)
    assert place is not None
    announce(place)
    assert os.environ["MASTER_ADDR"] == "head"


def test_own_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("SLURM_PROCID", raising=False)
    assert own_rank() == 0
    monkeypatch.setenv("SLURM_PROCID", "3")
    assert own_rank() == 3
    monkeypatch.setenv("RANK", "2")
    assert own_rank() == 2


def test_restart_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_RESTART_COUNT", raising=False)
    assert restart_count() == 0
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "2")
    assert restart_count() == 2
    monkeypatch.setenv("MESHWRIGHT_ATTEMPT", "3")  # also counts restarts for which torch has another number
    assert restart_count() == 3


@pytest.mark.parametrize("threads", [None, "3"])
def test_the_environment_is_put_back(monkeypatch: pytest.MonkeyPatch, threads: str | None) -> None:
    if threads is None:
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    else:
        monkeypatch.setenv("OMP_NUM_THREADS", threads)
    before = dict(os.environ)
    with pytest.raises(RuntimeError), environment_for_ranks(10_000, "folder", ending=("SIGINT", "SIGHUP")):
        assert os.environ["OMP_NUM_THREADS"] == (threads or "1")
        added = {"OMP_NUM_THREADS", "MESHWRIGHT_FOLDER", "TORCHELASTIC_SIGNALS_TO_HANDLE"}
        added |= {"GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"}
        added |= {"MESHWRIGHT_ATTEMPT", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"}
        assert set(os.environ) - set(before) <= added
        assert os.environ["MESHWRIGHT_FOLDER"] == "folder"
        assert os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] == "SIGINT,SIGHUP"
        raise RuntimeError
    assert dict(os.environ) == before


PACKAGE = Path(__file__).parents[1] / "src" / "meshwright"
ACCESS = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}


def accesses(source: str) -> list[int]:
    """The lines that reach for the environment through `os`."""
    nodes = list(ast.walk(ast.parse(source)))
    used = [node.lineno for node in nodes if isinstance(node, ast.Attribute) and node.attr in ACCESS]
    imported = (node for node in nodes if isinstance(node, ast.ImportFrom) and node.module in ("os", "posix"))
    return used + [node.lineno for node in imported if ACCESS & {alias.name for alias in node.names}]


def test_no_other_file_touches_the_environment() -> None:
    found = {str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py") if accesses(path.read_text())}
    assert found == {"environment.py"}


@pytest.mark.parametrize(
    "source",
    [
        "import os\nos.environ['X'] = '1'",
        "import os as system\nsystem.getenv('X')",
        "from os import environ as settings",
        "from os import path, getenv",
    ],
)
def test_an_access_is_found(source: str) -> None:
    assert accesses(source)
    assert not accesses("import os\nfrom os import path\nos.getpid()\nenviron = 1")
