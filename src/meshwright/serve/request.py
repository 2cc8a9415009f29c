"""A visitor's request: parsed from JSON, checked by the command line's parsers, and printed as its command."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from meshwright.api.job_planner import PlanOptions, read_allowed
from meshwright.errors import BadInput
from meshwright.facts.catalogue import catalogue_names
from meshwright.facts.cluster import Cluster
from meshwright.facts.grammar import nearest
from meshwright.facts.precision import FORMATS
from meshwright.planner.candidates import Allowed
from meshwright.reading import parse_json, shown
from meshwright.serve.errors import RequestError
from meshwright.serve.models import Models

WORDS: Mapping[str, tuple[str, ...]] = {
    "precision": tuple(FORMATS),
    "ac": ("none", "selective", "full"),
    "offload": ("none", "optimizer", "params"),
}
"""Policies with several allowed values, in the planner's order."""
DEFAULTS: Mapping[str, tuple[str, ...]] = {
    "precision": ("bf16",),
    "ac": ("none", "selective", "full"),
    "offload": ("none", "optimizer"),
}
LIMITS: Mapping[str, int] = {"devices": 64, "nodes": 2048, "batch": 1 << 17, "seq": 1 << 20}
"""Largest accepted numbers; beyond them, one request would keep everyone else waiting."""
MOST_DEVICES = 16_384
FASTEST_GBPS = 1_000_000.0
LONGEST = 512
JSON_FIELDS = ("job", "source", "stamp", "batch", "compile", "tensor", "pipeline")
KEYS = ("model", "device", "devices", "nodes", "gbps", "link", "batch", "seq", *WORDS, "compile", "tensor", "pipeline")


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """What the page's settings ask for."""

    job: str
    """As written on the command line."""
    source: str
    """What is loaded."""
    stamp: int = 0
    """When its file was last written."""
    cluster: Cluster
    batch: int | None
    policies: tuple[tuple[str, tuple[str, ...]], ...]
    """For each of WORDS, the allowed values."""
    compile: bool
    tensor: bool
    pipeline: bool

    @property
    def options(self) -> PlanOptions:
        return PlanOptions(allowed=self.allowed, fast=True, global_batch=self.batch)

    @property
    def allowed(self) -> Allowed:
        joined = {name: ",".join(words) for name, words in self.policies}
        return read_allowed(
            precision=joined["precision"],
            recompute=joined["ac"],
            offload=joined["offload"],
            compile=self.compile,
            tensor=self.tensor,
            pipeline=self.pipeline,
        )

    @property
    def command(self) -> str:
        """The command line with the same ranking; options at their defaults are left out."""
        words = ["meshwright", "plan", self.job, "--on", str(self.cluster), "--fast"]
        if self.batch is not None:
            words += ["--batch", str(self.batch)]
        for name, chosen in self.policies:
            words += [f"--{name}", ",".join(chosen)] if chosen != DEFAULTS[name] else []
        words += ["--compile"] if self.compile else []
        words += [f"--no-{name}" for name in ("tensor", "pipeline") if not getattr(self, name)]
        return shlex.join(words)

    def to_json(self) -> dict[str, Any]:
        """The request as sent to the planning process."""
        fields = {name: getattr(self, name) for name in JSON_FIELDS}
        return {**fields, "cluster": str(self.cluster), "policies": dict(self.policies)}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> PlanRequest:
        policies = tuple((name, tuple(words)) for name, words in value["policies"].items())
        return cls(**{**value, "cluster": Cluster.parse(value["cluster"]), "policies": policies})


def read_json(body: bytes) -> Mapping[str, Any]:
    """Parse one JSON object without repeated keys, NaN or infinity."""
    try:
        value = parse_json(body.decode("utf-8"), parse_constant=_no_constant, object_pairs_hook=_once)
    except RequestError:
        raise
    except ValueError as error:
        raise RequestError(f"The request's body is not valid JSON ({type(error).__name__}).") from error
    if not isinstance(value, dict):
        raise RequestError('The request\'s body must be a JSON object, such as {"model": "preset:llama3-8b"}.')
    return value


def read_request(value: Mapping[str, Any], models: Models) -> PlanRequest:
    """Parse and check a request; missing values default as in `meshwright plan`."""
    unknown = next((key for key in value if key not in KEYS), None)
    if unknown is not None:
        raise RequestError(f"A request has no key {unknown[:LONGEST]!r}. Keys: {', '.join(KEYS)}.")
    model = models.find(_text(value, "model"))
    job, source = model.at(_number(value, "seq"))
    request = PlanRequest(
        job=job,
        source=source,
        stamp=model.stamp,
        cluster=_cluster(value),
        batch=_number(value, "batch"),
        policies=tuple((name, _choice(value, name)) for name in WORDS),
        compile=_flag(value, "compile", default=False),
        tensor=_flag(value, "tensor", default=True),
        pipeline=_flag(value, "pipeline", default=True),
    )
    _ = request.allowed  # raises if the policies do not go together
    return request


def _cluster(value: Mapping[str, Any]) -> Cluster:
    """A cluster of catalogue devices: a visitor may not name a cluster file."""
    device, known = _text(value, "device"), catalogue_names()
    if device not in known:
        near = nearest(device, known)
        hint = f"did you mean {near}? " if near else ""
        raise BadInput(f"The device {device!r} is not in the catalogue; {hint}Valid: {', '.join(known)}.")
    nodes, devices = _number(value, "nodes") or 1, _number(value, "devices") or 8
    if nodes * devices > MOST_DEVICES:
        raise BadInput(
            f"{nodes} nodes of {devices} devices are too many; this page plans up to {MOST_DEVICES} devices."
        )
    kind = _text(value, "link") if value.get("link") else None
    return Cluster(nodes=nodes, devices_per_node=devices, device=device, between_gbps=_speed(value), between_kind=kind)


def _text(value: Mapping[str, Any], key: str) -> str:
    found = value.get(key)
    if not isinstance(found, str) or not 0 < len(found) <= LONGEST or not found.isprintable():
        raise RequestError(f"{key!r} is {shown(found, 80)}, but must be text of 1 to {LONGEST} printable characters.")
    return found


def _number(value: Mapping[str, Any], key: str) -> int | None:
    found = value.get(key)
    if found is None:
        return None
    if type(found) is not int or not 1 <= found <= LIMITS[key]:
        raise RequestError(f"{key!r} is {shown(found, 80)}, but must be an integer from 1 to {LIMITS[key]:,}.")
    return found


def _speed(value: Mapping[str, Any]) -> float | None:
    found = value.get("gbps")
    if found is None:
        return None
    if isinstance(found, bool) or not isinstance(found, int | float) or not 0.1 <= found <= FASTEST_GBPS:
        raise RequestError(f"'gbps' is {shown(found, 80)}, but must be a number from 0.1 to {FASTEST_GBPS:,.0f}.")
    return float(found)


def _flag(value: Mapping[str, Any], key: str, *, default: bool) -> bool:
    found = value.get(key, default)
    if not isinstance(found, bool):
        raise RequestError(f"{key!r} is {shown(found, 80)}, but must be true or false.")
    return found


def _choice(value: Mapping[str, Any], key: str) -> tuple[str, ...]:
    """The chosen words, in the order of WORDS."""
    found = value.get(key, list(DEFAULTS[key]))
    if not isinstance(found, list) or not found or any(word not in WORDS[key] for word in found):
        raise RequestError(
            f"{key!r} is {shown(found, 80)}, but must be a list of one or more of {', '.join(WORDS[key])}."
        )
    return tuple(word for word in WORDS[key] if word in found)


def _no_constant(name: str) -> Any:
    raise RequestError(f"The request's body has {name}, which is not a JSON number.")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        raise RequestError("The request's body has a key twice; give every key once.")
    return value
