"""Errors shown to visitors, each with its HTTP status."""

from __future__ import annotations

from meshwright.errors import BadInput, MeshwrightError


class RequestError(BadInput):
    """A request that is wrong before anything was planned."""

    status = 400


class Forbidden(RequestError):
    """The request asks for something outside the allowed folder, or comes from another origin."""

    status = 403


class TooSlow(RequestError):
    """The request's body did not arrive in time."""

    status = 408


class TooLarge(RequestError):
    """The request's body is too large."""

    status = 413


class NotJson(RequestError):
    """The request's content type is not JSON."""

    status = 415


class LongHead(RequestError):
    """The request's line and headers are too long."""

    status = 431


class Busy(MeshwrightError):
    """The planner did not reach the request, or did not finish it, in time."""

    status = 503


def status_of(error: MeshwrightError) -> int:
    """The HTTP status of an error: its own, 400 for other mistakes of the visitor, else 500."""
    return getattr(error, "status", 400 if isinstance(error, BadInput) else 500)
