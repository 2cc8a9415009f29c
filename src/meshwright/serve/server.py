"""Start the web server, on loopback addresses only. Only this file and `protocol.py` import uvicorn."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from meshwright.errors import BadInput, one_line
from meshwright.jobs.load import load_job
from meshwright.serve.models import Models

if TYPE_CHECKING:
    import uvicorn

LOOPBACK = {"127.0.0.1": socket.AF_INET, "localhost": socket.AF_INET, "::1": socket.AF_INET6}
CONNECTIONS = 256


def serve(*, job: str = "", folder: Path, host: str, port: int, on_ready: Callable[[str], None]) -> None:
    """Serve the page until interrupted; `on_ready` is called with its address once it can be opened."""
    _check_packages()
    models = make_models(job=job, folder=folder)
    with open_socket(host, port) as listener:
        server = make_server(models, listener)
        on_ready(f"http://{names_of(listener)[2 if listener.family is socket.AF_INET6 else 0]}/")
        server.run(sockets=[listener])


def make_models(*, job: str, folder: Path) -> Models:
    """What may be planned. The job is loaded once here, so that its mistakes are reported at startup."""
    if not folder.is_dir():
        raise BadInput(f"--folder {str(folder)!r} is not a folder; give one with Hugging Face configs.")
    if job:
        load_job(job)
    return Models(folder=folder, job=job)


def open_socket(host: str, port: int) -> socket.socket:
    """A listening socket on a loopback address."""
    if host not in LOOPBACK:
        raise BadInput(
            f"--host {host!r} is not allowed: the page has no login, so it listens only "
            f"on {', '.join(LOOPBACK)}. To reach it from elsewhere, tunnel: ssh -L {port}:127.0.0.1:{port} MACHINE."
        )
    listener = socket.socket(LOOPBACK[host], socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(("127.0.0.1" if host == "localhost" else host, port))
        listener.listen()  # connections made before the server runs wait instead of being refused
    except OSError as error:
        listener.close()
        raise BadInput(f"Cannot listen on {host} port {port}: {one_line(error)} Choose another with --port.") from error
    return listener


def names_of(listener: socket.socket) -> tuple[str, ...]:
    """Host and port as a browser may write them for this server."""
    port = listener.getsockname()[1]
    return tuple(f"{name}:{port}" for name in ("127.0.0.1", "localhost", "[::1]"))


def make_server(models: Models, listener: socket.socket) -> uvicorn.Server:
    """The server for a socket; `run(sockets=[listener])` runs it."""
    import uvicorn

    from meshwright.serve.app import HEAD, make_app
    from meshwright.serve.protocol import PatientProtocol

    config = uvicorn.Config(
        make_app(models, hosts=names_of(listener)),
        http=PatientProtocol,
        ws="none",
        lifespan="on",
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        limit_concurrency=CONNECTIONS,
        timeout_keep_alive=30,
        h11_max_incomplete_event_size=HEAD,
        timeout_graceful_shutdown=3,
    )
    return uvicorn.Server(config)


def _check_packages() -> None:
    try:
        import plotly  # noqa: F401
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise BadInput(
            f"`meshwright serve` needs the package {error.name}, which is not installed; run "
            "`pip install 'meshwright[serve]'`."
        ) from error
