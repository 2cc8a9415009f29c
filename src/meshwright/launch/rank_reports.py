"""What ranks were doing when one of them stopped advancing, and which of them is to blame.

Note on how: a rank that waits for a peer is in a collective, or in a backward pass, whose hooks communicate. A rank
that is anywhere else, or cannot dump its stacks, is the one that the others wait for. If all of them wait, the recorded
collectives tell where they parted: the first that is not the same on all ranks of a group.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from meshwright.launch.heartbeat import STARTING, STEPPING
from meshwright.launch.stacks import CallStack

Collective = Mapping[str, Any]
"""One recorded call: group, number in the group, name, sizes."""


@dataclass(frozen=True, kw_only=True)
class RankReport:
    """One rank, as its launcher found it."""

    rank: int
    host: str
    doing: str
    step: int
    silent: float
    """Seconds without a heartbeat."""
    late: bool
    """Whether that is more than it may be silent."""
    stack: CallStack
    loaders: tuple[CallStack, ...] = ()
    """Of the rank's data-loading processes."""
    collectives: tuple[Collective, ...] = ()
    """The last ones, if PyTorch recorded them and the rank could tell."""

    @property
    def where(self) -> str:
        return f"rank {self.rank} on {self.host}"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> RankReport:
        def stack(found: dict[str, Any]) -> CallStack:
            return CallStack(text=found["text"], frames=tuple((f[0], f[1], f[2]) for f in found["frames"]))

        loaders = tuple(stack(found) for found in document["loaders"])
        plain = {**document, "stack": stack(document["stack"]), "loaders": loaders}
        return cls(**{**plain, "collectives": tuple(document["collectives"])})


@dataclass(frozen=True, kw_only=True)
class Hang:
    """The rank to blame, and what all ranks were doing."""

    rank: int
    message: str
    text: str
    """The stack of every rank."""


def judge(reports: Sequence[RankReport]) -> Hang | None:
    """The rank that the others wait for, if it is late; a rank that compiles or saves is late later than the others."""
    found = min(reports, key=_order)
    if not found.late:
        return None
    if found.stack.waits and (apart := _parted(reports)) is not None:
        ranks, how = apart
        found = next(report for report in reports if report.rank == ranks[-1])
        message = f"{_begin(found, ranks)}: {how}."
    else:
        waits = "; it waits for its peers, as they do" if found.stack.waits else ""
        message = f"{_begin(found)}: {found.stack.place}{_loader(found)}{waits}."
    return Hang(rank=found.rank, message=message, text="\n\n".join(_page(report) for report in reports))


def _order(report: RankReport) -> tuple[bool, bool, int, float]:
    """Sorts the rank to blame first."""
    return report.stack.waits, report.doing != STARTING, report.step, -report.silent


def _begin(report: RankReport, ranks: Sequence[int] = ()) -> str:
    doing = f"in step {report.step + 1}" if report.doing == STEPPING else f"while {report.doing}"
    who = f"Ranks {' and '.join(map(str, ranks))} have" if len(ranks) > 1 else f"Rank {report.rank} has"
    where = "" if len(ranks) > 1 else f" on {report.host}"
    return f"{who} been silent for {report.silent:.0f} s {doing}{where}"


def _loader(report: RankReport) -> str:
    if not report.stack.loads or not report.loaders:
        return ""
    silent = [stack for stack in report.loaders if not stack.frames]
    if silent:
        return f"; {len(silent)} of its {len(report.loaders)} data-loading processes does not answer"
    return f"; the data-loading process stands at {report.loaders[0].line}"


def _parted(reports: Sequence[RankReport]) -> tuple[list[int], str] | None:
    """The ranks whose collectives are not those of most, and how they differ; all if there is no majority.

    None if their collectives do not differ.
    """
    calls = _first_difference(reports) or {r.rank: r.stack.collective for r in reports if r.stack.collective}
    if len(set(calls.values())) < 2:
        return None
    usual, count = Counter(calls.values()).most_common(1)[0]
    odd = [rank for rank, call in calls.items() if call != usual]
    if 2 * count <= len(calls):
        odd = sorted(calls)
    by_rank = {report.rank: report for report in reports}
    said = "; ".join(f"rank {rank} is in {call} at {by_rank[rank].stack.line}" for rank, call in sorted(calls.items()))
    return odd, f"ranks are in different collectives: {said}"


def _first_difference(reports: Sequence[RankReport]) -> dict[int, str]:
    """By rank, the first recorded collective of a group that is not the same on all ranks that recorded it."""
    by_call: dict[tuple[str, int], dict[int, str]] = {}
    for report in reports:
        for call in report.collectives:
            words = f"{call['name']} {call['sizes']}" if call["sizes"] else str(call["name"])
            by_call.setdefault((call["group"], call["number"]), {})[report.rank] = words
    for key in sorted(by_call):
        if len(set(by_call[key].values())) > 1:
            return by_call[key]
    return {}


def _page(report: RankReport) -> str:
    head = (
        f"rank {report.rank} on {report.host}, {report.doing}, step {report.step + 1}, silent for {report.silent:.0f} s"
    )
    lines = [head, report.stack.text or "  it did not answer"]
    if report.collectives:
        last = report.collectives[-1]
        lines.append(f"  last collective: {last['name']}, number {last['number']} of group {last['group']}")
    lines += [f"  data-loading process:\n{stack.text or '  it did not answer'}" for stack in report.loaders]
    return "\n".join(lines)
