"""Errors that a visitor gets: each has a status of its own, and a message in the project's way."""

from __future__ import annotations

from meshwright.errors import BadInput, MeshwrightError


class RequestError(BadInput):
    """A request that is wrong before anything was planned."""

    status = 400


class Forbidden(RequestError):
    """What was asked for lies where visitors may not go, or came from where none may come."""

    status = 403


class TooSlow(RequestError):
    """The request's body did not come."""

    status = 408


class TooLarge(RequestError):
    """The request's body is larger than any that could be right."""

    status = 413


class NotJson(RequestError):
    """The request's body is not said to be JSON."""

    status = 415


class LongHead(RequestError):
    """The request's line and headers are longer than any that could be right."""

    status = 431


class Busy(MeshwrightError):
    """The planner did not get to it, or not through it, in time."""

    status = 503


def status_of(error: MeshwrightError) -> int:
    """What a visitor is told by number: our own status, and 400 for everything else that a visitor can mend."""
    return getattr(error, "status", 400 if isinstance(error, BadInput) else 500)
