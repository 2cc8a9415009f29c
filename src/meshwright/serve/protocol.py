"""Close connections that only wait: those that send no request head, and the oldest of too many idle ones.

Why: uvicorn counts idle connections like busy ones, and waits for a head forever, so a few hundred silent connections
would lock everyone out.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter

from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_S = 10.0
"""Seconds until a request's head must have arrived."""
REQUEST_S = 300.0
"""Time limit in seconds for a request and its answer together."""
IDLE = 64
"""Maximum number of idle connections; beyond it, the oldest are closed."""


class PatientProtocol(H11Protocol):
    """One connection with timeouts."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._timer: asyncio.TimerHandle | None = None
        self._used, self._since = False, time.monotonic()
        self._close_after(HEAD_S)
        self._make_room()

    def data_received(self, data: bytes) -> None:
        was_busy = self.is_busy
        super().data_received(data)
        if self.is_busy and not was_busy:
            self._used = True
            self._close_after(REQUEST_S)
        elif not self.is_busy and self._timer is None:
            self._close_after(HEAD_S)

    def on_response_complete(self) -> None:
        self._stop_timer()
        self._since = time.monotonic()
        super().on_response_complete()
        if self.is_busy:  # the next request has already arrived
            self._close_after(REQUEST_S)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    @property
    def is_busy(self) -> bool:
        """Whether a request is being answered."""
        return self.cycle is not None and not self.cycle.response_complete

    @property
    def is_idle(self) -> bool:
        return not self.is_busy and not self.transport.is_closing()

    @property
    def address(self) -> str:
        return self.client[0] if self.client else ""

    def _close_after(self, seconds: float) -> None:
        self._stop_timer()
        self._timer = self.loop.call_later(seconds, self.transport.close)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None

    def _make_room(self) -> None:
        """Close the longest idle connections: of the client with the most, and never used ones first."""
        waiting = [other for other in self.connections if isinstance(other, PatientProtocol) and other.is_idle]
        clients = Counter(other.address for other in waiting)
        while len(waiting) > IDLE:
            ((most, _),) = clients.most_common(1)
            oldest = min(
                (other for other in waiting if other.address == most), key=lambda other: (other._used, other._since)
            )
            waiting.remove(oldest)
            clients[most] -= 1
            oldest.transport.close()
