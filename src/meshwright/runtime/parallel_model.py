"""`Parallel`: a laid-out model that a user's loop can treat like the model itself."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from meshwright.checkpoint.folder import find_checkpoint
from meshwright.checkpoint.load import load
from meshwright.checkpoint.manifest import RunState
from meshwright.checkpoint.save import Saver, save_at
from meshwright.errors import CheckpointError, JobError
from meshwright.facts.position import DataPosition
from meshwright.runtime.divided_loader import divide_loader
from meshwright.runtime.loop_batches import Batches
from meshwright.runtime.own_loop import OwnLoop
from meshwright.torch_private.loaded import compiler_is_loaded
from meshwright.torch_private.modules import FixedModule, incompatible_keys


class Parallel(FixedModule):
    """The model that `parallelize` returns. It is called, trained and evaluated like the user's own, `module`.

    Each data rank calls it on its own samples and calls `backward` on the mean loss over them. When the pass ends,
    gradients are averaged over the ranks. Attributes and methods that it does not have are the model's.
    """

    def __init__(self, loop: OwnLoop, batches: Batches | None = None) -> None:
        super().__init__()
        self.module = loop.engine.model
        self.loop, self._batches = loop, batches
        self.strategy, self.world, self.device = loop.strategy, loop.world, loop.world.device
        self.data_ranks = 1 if loop.strategy.traits.many_devices else loop.axes.data_ranks
        self.data_rank = loop.axes.data_rank if self.data_ranks > 1 else 0
        self._saver: Saver | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.strategy.compile or not compiler_is_loaded():
            return self.loop.call(*args, **kwargs)
        # A compiler of the user's must not look into hooks and collectives: ranks would wait for each other.
        return torch.compiler.disable(self.loop.call)(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters to give to an optimizer, by the model's own names: whole ones, or this rank's shards."""
        start = f"{prefix}." if prefix else ""
        yield from ((f"{start}{name}", parameter) for name, parameter in self.loop.named())

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, torch.Tensor]]:
        return self.module.named_buffers(prefix, recurse, remove_duplicate)

    def divide(self, loader: DataLoader[Any]) -> DataLoader[Any]:
        """A DataLoader like the given one that gives this data rank its part of each batch. All ranks call it.

        The batches are those of one process, in its order. Samplers follow rank 0's random state.
        """
        return divide_loader(loader, rank=self.data_rank, ranks=self.data_ranks, world=self.world)

    def no_sync(self) -> AbstractContextManager[None]:
        """Context for backward passes of all but the last micro-batch of a step; every rank must run as many.

        Whole gradients are then reduced once, in the first pass outside of it. Sharded ones are reduced in each pass
        anyway, unless the strategy says `sync=last`.
        """
        return self.loop.no_sync()

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.loop.before_zero_grad()
        super().zero_grad(set_to_none)

    def global_mean(self, total: torch.Tensor, weight: float | torch.Tensor) -> torch.Tensor:
        """The mean loss over the samples of all data ranks, from the sum of this rank's losses and their number.

        It can be differentiated where ranks have different numbers of samples. All data ranks must call it.
        """
        return self.loop.global_mean(total, weight)

    def forward_backward(self, batch: Any, *, scale: float = 1.0) -> torch.Tensor:
        """Add the gradient of a global batch's mean loss, times `scale`, to the gradients, and return the loss.

        It runs under every strategy, also under pipelines. Every rank gives the same batch; `parallelize` must have got
        `loss` and `sample`.
        """
        return self._batches_of("forward_backward").forward_backward(batch, scale)

    def evaluate(self, batches: Iterable[Any]) -> float:
        """The mean loss over global batches, in eval mode; changes nothing. Runs under every strategy."""
        return self._batches_of("evaluate").evaluate(batches)

    def _batches_of(self, call: str) -> Batches:
        if self._batches is None:
            raise JobError(
                f"model.{call} computes the loss, so mw.parallelize must know it: give loss=..., a function from "
                "(output, batch) to (sum, weight), and sample=..., an example of a batch."
            )
        return self._batches

    @property
    def step_was_skipped(self) -> bool:
        """Whether fp16 gradients overflowed, so that the last optimizer step updated nothing."""
        return self.loop.step_was_skipped

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]  # its overloads
        """Every parameter and buffer whole, by the model's own names, on the CPU. All ranks must call it."""
        self.loop.before_state()
        prefix = kwargs.get("prefix", args[1] if len(args) > 1 else "")
        return {f"{prefix}{name}": tensor.detach().cpu().clone() for name, tensor in self.loop.engine.state()}

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load whole tensors by the model's own names. All ranks must call it with the same values."""
        wanted = {name for parameter in self.loop.facts.parameters for name in parameter.names}
        wanted |= {held.name for held in self.loop.engine.held()}
        missing, unexpected = sorted(wanted - set(state_dict)), sorted(set(state_dict) - wanted)
        if strict and (missing or unexpected):
            what = f"lacks {missing[0]}" if missing else f"has {unexpected[0]}, which the model does not have"
            raise JobError(f"The state given to load_state_dict {what}; give strict=False to load the rest.")
        self.loop.put({name: state_dict[name] for name in wanted if name in state_dict})
        return incompatible_keys(missing, unexpected)

    def save(self, path: str | Path, *, samples: int = 0, weights_only: bool = False) -> None:
        """Write a checkpoint that any strategy on any number of ranks loads, `mw.setup` included. All ranks call it.

        It holds the optimizer and the scheduler that were given to `parallelize`. `samples` is the loop's position.
        """
        self.loop.before_state()
        if weights_only:
            with self.loop.without_optimizer():
                save_at(Saver(self.loop), DataPosition(samples=samples), Path(path))
            return
        self.loop.refuse_unsaved()
        if self._saver is None:
            self._saver = Saver(self.loop)
        save_at(self._saver, DataPosition(samples=samples), Path(path))

    def load(self, path: str | Path, *, weights_only: bool = False) -> RunState:
        """Continue from a checkpoint of `save`, `train` or `mw.setup`. All ranks call it."""
        folder = find_checkpoint(Path(path))
        if weights_only:
            with self.loop.without_optimizer():
                return load(self.loop, folder)
        if self.loop.optimizer is None:
            raise CheckpointError(
                "model.load(path) continues with the checkpoint's optimizer, but none was given to "
                "mw.parallelize(optimizer=...); give it there, or load the weights alone with weights_only=True."
            )
        return load(self.loop, folder)

    def close(self) -> None:
        """Leave the process group, which ends all models of the loop."""
        if self._saver is not None:
            self._saver.close()
        self.world.leave()

    def refuse_change(self, what: str) -> None:
        raise JobError(
            f"The model is laid out under {self.strategy} and cannot be moved or cast to {what}; name device and "
            "precision in mw.parallelize(model, strategy, device=...)."
        )

    def refuse_ddp(self) -> None:
        raise JobError(
            f"The model is laid out under {self.strategy}, which averages gradients itself; leave out "
            "DistributedDataParallel, which would also overwrite the parts of tp and op."
        )

    def __deepcopy__(self, memo: Any) -> Any:
        raise JobError(
            "A laid-out model cannot be copied with its hooks and shards; lay out a second one, and give it the state: "
            "other = mw.parallelize(...); other.load_state_dict(model.state_dict())."
        )
