"""How each way of `gpu_speed.py` makes its step: through the library, by hand, or through another one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from gpu_peers import accelerate_step, fabric_step, pose_as_rank_0, torchtitan_step
from hand_written import one_graph_step, sharded_step, single_step, tensor_step
from lone_rank import join_as_rank_0
from own_process import NotMeasured
from same_start import Sizes, fill, rotary, text_for
from torch import Tensor

Step = Callable[[], Tensor]


def make_step(family: str, sizes: Sizes, ranks: int, way: str, device: torch.device, torchtitan: Path | None) -> Step:
    """The step of a way, which gives this rank's mean loss."""
    if family == "gpt":
        return gpt_step(sizes, way, device)
    join_as_rank_0(ranks, device)
    compiled = way.endswith("compiled") and device.type == "cuda"
    match way:
        case "hand-written" | "hand-written, compiled":
            if family == "tensor":
                return tensor_step(sizes, ranks, device, compiled=compiled)
            return sharded_step(sizes, device, compiled=compiled)
        case "hand-written, one graph":
            return single_step(sizes, device)
        case "Accelerate":
            return accelerate_step(sizes, ranks, device)
        case "Lightning Fabric":
            return fabric_step(sizes, ranks, device)
        case "torchtitan":
            if torchtitan is None:
                raise NotMeasured("no folder; give --torchtitan FOLDER")
            return torchtitan_step(sizes, ranks, device, torchtitan)
    return our_step(sizes, way, ranks, device)


def our_step(sizes: Sizes, text: str, ranks: int, device: torch.device) -> Step:
    from meshwright.assemble.step import Trainer
    from meshwright.assemble.world import World
    from meshwright.describe.model import describe
    from meshwright.facts.strategy import Strategy
    from meshwright.jobs.decoder import Shape, decoder_job

    names = ("layers", "width", "heads", "kv_heads", "feed_forward", "vocabulary", "length")
    shape = Shape(**{name: getattr(sizes, name) for name in names})
    strategy = Strategy.parse(text).resolve(ranks)
    job = decoder_job(shape, global_batch=sizes.samples * strategy.data_ranks)
    world = World(ranks=ranks, device=device, fake=True, weightless=True)
    trainer = Trainer(job, describe(job), strategy, world, seed=0)
    fill((held.name, held.tensor) for held in trainer.engine.held())
    tables = dict(zip(("cos", "sin"), rotary(sizes, device), strict=True))
    for name, buffer in trainer.engine.model.named_buffers():
        buffer.copy_(tables[name])
    trainer.engine.loaded()
    words = text_for(sizes, job.global_batch, device, tensor_ranks=ranks // strategy.data_ranks)
    batch = {"x": words[:, :-1], "y": words[:, 1:]}
    # The loss is the mean of the global batch, of which this rank has its part and the others have nothing.
    return lambda: trainer.step(batch).loss_tensor * strategy.data_ranks


def gpt_step(sizes: Sizes, way: str, device: torch.device) -> Step:
    """One process on a GPT; the weights are those of one seed."""
    from gpt_model import Shape, make_up_batch
    from peers import Accelerate, Fabric, HandWritten, Meshwright, Workload

    shape = Shape(
        layers=sizes.layers,
        width=sizes.width,
        heads=sizes.heads,
        length=sizes.length,
        vocabulary=sizes.vocabulary,
    )
    compiled = device.type == "cuda"
    workload = Workload(
        strategy="single", shape=shape, global_batch=sizes.samples, device=device, bf16=True, compile=compiled
    )
    batch = make_up_batch(shape, sizes.samples, torch.Generator().manual_seed(1))
    batch = {name: tensor.to(device) for name, tensor in batch.items()}
    if way == "hand-written, one graph":
        model = workload.model()
        optimizer = workload.optimizer(model.parameters())
        return one_graph_step(model, (batch["x"],), batch["y"], optimizer, compiled=compiled)
    if way in ("Accelerate", "Lightning Fabric"):
        pose_as_rank_0(1)
    kinds = {"hand-written, model compiled": HandWritten, "Accelerate": Accelerate, "Lightning Fabric": Fabric}
    variant = kinds.get(way, Meshwright)(workload)
    taken = variant.takes(batch)
    return lambda: variant.step(taken)
