"""What a visitor gets: the ranking that the command line gives; and what the server does at its limits."""

from __future__ import annotations

import asyncio
import json
import shlex
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from meshwright.cli.main import app
from meshwright.errors import BadInput, JobError
from meshwright.serve import planner_queue
from meshwright.serve.errors import Busy
from meshwright.serve.models import Models
from meshwright.serve.planner_queue import Answer, Answers, PlannerQueue
from meshwright.serve.request import read_request
from meshwright.serve.server import make_models, open_socket
from serve_address import Address

PLAIN = {"model": "preset:gpt2", "device": "A100-40GB"}
TURNED = PLAIN | {
    "devices": 4,
    "batch": 64,
    "seq": 512,
    "ac": ["none"],
    "pipeline": False,
    "precision": ["fp32", "bf16"],
}


def strategies(document: dict[str, Any]) -> list[tuple[str, float]]:
    return [(plan["strategy"], plan["step_ms"]) for plan in document["plans"]]


CONFIG = {"model": "hf:tiny/config.json", "device": "T4", "precision": ["fp16"]}


@pytest.mark.parametrize("value", [TURNED, pytest.param(CONFIG, marks=pytest.mark.thorough)])
def test_the_command_gives_the_same_ranking(address: Address, value: dict[str, Any]) -> None:
    status, answer = address.ask(value)
    assert status == 200, answer
    words = shlex.split(answer["command"])
    assert words[:2] == ["meshwright", "plan"]
    document = json.loads(CliRunner().invoke(app, [*words[1:], "--json"]).stdout)
    assert strategies(document) == strategies(answer)
    assert len(answer["plans"]) > 1


def test_the_job_of_the_command_line_may_be_planned(address: Address) -> None:
    status, answer = address.ask({"model": "job", "device": "A100-40GB", "devices": 2})
    assert status == 200, answer
    assert answer["job"].endswith("gpt.py") and answer["plans"]


def test_where_nothing_fits_it_says_what_would(address: Address) -> None:
    status, answer = address.ask({"model": "preset:gpt2-xl", "device": "L4", "devices": 1, "offload": ["none"]})
    assert status == 200, answer
    assert answer["plans"] == [] and "No strategy fits" in answer["html"] and answer["advice"]


@pytest.mark.slow
def test_a_config_that_was_changed_is_read_again(address: Address) -> None:
    file = address.folder / "tiny" / "config.json"
    value = CONFIG | {"devices": 1}
    before = address.ask(value)[1]["plans"][0]["peak_gib"]
    file.write_text(json.dumps(json.loads(file.read_text()) | {"n_layer": 8}))
    assert address.ask(value)[1]["plans"][0]["peak_gib"] > before


def answer_within(limit: float, program: str, monkeypatch: pytest.MonkeyPatch, times: int = 1) -> list[str]:
    """What a desk says whose planning process is another program."""

    async def start() -> asyncio.subprocess.Process:
        pipe = asyncio.subprocess.PIPE
        return await asyncio.create_subprocess_exec(sys.executable, "-c", program, stdin=pipe, stdout=pipe)

    async def here() -> bool:
        return False

    async def ask() -> list[str]:
        queue, said = PlannerQueue(limit=limit), []
        for _ in range(times):
            try:
                said.append((await queue.ask(request, here)).body.decode())
            except Busy as error:
                said.append(str(error))
        await queue.close()
        return said

    monkeypatch.setattr(planner_queue, "_start", start)
    request = read_request(PLAIN, Models(folder=Path()))
    return asyncio.run(ask())


def test_a_question_without_end_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    (said,) = answer_within(0.2, "import time; time.sleep(60)", monkeypatch)
    assert "took longer than 0 s and was stopped" in said


def test_a_process_that_dies_is_started_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    been = str(tmp_path / "been")
    once = (
        f"import pathlib, sys; been = pathlib.Path({been!r}); first = not been.exists(); been.touch()\n"
        "sys.stdin.readline(); first and sys.exit(3); print('{\"answer\": 7}', flush=True)"
    )
    first, second = answer_within(20, once, monkeypatch, times=2)
    assert "ended before it answered" in first
    assert second == "7"


def test_answers_are_kept_up_to_so_many_bytes() -> None:
    models, answers = Models(folder=Path()), Answers(most=25)
    requests = [read_request(PLAIN | {"batch": size}, models) for size in (1, 2, 3)]
    for request in requests[:2]:
        answers.put(request, Answer(status=200, body=b"x" * 10))
    assert answers.get(requests[0]) is not None
    answers.put(requests[2], Answer(status=200, body=b"x" * 10))
    assert [answers.get(request) is not None for request in requests] == [True, False, True]


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.0.1", "example.org", ""])
def test_other_addresses_are_refused(host: str) -> None:
    with pytest.raises(BadInput, match="has no login"):
        open_socket(host, 0)


def test_a_port_that_is_taken_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(BadInput, match=f"Cannot listen on 127.0.0.1 port {port}"):
            open_socket("127.0.0.1", port)


def test_what_is_served_is_checked_before_anybody_visits(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="is not a folder"):
        make_models(job="", folder=tmp_path / "gone")
    with pytest.raises(JobError, match="There is no job file"):
        make_models(job="gone.py", folder=tmp_path)
