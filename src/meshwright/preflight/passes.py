"""What a pass does besides computing: it changes its batch, is steered by values, or asks for a device."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.facts.finding import Level
from meshwright.preflight.subject import Case, Issue, Subject, always


def batch_changed(subject: Subject) -> Iterator[Issue]:
    """Lines that change the batch in place."""
    for event in subject.trial.written:
        yield Issue(
            kind="batch-changed",
            what=f"{_owner(subject, event.module)} changes the batch in place: data that is used again, such as "
            "tensors that a dataset keeps or a pass that is recomputed, then has other values.",
            level=always,
            do="Work on a copy (x = x * 2, y = y.clone(), x.masked_fill(...)).",
            module=event.module or "",
            place=event.place,
        )


def parameters_changed(subject: Subject) -> Iterator[Issue]:
    """Lines of forward that change trainable parameters in place."""
    known = {state.name for state in subject.facts.moved}
    for event in subject.trial.moved:
        if event.name not in known:
            yield Issue(
                kind="state-changed-in-forward",
                what=f"Forward changes the parameter {event.name} in place: ranks that hold shards or gathered copies "
                "of it lose the change or make different ones, and every micro-batch repeats it.",
                level=lambda case: "warning" if case.is_divided or case.strategy.recompute != "none" else None,
                do="Change it after the optimizer's step, or compute the changed value (w = self.weight.clamp(...)).",
                module=event.name,
                place=event.place,
            )


def steered(subject: Subject) -> Iterator[Issue]:
    """Lines that read a number that the model has computed."""
    for event in subject.trial.reads:
        decides = event.kind is bool
        effect = "decide for themselves which branch they take" if decides else "read other numbers than one process"
        yield Issue(
            kind="value-read",
            what=f"{_owner(subject, event.module)} reads a number that depends on parameters: micro-batches and ranks "
            f"{effect}, the host waits for the device, and compiled code breaks there.",
            level=_steered_level if decides else _read_level,
            do="Choose for each sample with torch.where; keep numbers in tensors, and log them outside of forward.",
            module=event.module or "",
            place=event.place,
        )


def _steered_level(case: Case) -> Level | None:
    return "warning" if case.is_divided or case.strategy.compile else None


def _read_level(case: Case) -> Level | None:
    return "note" if case.is_divided or case.strategy.compile else None


def fixed_device(subject: Subject) -> Iterator[Issue]:
    """A device that the code names."""
    if subject.trial.device is not None:
        error, place = subject.trial.device
        yield Issue(
            kind="fixed-device",
            what=f"The code names a device, so it does not run on a CPU, and ranks with other GPUs may use the "
            f"wrong one ({error}).",
            level=always,
            do="Make tensors on the device of an input or a parameter (device=x.device), or register them as buffers.",
            place=place,
        )


def _owner(subject: Subject, module: str | None) -> str:
    return "The loss" if module is None else f"Module {module or type(subject.model).__name__}"
