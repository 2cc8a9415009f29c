"""Steps of other libraries as rank 0 of a world, each as its documentation advises, with the options that make it fast.

Accelerate and Lightning Fabric train the hand-written model. The loop around them is the user's, so it may compile its
loss, and it does. torchtitan trains its own model under its own parallelisation, from a checkout of its repository
(v0.2.2 runs with PyTorch 2.11); nothing of it is part of this project.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from hand_written import Llama, adamw, loss_of, shard
from peers import _lightning_fabric
from same_start import Sizes, fill, rotary, text_for
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

Step = Callable[[], Tensor]


def pose_as_rank_0(ranks: int) -> None:
    """What the libraries look for to learn that they are ranks already and need not start any."""
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "GROUP_RANK": "0", "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": "1"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "speed"}


def require_sharded(model: nn.Module) -> None:
    """Refuse to measure what only looks like sharding."""
    whole = [name for name, parameter in model.named_parameters() if not isinstance(parameter, DTensor)]
    if whole:
        raise RuntimeError(f"asked to shard, but {len(whole)} parameters are whole, the first is {whole[0]}")


def accelerate_step(sizes: Sizes, ranks: int, device: torch.device) -> Step:
    """Its FSDP2 plugin with its compilation of repeated blocks."""
    from accelerate import Accelerator
    from accelerate.utils import FullyShardedDataParallelPlugin, TorchDynamoPlugin

    pose_as_rank_0(ranks)
    sharding = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Block"],
        mixed_precision_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        cpu_ram_efficient_loading=False,
    )
    compiling = TorchDynamoPlugin(backend="inductor", use_regional_compilation=True)
    accelerator = Accelerator(mixed_precision="bf16", fsdp_plugin=sharding, dynamo_plugin=compiling)
    with device:
        model = Llama(sizes)
    model, optimizer = accelerator.prepare(model, adamw(model.parameters()))
    require_sharded(model)
    fill(model.named_parameters())
    cos, sin = (table.bfloat16() for table in rotary(sizes, device))
    text, compiled_loss = text_for(sizes, sizes.samples, device), torch.compile(loss_of)

    def step() -> Tensor:
        loss: Tensor = compiled_loss(model(text[:, :-1], cos, sin), text[:, 1:])
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def fabric_step(sizes: Sizes, ranks: int, device: torch.device) -> Step:
    """Its ModelParallelStrategy, whose function applies FSDP2 to compiled blocks; FSDP2 chooses the precision."""
    pose_as_rank_0(ranks)
    lightning = _lightning_fabric()
    strategies = import_module(f"{lightning.__name__}.strategies")

    def parallelize(model: Llama, mesh: Any) -> Llama:
        shard(model, compiled=True, mesh=mesh["data_parallel"])
        return model

    strategy = strategies.ModelParallelStrategy(parallelize, data_parallel_size=ranks, tensor_parallel_size=1)
    fabric = lightning.Fabric(accelerator=device.type, devices=1, num_nodes=ranks, strategy=strategy)
    fabric.launch()
    with device:
        model = Llama(sizes)
    model = fabric.setup_module(model)
    require_sharded(model)
    fill(model.named_parameters())
    optimizer = fabric.setup_optimizers(adamw(model.parameters()))
    cos, sin = (table.bfloat16() for table in rotary(sizes, device))
    text, compiled_loss = text_for(sizes, sizes.samples, device), torch.compile(loss_of)

    def step() -> Tensor:
        loss: Tensor = compiled_loss(model(text[:, :-1], cos, sin), text[:, 1:])
        fabric.backward(loss)
        # Its default looks at the norm on the host, which makes every step wait for the device.
        fabric.clip_gradients(model, optimizer, max_norm=1.0, error_if_nonfinite=False)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def _import_torchtitan(folder: Path) -> None:
    """Make the model and its parallelisation importable without the packages of the command line and the data sets.

    Four packages and modules are given without their own code, which only imports the command line's parser, the data
    loaders and the registry of models. Everything that computes is torchtitan's own.
    """
    sys.path.insert(0, str(folder))

    def bare(name: str, **contents: Any) -> None:
        module = ModuleType(name)
        module.__path__ = [str(folder.joinpath(*name.split(".")))]
        vars(module).update(contents)
        sys.modules[name] = module

    bare("torchtitan")
    bare("torchtitan.models.llama3")
    bare("torchtitan.protocols")
    bare("torchtitan.config.manager", ConfigManager=None)
    bare("torchtitan.protocols.train_spec", ModelProtocol=import_module("torchtitan.protocols.model").ModelProtocol)


def torchtitan_step(sizes: Sizes, ranks: int, device: torch.device, folder: Path) -> Step:
    """Its Llama 3 under its `parallelize_llama`, compiled, without recomputation, as its trainer steps it."""
    pose_as_rank_0(ranks)
    _import_torchtitan(folder)
    import_module("torchtitan.tools.utils").device_type = device.type  # it expects CUDA where there is no GPU
    arguments = import_module("torchtitan.models.llama3.model.args")
    config = import_module("torchtitan.config").JobConfig()
    config.training.seq_len, config.compile.enable = sizes.length, device.type == "cuda"
    config.activation_checkpoint.mode = "none"
    dims = import_module("torchtitan.distributed").ParallelDims(
        dp_replicate=1, dp_shard=ranks, cp=1, tp=1, pp=1, ep=1, etp=1, world_size=ranks
    )
    # Its inner width is two thirds of four widths, times a factor, rounded up to a multiple.
    factor = sizes.feed_forward / (8 * sizes.width // 3)
    model_arguments = arguments.TransformerModelArgs(
        dim=sizes.width,
        n_layers=sizes.layers,
        n_heads=sizes.heads,
        n_kv_heads=sizes.kv_heads,
        vocab_size=sizes.vocabulary,
        ffn_dim_multiplier=factor,
        multiple_of=sizes.feed_forward,
        max_seq_len=sizes.length,
        rope_scaling_args=arguments.RoPEScalingArgs(scaling_factor=1.0),  # plain rotary positions, as all others have
    )
    with torch.device("meta"):
        model = import_module("torchtitan.models.llama3.model.model").Transformer(model_arguments)
    wide = model.layers["0"].feed_forward.w1.weight.shape[0]
    if wide != sizes.feed_forward:
        raise RuntimeError(f"torchtitan made feed-forward layers of {wide} instead of {sizes.feed_forward}")
    parallelize = import_module("torchtitan.models.llama3.infra.parallelize").parallelize_llama
    model = parallelize(model, dims, config)
    model.to_empty(device=device)
    with torch.no_grad():
        model.init_weights(buffer_device=device)
    require_sharded(model)
    fill(model.named_parameters(), neighbours=sizes.head_width)
    optimizer = adamw(model.parameters())
    loss_sum = import_module("torchtitan.components.loss").build_cross_entropy_loss(config)
    clip = import_module("torchtitan.distributed.utils").clip_grad_norm_
    text = text_for(sizes, sizes.samples, device)

    def step() -> Tensor:
        loss: Tensor = loss_sum(model(text[:, :-1]), text[:, 1:]) / sizes.tokens
        loss.backward()
        clip(list(model.parameters()), 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step
