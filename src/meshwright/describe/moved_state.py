"""Find state that a forward pass changes: running statistics, codebooks, moving averages of targets, counters.

An optimizer's step updates parameters once, from all samples. State that `forward` changes is updated on every rank
from the rank's samples, and once per micro-batch. Whether that matters is tested on small models.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from meshwright.describe.observe import SAMPLES, forward_on_real_tensors, forward_passes, make_batch
from meshwright.describe.parameter_reads import pass_on
from meshwright.errors import JobError
from meshwright.facts.job import Job
from meshwright.facts.model import MovedFacts
from meshwright.recording.blueprint import record
from meshwright.recording.memory import named_tensors
from meshwright.recording.seeding import seed_torch
from meshwright.torch_private.modes import TorchDispatchMode, without_tensor_classes
from meshwright.torch_private.modules import REGISTERED, BatchNorm
from meshwright.torch_private.tensors import version_of
from meshwright.torch_private.trees import tree_leaves

FEW = 1 << 24
"""The largest model, in parameters, for which it is tested whether a change depends on the samples; else it does."""
_KEPT_APART = (*REGISTERED, "training")


class StateWatch(AbstractContextManager["StateWatch"]):
    """Finds the tensors and numbers of a model that change while the context is active."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.changed: set[str] = set()
        self.appeared: set[str] = set()
        """Tensors and numbers that did not exist before, such as a hidden state that was None."""
        self.made: set[str] = set()
        """Parameters that were created inside the context."""
        self.after: dict[str, Any] = {}
        """The state at the end."""
        self._reads = _TensorReads()

    def __enter__(self) -> StateWatch:
        self.changed = set()
        self._before = {name: (value, _mark(value)) for name, value in _state(self._model)}
        self._reads.begin(value for value, _ in self._before.values())
        self._reads.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._reads.__exit__(*error)
        self.after = dict(_state(self._model))
        self.made |= {name for name, _ in self._model.named_parameters() if name not in self._before}
        self.appeared |= self.after.keys() - self._before.keys()
        for name, (value, mark) in self._before.items():
            now = self.after.get(name, value)
            if isinstance(value, torch.Tensor):
                # A replaced tensor is state if the old one was read; otherwise the pass only stored something.
                replaced = now is not value and id(value) in self._reads.found
                moved = replaced or (now is value and _mark(now) != mark)
            else:
                moved = now != value
            if moved:
                self.changed.add(name)


def refuse_made(made: Collection[str]) -> None:
    """Refuse parameters made in `forward`: the optimizer and checkpoints know only those of the builder."""
    if made:
        name = sorted(made)[0]
        raise JobError(
            f"The model makes a parameter in its forward pass ({name}), so the optimizer, which is made before, does "
            "not train it; make it in the builder.",
            kind="parameter-made-in-forward",
            name=name,
        )


class Watches(ExitStack):
    """Several watches as one context, entered again for each pass."""

    def __init__(self, *watches: AbstractContextManager[Any]) -> None:
        super().__init__()
        self._watches = watches

    def __enter__(self) -> Watches:
        with ExitStack() as entered:  # if one cannot be entered, those before it are exited
            for watch in self._watches:
                entered.enter_context(watch)
            self.enter_context(entered.pop_all())
        return self


def find_moved(job: Job, model: nn.Module, seen: set[str]) -> tuple[MovedFacts, ...]:
    """The state that every forward pass changes, given what one pass was `seen` to change.

    A cache that the first pass fills (a table of rotary angles) does not change in the second one. BatchNorm's
    statistics are left out: they are synchronised over all ranks.
    """
    if not seen - _statistics(model, set()):
        return ()
    blueprint = record(job.model, seed=0)
    second, norms = StateWatch(blueprint.model), _NormCalls(blueprint.model)
    if not forward_passes(job, blueprint, StateWatch(blueprint.model), Watches(norms, second)):
        return ()
    moved = second.changed - _statistics(blueprint.model, norms.found)
    by_samples = _by_samples(job, moved) if moved else set()
    parameters = dict(blueprint.model.named_parameters(remove_duplicate=False))
    # State that is also trained (an embedding with renormalised rows) depends on the samples through training.
    by_samples |= {name for name in moved if name in parameters and parameters[name].requires_grad}
    saved = blueprint.model.state_dict(keep_vars=True).keys()
    return tuple(
        MovedFacts(name=name, parameter=name in parameters, by_samples=name in by_samples, saved=name in saved)
        for name in sorted(moved)
    )


def _by_samples(job: Job, moved: set[str]) -> set[str]:
    """The names whose changes differ between two batches; all of them if that cannot be tested."""
    try:
        one, other = (_after(job, samples) for samples in (SAMPLES, SAMPLES + 1))
    except Exception:
        return moved
    return {name for name in moved if not _same(one.get(name), other.get(name))}


def _after(job: Job, samples: int) -> dict[str, Any]:
    """The state after a pass over a number of samples, always from the same weights.

    BatchNorms are in eval mode: they would give any whole batch the same mean, but not a rank's part of it.
    """
    blueprint = record(job.model, seed=0)
    if sum(parameter.numel() for parameter in blueprint.model.parameters()) > FEW:
        raise MemoryError("The model is too large to run for this.")
    for module in blueprint.model.modules():
        if isinstance(module, BatchNorm):
            module.eval()
    with torch.random.fork_rng(devices=[]):
        seed_torch(samples)
        batch = make_batch(job, samples)
    watch = StateWatch(blueprint.model)
    forward_on_real_tensors(job, blueprint, batch, watch)
    return watch.after


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(one, other)  # exactly: with made-up weights a change may be tiny
    return type(one) is type(other) and bool(one == other)


def _statistics(model: nn.Module, calling: set[str]) -> set[str]:
    """Buffers of BatchNorms that `F.batch_norm` updates: PyTorch's classes, and modules seen `calling` it."""
    own = (BatchNorm.forward, nn.SyncBatchNorm.forward)
    found = set()
    for name, module in model.named_modules():
        if isinstance(module, BatchNorm) and (type(module).forward in own or name in calling):
            found |= {f"{name}.{buffer}" if name else buffer for buffer in module._buffers}
    return found


class _NormCalls(TorchFunctionMode):
    """Notes which BatchNorms hand their statistics to `batch_norm`."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._model = model
        self.found: set[str] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.batch_norm or func is torch.batch_norm:
            given = {id(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
            self.found |= {n.rpartition(".")[0] for n, b in self._model.named_buffers() if id(b) in given}
        return func(*args, **(kwargs or {}))


def _state(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Tensors and numbers of a model by name: parameters, buffers and plain attributes."""
    yield from named_tensors(model)
    for name, module in model.named_modules():
        for attribute, value in vars(module).items():
            if attribute in _KEPT_APART or (isinstance(value, dict) and not value):  # hooks that nobody registered
                continue
            if isinstance(value, torch.Tensor | int | float | list | tuple | dict):
                for number, leaf in enumerate(tree_leaves(value)):
                    if isinstance(leaf, torch.Tensor | int | float):
                        place = f"{attribute}[{number}]" if isinstance(value, list | tuple | dict) else attribute
                        yield f"{name}.{place}" if name else place, leaf


def _mark(value: Any) -> int:
    with without_tensor_classes():  # a `ComputedTensor` would raise
        return version_of(value) if isinstance(value, torch.Tensor) and not value.is_inference() else 0


class _TensorReads(TorchDispatchMode):
    """Notes which of the given tensors are read."""

    def begin(self, tensors: Any) -> None:
        self._wanted = {id(tensor) for tensor in tensors if isinstance(tensor, torch.Tensor)}
        self.found: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found |= self._wanted.intersection(id(leaf) for leaf in tree_leaves((args, kwargs)))
        return pass_on(func, args, kwargs)
