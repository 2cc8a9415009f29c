"""A server of the page as tests call it, and the folder that it serves."""

from __future__ import annotations

import json
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

GPT2 = {"model_type": "gpt2", "n_layer": 2, "n_embd": 64, "n_head": 4, "vocab_size": 256, "n_positions": 128}
EXAMPLE = Path(__file__).parents[1] / "examples" / "gpt.py"


@dataclass(frozen=True, kw_only=True)
class Address:
    """Where the server listens."""

    port: int
    folder: Path

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/"

    def ask(self, value: Any, **headers: str) -> tuple[int, dict[str, Any]]:
        """Status and JSON of one request for a plan."""
        return self.send("POST", "/api/plan", json.dumps(value).encode(), **headers)

    def send(self, method: str, path: str, body: bytes = b"", **headers: str) -> tuple[int, dict[str, Any]]:
        connection = HTTPConnection("127.0.0.1", self.port, timeout=90)
        given = {name.replace("_", "-"): value for name, value in headers.items()}
        try:
            connection.request(method, path, body or None, {"content-type": "application/json"} | given)
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read())
        finally:
            connection.close()


def fill(folder: Path, outside: Path) -> None:
    """A folder with a good config, bad ones, and ways out of it."""
    (folder / "tiny").mkdir()
    (folder / "tiny" / "config.json").write_text(json.dumps(GPT2))
    (folder / "broken").mkdir()
    (folder / "broken" / "config.json").write_text("{")
    (folder / "large.json").write_text(" " * (2 << 20))
    (folder / "code.py").write_text("raise SystemExit('a visitor ran this')")
    remote = {"model_type": "unheard-of", "auto_map": {"AutoConfig": "code.Config"}}
    (folder / "remote.json").write_text(json.dumps(remote))
    (outside / "config.json").write_text(json.dumps(GPT2))
    (folder / "link.json").symlink_to(outside / "config.json")
    (folder / "door").symlink_to(outside)
    (folder / "loop.json").symlink_to(folder / "loop.json")
