"""The web application: one page, the script that draws its charts, and an endpoint for plans. Nothing else.

It answers only requests addressed to this machine's own name and port, so that no foreign page can reach it through a
DNS name of its own (DNS rebinding). No other origin can read anything. Every error is one JSON object with one message.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from meshwright.errors import MeshwrightError
from meshwright.report.charts import plotly_script
from meshwright.serve.errors import Busy, Forbidden, LongHead, NotJson, RequestError, TooLarge, TooSlow, status_of
from meshwright.serve.models import Models
from meshwright.serve.page import Page, plotly_path
from meshwright.serve.planner_queue import PlannerQueue, error_body
from meshwright.serve.request import read_json, read_request

LARGEST = 16 << 10
"""Largest request body in bytes; the page's own have a few hundred."""
HEAD = 16 << 10
"""Largest request head in bytes."""
BODY_S = 10.0
"""Seconds until a request body must have arrived."""
JSON = "application/json"
HEADERS = {
    "Cache-Control": "no-store",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}

FOREVER = "private, max-age=31536000, immutable"
"""For a file whose name changes with its content."""


def make_app(models: Models, *, hosts: Sequence[str], queue: PlannerQueue | None = None) -> ASGIApp:
    """The application for visitors who address it by one of `hosts`, each a name with its port."""
    plans = queue or PlannerQueue()

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        await plans.open()
        yield
        await plans.close()

    app = Starlette(
        routes=[
            Route("/", partial(_page, Page(models)), methods=["GET"]),
            Route(plotly_path(), _plotly, methods=["GET"]),
            Route("/api/plan", partial(_plan, models, plans), methods=["POST"]),
        ],
        exception_handlers={HTTPException: _http_error, MeshwrightError: _error, Exception: _unexpected},
        lifespan=lifespan,
    )
    app.router.redirect_slashes = False
    return Guard(app, hosts=hosts)


class Guard:
    """Rejects requests that do not address this server by its own name, and pages of other origins."""

    def __init__(self, app: ASGIApp, *, hosts: Sequence[str]) -> None:
        self._app, self._hosts = app, frozenset(hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            if scope["type"] == "http":
                self._check(Request(scope))
        except RequestError as error:
            await _answer(error.status, error_body(error))(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _check(self, request: Request) -> None:
        if sum(len(name) + len(value) for name, value in request.headers.raw) > HEAD:
            raise LongHead(f"The request's headers have more than {HEAD} bytes; send fewer.")
        hosts = request.headers.getlist("host")
        if len(hosts) != 1 or hosts[0].lower() not in self._hosts:
            names = ", ".join(sorted(self._hosts))
            raise Forbidden(f"This server answers only to {names}; open the address that it printed.")
        origins = request.headers.getlist("origin")
        if any(origin.lower() != f"http://{hosts[0].lower()}" for origin in origins):
            raise Forbidden("This server answers only its own page, but the request came from another origin.")
        if request.headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
            raise Forbidden("This server answers only its own page, but the request came from another site.")


async def _page(page: Page, request: Request) -> Response:
    text = await asyncio.to_thread(page.render)
    return _answer(200, text.encode(), kind="text/html; charset=utf-8", policy=page.policy)


async def _plotly(request: Request) -> Response:
    response = _answer(200, plotly_script().encode(), kind="text/javascript; charset=utf-8")
    response.headers["Cache-Control"] = FOREVER
    return response


async def _plan(models: Models, queue: PlannerQueue, request: Request) -> Response:
    document = read_json(await _body(request))
    plan_request = await asyncio.to_thread(read_request, document, models)  # finding a model reads the disk
    answer = await queue.ask(plan_request, request.is_disconnected)
    return _answer(answer.status, answer.body)


async def _body(request: Request) -> bytes:
    """The request's body, if it is JSON, small, and arrives in time."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != JSON:
        raise NotJson(f"The request's content type is {kind[:80]!r}; send {JSON}.")
    try:
        async with asyncio.timeout(BODY_S):
            return await _read(request)
    except TimeoutError as error:
        raise TooSlow(f"The request's body did not arrive within {BODY_S:.0f} s.") from error


async def _read(request: Request) -> bytes:
    body = b""
    try:
        async for chunk in request.stream():
            body += chunk
            if len(body) > LARGEST:
                raise TooLarge(f"The request's body has more than {LARGEST} bytes; a request needs a few hundred.")
    except ClientDisconnect as error:
        raise RequestError("The request ended before its body did.") from error
    return body


def _answer(status: int, body: bytes, *, kind: str = JSON, policy: str = "default-src 'none'") -> Response:
    headers = HEADERS | {"Content-Security-Policy": policy}
    if status == Busy.status:
        headers["Retry-After"] = "5"
    return Response(body, status_code=status, media_type=kind, headers=headers)


async def _error(request: Request, error: Exception) -> Response:
    assert isinstance(error, MeshwrightError)
    return _answer(status_of(error), error_body(error))


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    called = f"{request.method[:20]} {request.url.path[:200]}"
    if error.status_code == 405:
        message = f"{called} is not allowed; use {error.headers['Allow']}." if error.headers else called
    else:
        message = f"{called} does not exist; use GET / or POST /api/plan."
    response = _answer(error.status_code, error_body(message))
    response.headers.update({key: value for key, value in (error.headers or {}).items() if key == "Allow"})
    return response


async def _unexpected(request: Request, error: Exception) -> Response:
    """An internal error: the traceback goes to the server's own output, never to a visitor."""
    return _answer(500, error_body(f"Internal error ({type(error).__name__}); see the server's output."))
