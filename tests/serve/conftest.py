"""One server for all tests of the page, in a thread of this process, with its planning process beside it."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from serve_address import EXAMPLE, Address, fill

pytest.importorskip("uvicorn", reason="the page needs meshwright[serve]")
pytest.importorskip("starlette", reason="the page needs meshwright[serve]")


@pytest.fixture(scope="session")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Address]:
    from meshwright.serve.models import Models
    from meshwright.serve.server import make_server, open_socket

    outside, folder = tmp_path_factory.mktemp("outside"), tmp_path_factory.mktemp("served")
    fill(folder, outside)
    listener = open_socket("127.0.0.1", 0)
    server = make_server(Models(folder=folder, job=str(EXAMPLE)), listener)
    listening = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    listening.start()
    yield Address(port=listener.getsockname()[1], folder=folder)
    server.should_exit = True
    listening.join()
    listener.close()
