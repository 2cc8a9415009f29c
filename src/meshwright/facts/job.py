"""A training job, independent of devices, ranks and strategies."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from meshwright.errors import JobError

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.optim import Optimizer
    from torch.utils.data import Dataset


class NamedParameters(list["nn.Parameter"]):
    """What an optimizer factory receives: a list that `AdamW(params)` accepts; `named()` is for parameter groups."""

    def __init__(self, named: Iterable[tuple[str, nn.Parameter]]) -> None:
        pairs = list(named)
        super().__init__(parameter for _, parameter in pairs)
        self._names = [name for name, _ in pairs]

    def named(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Pairs of the unsplit model's parameter name and the parameter."""
        return zip(self._names, self, strict=True)


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
    """Builds a learning-rate schedule; stepped once per optimizer step."""
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

    def __post_init__(self) -> None:
        optional = ("schedule", "collate", "split", "sample")
        for field in ("model", "inputs", "loss", "optimizer", *optional):
            value = getattr(self, field)
            if not callable(value) and not (value is None and field in optional):
                raise JobError(f"Job({field}=...) must be a function, but it is {type(value).__name__}.")
        if self.loss_over not in (None, "samples", "batch"):
            raise JobError(f'Job(loss_over=...) must be "samples", "batch" or None, but it is {self.loss_over!r}.')
        if isinstance(self.global_batch, bool) or not isinstance(self.global_batch, int) or self.global_batch < 1:
            raise JobError(f"Job(global_batch=...) must be a whole number of samples, but it is {self.global_batch!r}.")
        if self.max_norm is not None and not self.max_norm > 0:
            raise JobError(
                f"Job(max_norm=...) must be above 0, but it is {self.max_norm!r}; leave it out for no clipping."
            )

    def dataset(self) -> Any:
        """The training data, built if the job gives a builder. `describe/data_source.py` says what they are."""
        if self.data is None:
            raise JobError("This job has no data to train on; give Job(data=...) a dataset or a DataLoader.")
        holds_data = hasattr(self.data, "__getitem__") or hasattr(self.data, "__iter__")
        built = isinstance(self.data, type) or (callable(self.data) and not holds_data)
        return self.data() if built else self.data  # type: ignore[operator]  # told apart by what it can do
