"""Requests that are wrong or mean harm: each gets a clean refusal, and the server goes on."""

from __future__ import annotations

import json
import socket
from http.client import HTTPConnection
from typing import Any

import pytest

from serve_address import Address

PLAIN = {"model": "preset:gpt2", "device": "A100-40GB"}
DEEP = b'{"model": ' + b"[" * 8000 + b"]" * 8000 + b"}"

BODIES: dict[str, tuple[int, bytes]] = {
    "nothing": (400, b""),
    "no JSON": (400, b"model=preset:gpt2"),
    "half an object": (400, b'{"model": "preset:gpt2"'),
    "a list": (400, b"[]"),
    "null": (400, b"null"),
    "no UTF-8": (400, b'{"model": "\xff\xfe"}'),
    "a number that is none": (400, b'{"model": "preset:gpt2", "device": "A100-40GB", "gbps": Infinity}'),
    "a number of 6,000 digits": (400, b'{"batch": ' + b"9" * 6000 + b"}"),
    "a key twice": (400, b'{"model": "preset:gpt2", "model": "job", "device": "A100-40GB"}'),
    "nested without end": (400, DEEP),
    "larger than any": (413, b'{"model": "' + b"x" * 20_000 + b'"}'),
}

VALUES: dict[str, tuple[int, dict[str, Any]]] = {
    "no model": (400, {"model": None}),
    "a model that is a list": (400, {"model": ["preset:gpt2"]}),
    "an unknown preset": (400, {"model": "preset:gpt9"}),
    "options in the name": (400, {"model": "preset:gpt2:batch=1"}),
    "a Python file": (400, {"model": "code.py"}),
    "a Python file as a config": (400, {"model": "hf:code.py"}),
    "a config that names code": (403, {"model": "hf:remote.json"}),
    "up and out": (403, {"model": "hf:../outside/config.json"}),
    "up and out, hidden": (403, {"model": "hf:tiny/../../outside/config.json"}),
    "an absolute path": (403, {"model": "hf:/etc/passwd"}),
    "a link out": (403, {"model": "hf:link.json"}),
    "a folder that is a link out": (403, {"model": "hf:door/config.json"}),
    "a link to itself": (400, {"model": "hf:loop.json"}),
    "a folder": (400, {"model": "hf:tiny"}),
    "a file that is not there": (400, {"model": "hf:gone/config.json"}),
    "a null byte": (400, {"model": "hf:tiny\0/config.json"}),
    "half a character": (400, {"model": "hf:\ud800.json"}),
    "a name that is too long": (400, {"model": "hf:" + "x" * 400 + ".json"}),
    "a text that is too long": (400, {"model": "x" * 5000}),
    "a config that is no JSON": (400, {"model": "hf:broken/config.json"}),
    "a config that is too large": (400, {"model": "hf:large.json"}),
    "a hub's name": (400, {"model": "hf:someone/model"}),
    "a cluster file": (400, {"device": "cluster.json"}),
    "this machine": (400, {"device": "local"}),
    "a device with a command": (400, {"device": "A100-40GB; ls"}),
    "markup": (400, {"device": "<script>alert(1)</script>"}),
    "no devices": (400, {"devices": 0}),
    "devices below none": (400, {"devices": -8}),
    "more nodes than there are": (400, {"nodes": 10**9}),
    "a batch without end": (400, {"batch": 10**18}),
    "a batch of text": (400, {"batch": "512"}),
    "a sequence without end": (400, {"seq": 10**12}),
    "more tokens than positions": (400, {"seq": 4096}),
    "a link of a file": (400, {"gbps": 1, "link": "x.json"}),
    "a speed below none": (400, {"gbps": -1}),
    "an unknown precision": (400, {"precision": ["fp4"]}),
    "precisions of objects": (400, {"precision": [{}]}),
    "no policy": (400, {"ac": []}),
    "offloading to a folder": (400, {"offload": ["nvme:/tmp"]}),
    "a flag of text": (400, {"compile": "yes"}),
    "a strategy to run": (400, {"strategy": "ddp"}),
    "a key with markup": (400, {"__proto__": {"x": 1}}),
}

CALLS: dict[str, tuple[int, str, str, dict[str, str]]] = {
    "an unknown path": (404, "GET", "/api/plans", {}),
    "files of the machine": (404, "GET", "/../../etc/passwd", {}),
    "files of the machine, hidden": (404, "GET", "/%2e%2e/%2e%2e/etc/passwd", {}),
    "the package's own files": (404, "GET", "/page.js", {}),
    "a plan without a body": (405, "GET", "/api/plan", {}),
    "a page that is written": (405, "PUT", "/", {}),
    "a page that is deleted": (405, "DELETE", "/", {}),
    "another origin's question": (405, "OPTIONS", "/api/plan", {}),
    "a method of one's own": (405, "BREW", "/api/plan", {}),
    "a form": (415, "POST", "/api/plan", {"content-type": "application/x-www-form-urlencoded"}),
    "plain text": (415, "POST", "/api/plan", {"content-type": "text/plain"}),
    "a foreign name": (403, "GET", "/", {"host": "evil.example"}),
    "a name that only begins well": (403, "GET", "/", {"host": "127.0.0.1.evil.example"}),
    "another port": (403, "GET", "/", {"host": "127.0.0.1:1"}),
    "every address": (403, "GET", "/", {"host": "0.0.0.0"}),
    "another origin": (403, "POST", "/api/plan", {"origin": "http://evil.example"}),
    "no origin at all": (403, "POST", "/api/plan", {"origin": "null"}),
    "another site": (403, "POST", "/api/plan", {"sec-fetch-site": "cross-site"}),
}

RAW: dict[str, bytes] = {
    "no HTTP": b"hello\r\n\r\n",
    "no host": b"GET / HTTP/1.1\r\n\r\n",
    "two hosts": b"GET / HTTP/1.1\r\nHost: {host}\r\nHost: evil.example\r\n\r\n",
    "two lengths": b"POST /api/plan HTTP/1.1\r\nHost: {host}\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n{}",
    "a length below none": b"POST /api/plan HTTP/1.1\r\nHost: {host}\r\nContent-Length: -1\r\n\r\n",
    "a header without end": b"GET / HTTP/1.1\r\nHost: {host}\r\nX: " + b"x" * 20_000 + b"\r\n\r\n",
    "a header of two lines": b"GET / HTTP/1.1\r\nHost: {host}\r\nX: a\x00b\r\n\r\n",
    "a chunk of no size": b"POST /api/plan HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
    "somebody else's proxy": b"GET http://evil.example/ HTTP/1.1\r\nHost: evil.example\r\n\r\n",
    "a tunnel": b"CONNECT evil.example:443 HTTP/1.1\r\nHost: evil.example:443\r\n\r\n",
}


def check(status: int, answer: dict[str, Any], expected: int) -> None:
    assert status == expected, answer
    assert list(answer) == ["error"] and answer["error"]
    assert "Traceback" not in answer["error"] and len(answer["error"]) < 1500


def test_the_list_is_long() -> None:
    assert len(BODIES) + len(VALUES) + len(CALLS) + len(RAW) >= 30


@pytest.mark.parametrize("name", BODIES)
def test_bodies(address: Address, name: str) -> None:
    expected, body = BODIES[name]
    check(*address.send("POST", "/api/plan", body), expected)


@pytest.mark.parametrize("name", VALUES)
def test_values(address: Address, name: str) -> None:
    expected, change = VALUES[name]
    check(*address.ask(PLAIN | change), expected)


@pytest.mark.parametrize("name", CALLS)
def test_calls(address: Address, name: str) -> None:
    expected, method, path, headers = CALLS[name]
    check(*address.send(method, path, json.dumps(PLAIN).encode() if method == "POST" else b"", **headers), expected)


@pytest.mark.parametrize("name", RAW)
def test_bytes_that_are_no_request(address: Address, name: str) -> None:
    with socket.create_connection(("127.0.0.1", address.port), timeout=20) as connection:
        connection.sendall(RAW[name].replace(b"{host}", f"127.0.0.1:{address.port}".encode()))
        answer = connection.recv(1 << 16)
    head = answer.split(b"\r\n", 1)[0].split()
    assert head[0] == b"HTTP/1.1" and head[1].startswith(b"4"), answer[:200]
    assert b"Traceback" not in answer


def test_the_server_still_plans(address: Address) -> None:
    """After all of the above, in the order of this file."""
    status, answer = address.ask(PLAIN)
    assert status == 200, answer
    assert answer["plans"][0]["fits"]


def test_no_answer_may_be_read_by_another_origin(address: Address) -> None:
    for method, path in (("GET", "/"), ("OPTIONS", "/api/plan"), ("GET", "/nothing")):
        connection = HTTPConnection("127.0.0.1", address.port, timeout=20)
        connection.request(method, path)
        headers = {name.lower() for name, _ in connection.getresponse().getheaders()}
        connection.close()
        assert not any(name.startswith("access-control") for name in headers)
        assert {"content-security-policy", "x-content-type-options", "x-frame-options"} <= headers
