"""One training step in many hands: a hand-written PyTorch loop, Meshwright, Accelerate, Lightning Fabric, DeepSpeed.

All take the same model from the same seed, the same batches, the same optimizer and the same clipping. Each is written
as its documentation advises, with the options that make it fast where it has them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
from gpt_model import GPT, Shape, make_up_batch, next_token_loss
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW, Optimizer

import meshwright as mw

SEED = 0
MAX_NORM = 1.0
Batch = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What every variant trains, and where."""

    strategy: str
    """"ddp", "zero1", "zero2" or "fsdp" over ranks, "single" for one process."""
    shape: Shape
    global_batch: int
    device: torch.device
    rank: int = 0
    ranks: int = 1
    bf16: bool = False
    compile: bool = False

    def model(self) -> GPT:
        torch.manual_seed(SEED)
        return GPT(self.shape).to(self.device)

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> AdamW:
        # PyTorch's own choice on a CPU; its fastest on a GPU.
        return AdamW(parameters, lr=3e-4, fused=True if self.device.type == "cuda" else None)

    def own_rows(self, batch: Batch) -> Batch:
        """This rank's part of a global batch."""
        size = self.global_batch // self.ranks
        return {name: tensor[self.rank * size :][:size].contiguous() for name, tensor in batch.items()}


class CannotRun(Exception):
    """This variant does not do here what was asked of it; the message says why."""


class Variant(ABC):
    """A way to train, made on every rank. `step` takes an optimizer step and gives the loss that its loop would log."""

    name: str
    model: nn.Module
    sees_global_loss = False
    """Whether `step` gives the mean loss of all ranks rather than this rank's."""
    why = "cause unknown"
    """What explains that a strategy was not followed."""

    def __init__(self, workload: Workload) -> None:
        self.workload = workload

    @abstractmethod
    def step(self, batch: Batch) -> Tensor: ...

    def takes(self, batch: Batch) -> Batch:
        """What `step` is given of a global batch."""
        return self.workload.own_rows(batch)

    def tensors(self) -> Iterator[Tensor]:
        """This rank's part of each parameter."""
        for parameter in self.model.parameters():
            yield parameter.to_local() if isinstance(parameter, DTensor) else parameter.detach()

    def require_strategy(self) -> None:
        """Refuse what only looks like sharding, and what the variant has not."""
        if self.workload.strategy in ("zero1", "zero2"):
            raise CannotRun("it has no ZeRO of its own")
        if self.workload.strategy != "fsdp":
            return
        whole = [n for n, p in self.model.named_parameters() if not isinstance(p, DTensor) or not _is_cut(p)]
        if whole:
            raise CannotRun(f"it was asked to shard, but {len(whole)} parameters are whole on every rank: {self.why}")


def _is_cut(parameter: DTensor) -> bool:
    return parameter.to_local().numel() < parameter.numel()


class HandWritten(Variant):
    """What every other variant is compared with."""

    name = "hand-written"

    def __init__(self, workload: Workload) -> None:
        super().__init__(workload)
        self.model = _lay_out_by_hand(workload.model(), workload)
        self.optimizer = workload.optimizer(self.model.parameters())

    def step(self, batch: Batch) -> Tensor:
        with self._autocast():
            loss = next_token_loss(self.model(batch["x"]), batch)
        loss.backward()
        clip_grad_norm_(self.model.parameters(), MAX_NORM)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def _autocast(self) -> AbstractContextManager[Any]:
        return torch.autocast(self.workload.device.type, torch.bfloat16) if self.workload.bf16 else nullcontext()


class HandWrittenAgain(HandWritten):
    """The same once more: how far its ratio is from 1 is the noise of the measurement."""

    name = "hand-written again"


def _lay_out_by_hand(model: GPT, workload: Workload) -> nn.Module:
    if workload.strategy == "fsdp":
        return _shard_by_hand(model)
    if workload.strategy == "ddp":
        return DistributedDataParallel(model, gradient_as_bucket_view=True)
    return torch.compile(model) if workload.compile else model


def _shard_by_hand(model: GPT, **options: Any) -> GPT:
    for block in model.blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)
    return model


class Meshwright(Variant):
    name = "Meshwright"
    sees_global_loss = True
    terms: tuple[str, ...] = ()
    """What the strategy's text says beside the workload's."""

    def __init__(self, workload: Workload) -> None:
        super().__init__(workload)
        terms = [workload.strategy, *["bf16"] * workload.bf16, *["compile"] * workload.compile, *self.terms]
        job = meshwright_job(workload.shape, workload.global_batch, workload.optimizer)
        self.run = mw.setup(job, ",".join(terms), seed=SEED, device=workload.device.type)
        self.model = self.run.trainer.engine.model

    def require_strategy(self) -> None:
        if self.workload.strategy == "fsdp":
            super().require_strategy()

    def takes(self, batch: Batch) -> Batch:
        return batch  # `run.step` cuts it itself

    def step(self, batch: Batch) -> Tensor:
        return self.run.step(batch).loss_tensor


def meshwright_job(shape: Shape, global_batch: int, optimizer: Any) -> mw.Job:
    return mw.Job(
        model=partial(GPT, shape),
        inputs=lambda batch: (batch["x"],),
        loss=lambda logits, batch: (next_token_loss(logits, batch, "sum"), batch["y"].numel()),
        optimizer=optimizer,
        max_norm=MAX_NORM,
        sample=partial(make_up_batch, shape),
        global_batch=global_batch,
    )


class DeepSpeed(Variant):
    """Used as its documentation says, with the same optimizer."""

    name = "DeepSpeed"

    def __init__(self, workload: Workload) -> None:
        import deepspeed

        super().__init__(workload)
        if workload.strategy not in STAGES or workload.compile:
            raise CannotRun("it is compared where the strategy is a stage of ZeRO, and without compile")
        model = workload.model()
        self.model, *_ = deepspeed.initialize(
            model=model,
            optimizer=workload.optimizer(model.parameters()),
            dist_init_required=False,
            config={
                "train_batch_size": workload.global_batch,
                "train_micro_batch_size_per_gpu": workload.global_batch // workload.ranks,
                "gradient_clipping": MAX_NORM,
                "zero_optimization": {"stage": STAGES[workload.strategy]},
                "zero_allow_untested_optimizer": True,
                "steps_per_print": 10**9,
            },
        )

    def require_strategy(self) -> None:
        """Its stage is in its config."""

    def tensors(self) -> Iterator[Tensor]:
        return (parameter.detach() for parameter in self.model.module.parameters())

    def step(self, batch: Batch) -> Tensor:
        loss = next_token_loss(self.model(batch["x"]), batch)
        self.model.backward(loss)
        self.model.step()
        return loss.detach()


STAGES = {"ddp": 0, "zero1": 1, "zero2": 2, "fsdp": 3}


class MeshwrightOnDeepSpeed(Meshwright):
    """Our loop, their engine."""

    name = "Meshwright, engine=deepspeed"
    terms = ("engine=deepspeed",)

    def __init__(self, workload: Workload) -> None:
        if workload.strategy not in STAGES or workload.compile:
            raise CannotRun("it is compared where the strategy is a stage of ZeRO, and without compile")
        super().__init__(workload)

    def require_strategy(self) -> None:
        """`setup` has refused what is not so."""


class Accelerate(Variant):
    name = "Accelerate"

    def __init__(self, workload: Workload) -> None:
        from accelerate import Accelerator
        from accelerate.utils import DistributedDataParallelKwargs, FullyShardedDataParallelPlugin, TorchDynamoPlugin

        super().__init__(workload)
        sharding = FullyShardedDataParallelPlugin(
            fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["Block"]
        )
        self.accelerator = Accelerator(
            # Without it, each CPU rank would train alone.
            cpu=workload.device.type == "cpu",
            mixed_precision="bf16" if workload.bf16 else "no",
            fsdp_plugin=sharding if workload.strategy == "fsdp" else None,
            dynamo_plugin=TorchDynamoPlugin(backend="inductor") if workload.compile else None,
            kwargs_handlers=[DistributedDataParallelKwargs(gradient_as_bucket_view=True)],
        )
        model = workload.model()
        self.model, self.optimizer = self.accelerator.prepare(model, workload.optimizer(model.parameters()))
        self.why = f"Accelerate chose {self.accelerator.distributed_type.value} and {type(self.model).__name__}"

    def step(self, batch: Batch) -> Tensor:
        loss = next_token_loss(self.model(batch["x"]), batch)
        self.accelerator.backward(loss)
        self.accelerator.clip_grad_norm_(self.model.parameters(), MAX_NORM)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()


class Fabric(Variant):
    name = "Lightning Fabric"

    def __init__(self, workload: Workload) -> None:
        super().__init__(workload)
        lightning = _lightning_fabric()
        self.fabric = lightning.Fabric(
            accelerator=workload.device.type,
            devices=workload.ranks,
            strategy=_fabric_strategy(lightning, workload),
            precision="bf16-mixed" if workload.bf16 else "32-true",
        )
        self.fabric.launch()
        model: nn.Module = workload.model()
        # Fabric takes the compiled model apart and compiles again around its own precision.
        self.model = self.fabric.setup_module(torch.compile(model) if workload.compile else model)
        optimizer: Optimizer = workload.optimizer(self.model.parameters())
        self.optimizer = self.fabric.setup_optimizers(optimizer)

    def step(self, batch: Batch) -> Tensor:
        loss = next_token_loss(self.model(batch["x"]), batch)
        self.fabric.backward(loss)
        # Its default looks at the norm on the host, which makes every step wait for the device.
        self.fabric.clip_gradients(self.model, self.optimizer, max_norm=MAX_NORM, error_if_nonfinite=False)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()


def _lightning_fabric() -> ModuleType:
    """Fabric lies in `lightning`, or on its own where only `pytorch-lightning` is installed."""
    try:
        return import_module("lightning.fabric")
    except ImportError:
        return import_module("lightning_fabric")


def _fabric_strategy(lightning: ModuleType, workload: Workload) -> Any:
    strategies = import_module(f"{lightning.__name__}.strategies")
    if workload.strategy == "fsdp":
        return strategies.ModelParallelStrategy(
            parallelize_fn=lambda model, mesh: _shard_by_hand(model, mesh=mesh["data_parallel"]),
            data_parallel_size=workload.ranks,
            tensor_parallel_size=1,
        )
    return strategies.DDPStrategy(gradient_as_bucket_view=True) if workload.strategy == "ddp" else "auto"


VARIANTS: list[type[Variant]] = [HandWritten, Meshwright, Accelerate, Fabric]
ON_DEEPSPEED: list[type[Variant]] = [DeepSpeed, MeshwrightOnDeepSpeed]
