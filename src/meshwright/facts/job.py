"""A training job, independent of devices, ranks and strategies."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from meshwright.errors import JobError
from meshwright.facts.evaluation import EMA, LOSS, EarlyStop, Evaluation
from meshwright.facts.lr_schedule import EACH, STEP
from meshwright.facts.parameter_groups import Patterns, group_by_pattern

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.optim import Optimizer
    from torch.utils.data import Dataset

ALL, TRAINED = "all", "trained"
"""What checkpoints hold of a model."""


class NamedParameters(list["nn.Parameter"]):
    """What an optimizer factory receives: a list that `AdamW(params)` accepts; `named()` is for parameter groups."""

    def __init__(self, named: Iterable[tuple[str, nn.Parameter]], *, whole: bool = False) -> None:
        """`whole`: these are the parameters of the whole model, not of a pipeline's stage."""
        pairs = list(named)
        super().__init__(parameter for _, parameter in pairs)
        self._names = [name for name, _ in pairs]
        self._whole = whole

    def named(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Pairs of the unsplit model's parameter name and the parameter."""
        return zip(self._names, self, strict=True)

    def groups(self, patterns: Patterns) -> list[dict[str, Any]]:
        """Parameter groups by patterns of names, and a last group for the rest.

        `AdamW(params.groups({("*.bias", "*norm*"): {"weight_decay": 0.0}}), lr=3e-4)`. The first pattern that matches
        a name takes it.
        """
        return group_by_pattern(self.named(), patterns, self._names if self._whole else None)


@dataclass(frozen=True, kw_only=True)
class Job:
    """Model, inputs, loss, optimizer, data and global batch of a training run."""

    model: Callable[[], nn.Module]
    """Builds the model. It is recorded with meta tensors, so it must not read weights."""
    inputs: Callable[[Any], Sequence[Any] | Mapping[str, Any]]
    """From a batch to what `model()` takes: positional arguments as a tuple, or keyword arguments as a dict."""
    loss: Callable[[Any, Any], tuple[torch.Tensor, float | torch.Tensor]]
    """From (output, batch) to (sum, weight). A mean over samples is the sum with weight = samples."""
    optimizer: Callable[[NamedParameters], Optimizer]
    """Builds the optimizer from the parameters that this rank updates."""
    global_batch: int
    """Samples of one optimizer step, over all ranks and micro-batches."""
    schedule: Callable[[Optimizer], Any] | None = None
    """Builds a learning-rate schedule."""
    schedule_by: str = STEP
    """When the schedule is stepped: after each optimizer "step", after each "epoch", or after each "evaluation", with
    its loss."""
    loss_over: str | None = None
    """What `loss` sums over: "samples", or "batch" if it compares samples with each other, as contrastive losses do.
    For "batch", it gets the outputs of all ranks and micro-batches. None: determined by trying."""
    max_norm: float | None = None
    """Clip gradients to this global norm; None does not clip."""
    data: Callable[[], Any] | Dataset[Any] | Iterable[Any] | None = None
    """A map-style dataset, an iterable (a stream), a DataLoader over either, or a function that builds one of them.
    Only training needs it."""
    collate: Callable[[list[Any]], Any] | None = None
    """From a list of samples to a batch, called for each micro-batch. None: the DataLoader's, or PyTorch's default."""
    split: Callable[[Any], Sequence[Any]] | None = None
    """The inverse of `collate`, from a batch to the list of its samples. Only needed if a whole batch must be cut and
    comparing batches of several sizes does not show how samples are laid out."""
    sample: Callable[[int], Any] | None = None
    """Makes a batch of n synthetic samples, for planning, dry runs and verifying."""
    blocks: Sequence[str] | None = None
    """Hint: names of the repeated modules, if they cannot be found."""
    units: Sequence[str] | int | None = None
    """Hint: what FSDP gathers together, as classes or names of modules ("LlamaDecoderLayer", "model.layers.*"), or as
    the least number of parameters of a unit. None: the blocks, and the modules around them that are as large."""
    tensor_plan: Mapping[str, str] | None = None
    """Hint: how tensor parallelism splits each module."""
    stages: Sequence[str] | None = None
    """Hint: the first module of each pipeline stage."""
    evaluation: Evaluation | None = None
    """What `train` evaluates, and when."""
    ema: float | None = None
    """Decay of an exponential moving average of the trained weights, such as 0.999; None keeps no average."""
    early_stop: EarlyStop | None = None
    """When evaluations end the run."""
    on_step: Callable[[Any], Any] | None = None
    """Called by `train` on every rank after each step, with a `StepEvent`. Returning True ends the run."""
    on_eval: Callable[[Any], Any] | None = None
    """The same after each evaluation, with an `EvalEvent`."""
    on_save: Callable[[Any], Any] | None = None
    """The same when a checkpoint is complete, with a `SaveEvent`."""
    save: str = ALL
    """What checkpoints hold of the model: "all", or "trained", which leaves out frozen parameters that `model` makes
    again, such as those of `from_pretrained`, and stores fingerprints of them."""
    on_gradient: Callable[[str, torch.Tensor], torch.Tensor | None] | None = None
    """From a parameter's name and its gradient over the global batch to another gradient, before clipping. None keeps
    the gradient, which may have been changed in place. It must treat each element by itself if a strategy divides
    gradients."""

    def __post_init__(self) -> None:
        self._check_functions()
        self._check_values()
        self._check_evaluation()

    def _check_functions(self) -> None:
        callbacks = ("on_step", "on_eval", "on_save", "on_gradient")
        optional = ("schedule", "collate", "split", "sample", *callbacks)
        for field in ("model", "inputs", "loss", "optimizer", *optional):
            value = getattr(self, field)
            if not callable(value) and not (value is None and field in optional):
                raise JobError(f"Job({field}=...) must be a function, but it is {type(value).__name__}.")

    def _check_values(self) -> None:
        if self.loss_over not in (None, "samples", "batch"):
            raise JobError(f'Job(loss_over=...) must be "samples", "batch" or None, but it is {self.loss_over!r}.')
        if isinstance(self.global_batch, bool) or not isinstance(self.global_batch, int) or self.global_batch < 1:
            raise JobError(f"Job(global_batch=...) must be a whole number of samples, but it is {self.global_batch!r}.")
        if self.max_norm is not None and not self.max_norm > 0:
            raise JobError(
                f"Job(max_norm=...) must be above 0, but it is {self.max_norm!r}; leave it out for no clipping."
            )
        if self.save not in (ALL, TRAINED):
            raise JobError(f'Job(save=...) must be "{ALL}" or "{TRAINED}", but it is {self.save!r}.')
        if self.schedule_by not in EACH:
            raise JobError(f"Job(schedule_by=...) must be one of {', '.join(EACH)}, but it is {self.schedule_by!r}.")
        if self.ema is not None and not 0 < self.ema < 1:
            raise JobError(f"Job(ema=...) must be a decay between 0 and 1, such as 0.999, but it is {self.ema!r}.")

    def _check_evaluation(self) -> None:
        found = self.evaluation
        if found is None:
            wanting = ["early_stop"] * (self.early_stop is not None) + ["on_eval"] * (self.on_eval is not None)
            wanting += ["schedule_by"] * (self.schedule_by == "evaluation")
            if wanting:
                raise JobError(f"Job({wanting[0]}=...) needs evaluations; give Job(evaluation=Evaluation(data=...)).")
            return
        if not isinstance(found, Evaluation):
            raise JobError(f"Job(evaluation=...) must be an Evaluation, but it is {type(found).__name__}.")
        if found.weights == EMA and self.ema is None:
            raise JobError('Evaluation(weights="ema") needs averaged weights; give Job(ema=...) a decay.')
        if self.early_stop is not None and self.early_stop.metric not in (LOSS, *found.metrics):
            raise JobError(
                f"EarlyStop(metric={self.early_stop.metric!r}) is not measured; "
                f"evaluations have {', '.join((LOSS, *found.metrics))}."
            )
        if not found.each_epoch and found.every is None and (self.early_stop or self.schedule_by == "evaluation"):
            raise JobError("Nothing is evaluated before the end of the run; give Evaluation(every=...) or each_epoch.")

    def dataset(self) -> Any:
        """The training data, built if the job gives a builder. `describe/data_source.py` says what they are."""
        if self.data is None:
            raise JobError("This job has no data to train on; give Job(data=...) a dataset or a DataLoader.")
        holds_data = hasattr(self.data, "__getitem__") or hasattr(self.data, "__iter__")
        built = isinstance(self.data, type) or (callable(self.data) and not holds_data)
        return self.data() if built else self.data  # type: ignore[operator]  # told apart by what it can do

    def for_evaluation(self) -> Job:
        """The job with its evaluation data in place of the training data."""
        assert self.evaluation is not None
        found = self.evaluation
        batch, collate = found.batch or self.global_batch, found.collate or self.collate
        return replace(self, data=found.data, collate=collate, global_batch=batch)
