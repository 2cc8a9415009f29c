"""Checkpoints beside each other, bit by bit, and a run beside a checkpoint, to rounding.

Numbers are joined by kind ("model", "exp_avg", ...): few long vectors compare faster than many small tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from meshwright.checkpoint.folder import find_checkpoint
from meshwright.checkpoint.manifest import MODEL, RNG, RunState
from meshwright.checkpoint.parts import State
from meshwright.checkpoint.state import snapshot
from meshwright.checkpoint.storage import narrowed
from meshwright.checkpoint.whole_tensors import WholeTensors
from meshwright.runtime.run import Run

RTOL = 1e-5
ATOL = 2e-6
"""Times the largest magnitude of its kind (of all parameters, all first moments, ...). Gradients are sums over samples
and ranks, taken in another order by each strategy: their rounding is relative to what is added up, not to what is left
of it. Adam passes it on divided by eps at most, which the jobs choose so large that this is no more than the bound."""


class Vectors:
    """Tensors joined by kind and dtype."""

    def __init__(self, tensors: dict[str, list[torch.Tensor]]) -> None:
        self.names: dict[str, list[tuple[str, int]]] = {}
        """By kind: tensors and how many numbers each has, in the vector's order."""
        parts: dict[str, list[torch.Tensor]] = {}
        for name in sorted(tensors):
            for tensor in tensors[name]:
                kind = f"{_kind(name)} ({tensor.dtype})"
                self.names.setdefault(kind, []).append((f"{name} {tuple(tensor.shape)}", tensor.numel()))
                parts.setdefault(kind, []).append(tensor.reshape(-1))
        self.by_kind = {kind: torch.cat(found) for kind, found in parts.items()}

    def name_at(self, kind: str, index: int) -> str:
        for name, count in self.names[kind]:
            if index < count:
                return name
            index -= count
        raise IndexError(index)

    def counts(self) -> str:
        return ", ".join(f"{len(tensors)} of {kind}" for kind, tensors in self.names.items())


def first_change(folder: Path, original: Path, *, lossy: bool = False) -> str | None:
    """What is not the same in two checkpoints, bit by bit; the strategy and the generators may differ.

    `lossy`: numbers of the original may have been cast to the dtype that they have now.
    """
    found, wanted = WholeTensors(folder), WholeTensors(original)
    ours, theirs = _tensors(found), _tensors(wanted)
    if lossy:
        theirs = {name: [theirs[name][0].to(ours[name][0].dtype)] for name in theirs if name in ours}
    left, right = Vectors(ours), Vectors(theirs)
    if left.names != right.names:
        return f"tensors are {left.counts()} instead of {right.counts()}"
    for kind, vector in right.by_kind.items():
        unlike = (left.by_kind[kind].view(torch.uint8) != vector.view(torch.uint8)).nonzero()
        if len(unlike):
            name = right.name_at(kind, int(unlike[0]) // vector.itemsize)
            return f"{len(unlike)} bytes of {kind} are not the same, first in {name}"
    return _first_unlike_value(_values(found.manifest.run_state), _values(wanted.manifest.run_state))


def weights_after(steps: int, out: Path) -> dict[str, torch.Tensor]:
    """The model's whole tensors in the last checkpoint of a run, which must have taken this many steps."""
    whole = WholeTensors(find_checkpoint(out))
    assert whole.manifest.run_state.step == steps
    return {name: whole.read(name) for name in whole.manifest.tensors if name.startswith(MODEL)}


@dataclass(frozen=True, order=True)
class Distance:
    """How far a run is from a checkpoint, where it is farthest."""

    ratio: float
    """Of the difference to what is allowed: above 1 they are not equal."""
    tensor: str
    scaled: float
    """The largest difference of a number, in units of the largest magnitude of its kind."""


class Yardstick:
    """What a rank should hold, of a checkpoint: every box that it has, copies that others have too included."""

    def __init__(self, folder: Path) -> None:
        self._whole = WholeTensors(folder)
        self._names = {name for name in self._whole.manifest.tensors if not name.startswith(RNG)}
        self._expected: Vectors | None = None
        whole = Vectors(_tensors(self._whole))
        self._scales = {kind: float(vector.abs().max()) or 1.0 for kind, vector in whole.by_kind.items()}

    def measure(self, run: Run) -> Distance:
        """Where this rank differs most, in units of what is allowed."""
        laid = snapshot(run.trainer, run.data_position, [[] for _ in run.trainer.optimizer.param_groups]).state
        state = {name: boxes for name, boxes in laid.items() if not name.startswith(RNG)}
        found = Vectors({name: [part.tensor for part in boxes.parts] for name, boxes in state.items()})
        if self._expected is None:  # what lies where stays as it is
            self._expected = self._boxes(run, state)
        assert found.names == self._expected.names, f"{found.counts()} instead of {self._expected.counts()}"
        return max(self._distance(found, self._expected, kind) for kind in found.by_kind)

    def _boxes(self, run: Run, state: State) -> Vectors:
        """Of the checkpoint, those that this rank has."""
        held = set().union(*run.world.gather(set(state)))
        assert held == self._names, f"only one of both has {sorted(held ^ self._names)}"
        whole = {name: self._whole.read(name) for name in state}
        return Vectors(
            {
                name: [narrowed(whole[name], part.offsets, part.tensor.shape) for part in boxes.parts]
                for name, boxes in state.items()
            }
        )

    def _distance(self, found: Vectors, expected: Vectors, kind: str) -> Distance:
        wanted, scale = expected.by_kind[kind], self._scales[kind]
        apart = (found.by_kind[kind] - wanted).abs_()
        ratio = apart / (RTOL * wanted.abs() + ATOL * scale)
        at = int(ratio.argmax())
        return Distance(float(ratio[at]), found.name_at(kind, at), float(apart.max()) / scale)


def _tensors(whole: WholeTensors) -> dict[str, list[torch.Tensor]]:
    return {name: [whole.read(name)] for name in whole.manifest.tensors if not name.startswith(RNG)}


def _values(run_state: RunState) -> dict[str, Any]:
    optimizer = run_state.optimizer or {"class": None, "groups": []}
    groups = [(sorted(group["names"]), group["values"]) for group in optimizer["groups"]]
    kept = {key: getattr(run_state, key) for key in ("step", "samples", "seed", "tied", "schedule", "loss_scale")}
    return kept | {"optimizer's class": optimizer["class"], "optimizer's groups": groups}


def _first_unlike_value(found: dict[str, Any], wanted: dict[str, Any]) -> str | None:
    if None in (found["loss_scale"], wanted["loss_scale"]):  # only fp16 has one
        wanted = wanted | {"loss_scale": found["loss_scale"]}
    for key, value in wanted.items():
        if found[key] != value:
            return f"{key} is {found[key]} instead of {value}"
    return None


def _kind(name: str) -> str:
    return "model" if name.startswith("model/") else name.rpartition("/")[2]
