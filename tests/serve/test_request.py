"""Requests as values: what is read, what is refused, and the command that each comes to."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from meshwright.errors import BadInput, ClusterError, JobError
from meshwright.serve.errors import Forbidden, RequestError
from meshwright.serve.models import Models
from meshwright.serve.request import PlanRequest, read_json, read_request

PLAIN = {"model": "preset:llama3-8b", "device": "H100-80GB"}
MODELS = Models(folder=Path("nowhere"))


def test_what_is_not_said_is_as_plan_has_it() -> None:
    request = read_request(PLAIN, MODELS)
    assert request.command == "meshwright plan preset:llama3-8b --on 8xH100-80GB --fast"


def test_every_knob_stands_in_the_command() -> None:
    turned = PLAIN | {"devices": 4, "nodes": 2, "gbps": 400, "link": "roce", "batch": 64, "seq": 4096}
    turned |= {"precision": ["fp16", "fp32"], "ac": ["full", "none"], "offload": ["none"], "compile": True}
    command = read_request(turned | {"tensor": False, "pipeline": False}, MODELS).command
    assert command == (
        "meshwright plan preset:llama3-8b:seq=4096 --on 2x4xH100-80GB@400Gbps:roce --fast --batch 64 "
        "--precision fp32,fp16 --ac none,full --offload none --compile --no-tensor --no-pipeline"
    )


def test_a_path_with_spaces_is_quoted(tmp_path: Path) -> None:
    (tmp_path / "my model").mkdir()
    (tmp_path / "my model" / "config.json").write_text('{"model_type": "gpt2"}')
    request = read_request(PLAIN | {"model": "hf:my model/config.json"}, Models(folder=tmp_path))
    assert shlex.split(request.command)[2] == f"hf:{tmp_path}/my model/config.json"


def test_what_the_planning_process_is_told_reads_back() -> None:
    request = read_request(PLAIN | {"gbps": 0.1, "nodes": 3, "ac": ["full"], "seq": 77}, MODELS)
    assert PlanRequest.from_json(json.loads(json.dumps(request.to_json()))) == request


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"model": "preset:llama3-9b"}, JobError, "Did you mean preset:llama3-8b"),
        ({"model": "examples/gpt.py"}, BadInput, "must be named when the server starts"),
        ({"model": "job"}, BadInput, "This page cannot plan the model 'job'"),
        ({"model": "hf:../config.json"}, Forbidden, "inside the served folder"),
        ({"device": "H100-80G"}, BadInput, "did you mean H100-80GB"),
        ({"device": "cluster.json"}, BadInput, "not in the catalogue"),
        ({"device": "local"}, BadInput, "not in the catalogue"),
        ({"link": "roce"}, ClusterError, "no speed"),
        ({"gbps": 5, "link": "string"}, ClusterError, "kind 'string'"),
        ({"nodes": 2048, "devices": 64}, BadInput, "up to 16384 devices"),
        ({"ac": []}, RequestError, "one or more of none, selective, full"),
        ({"batch": True}, RequestError, "integer from 1"),
        ({"batch": 1.0}, RequestError, "integer from 1"),
        ({"model": "preset:resnet-50", "seq": 8}, BadInput, "which defines its own samples"),
        ({"stratgy": "x"}, RequestError, "no key 'stratgy'"),
    ],
)
def test_what_is_wrong_is_named(change: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        read_request(PLAIN | change, MODELS)


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'"x"', b'{"a": NaN}', b'{"a": 1, "a": 2}', b"\xff", b"[" * 9000])
def test_a_body_that_is_no_object_is_refused(body: bytes) -> None:
    with pytest.raises(RequestError, match="The request's body"):
        read_json(body)


def test_a_config_is_read_from_where_it_was_found(tmp_path: Path) -> None:
    """A link inside the folder is followed once; what is loaded is what was checked."""
    (tmp_path / "real.json").write_text('{"model_type": "gpt2"}')
    (tmp_path / "alias.json").symlink_to(tmp_path / "real.json")
    model = Models(folder=tmp_path).find("hf:alias.json")
    assert model.source == f"hf:{(tmp_path / 'real.json').resolve()}"


def test_configs_are_listed_and_links_are_not(tmp_path: Path) -> None:
    for name, text in {"a": '{"model_type": "gpt2"}', "b": "{}", ".hidden": '{"model_type": "gpt2"}'}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(text)
    (tmp_path / "config.json").symlink_to(tmp_path / "a" / "config.json")
    assert Models(folder=tmp_path).configs() == ["a/config.json"]
