"""Host seconds of an engine, by what causes them. Devices wait if their host is late; a CPU rank is its own host."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar


@dataclass(frozen=True, kw_only=True)
class HostCosts:
    """Host seconds of one engine.

    Python, autograd and the engine launch each kernel, and a device waits if they are late. Engines differ in this more
    than in anything else, so each `StepLayout` names its engine's costs.
    """

    operator: float = 26e-6
    """Added to each launch in eager mode. A step of a GPT of 24 layers under ddp,bf16 takes 54.6 ms on an H200, which
    would compute it in 30 (docs/data/gpu_check.json): some 1,400 operators at 30 us, and 9 ms. Steps of published
    sweeps with small micro-batches fit best with 32."""
    step: float = 6e-3
    """Once per step, while the device waits: reading the loss and the norm, starting the optimizer (same rows)."""
    step_of_graphs: float = 2e-3
    """The same if a CUDA graph runs the passes: the host is done before the device. A GPT of 10M parameters takes
    6.8 ms on an H200 (docs/data/host_gaps.json), and its kernels 4.7 by this forecast. Fitted to this one row."""
    tensor: float = 0.0
    """Added to `step` for each parameter: clipping and the optimizer collect them in Python lists."""
    shard: float = 1.1e-3
    """For gathering or reducing one block's parameters, in FSDP2 and our ZeRO: the same step takes 99 ms under zero1,
    112 under fsdp:grad-op and 143 under fsdp, with 50, 50 and 75 of them."""
    bucket: tuple[float, float] = (1.1e-3, 0.0)
    """For one unit's gradients that ZeRO reduces in backward, and for its parameters after the update."""
    piece: tuple[float, float] = (0.0, 0.0)
    """The same for each parameter of the unit, which is packed, made a shard and unpacked by itself."""
    collective: float = 300e-6
    """For a collective that compute waits for. On H100 nodes under nanotron (ultra-scale playbook), a decoder block
    with a tensor axis takes 4.4 to 4.8 ms however narrow it is: its eight collectives, apart from the launches."""
    copied: float = 0.0
    """For each byte of a collective that compute waits for, where ranks copy it themselves, as on CPUs: into a tensor
    that was just made, out of caches that other work has filled."""
    stall: float = 200e-6
    """Added to each collective of a tensor axis if a pipeline's neighbours are on other nodes, times its ranks to the
    power of `growth`: hosts that wait for the network arrive late, and a collective waits for the last one (same sweep:
    0.5 ms with 2 ranks, 1.1 with 4, 2.2 with 8 and 5 with 16, on 4 to 64 nodes)."""
    growth: ClassVar[float] = 1.1
    """Fitted to the same runs, and so are the next two."""
    apart: ClassVar[float] = 1.13
    """How much longer an axis over several nodes waits."""
    crowding: ClassVar[float] = 0.05
    """How much longer hosts wait with each doubling of the pipelines that send over the same network, as a share."""
    neighbour: float = 300e-6
    """For receiving a micro-batch's activations or gradients and sending the results on, in PyTorch's pipeline runtime:
    two batched sends and receives."""
    divided: tuple[float, float] = (0.0, 0.0)
    """Added to each launch, in forward and in backward, of a unit that a tensor axis divides and that has no program:
    what is outside of blocks."""
    repeated: float = 0.0
    """For one block that recomputes, besides its launches."""
    selected: float = 0.0
    """Added to each launch of a forward pass, once in forward and once in backward, under selective checkpointing: it
    notes functions, and exchanges what autograd saved."""
    node: float = 1e-6
    """For one kernel of a CUDA graph, in the launch of the whole."""
    launch: float = 6e-6
    """For one operator on almost no data, where these numbers were found."""
    clip_bytes: int = 0
    """Bytes per element that the device moves to clip a gradient before the optimizer's kernel."""
    gathers_by_copy: bool = False
    """Whether gathered parameters are copied to the place that forward reads, as in FSDP2."""

    def at(self, launch: float) -> HostCosts:
        """The same on a host that needs `launch` seconds for an operator on almost no data."""
        return replace(self.scaled(launch / self.launch), launch=launch)

    def scaled(self, times: float) -> HostCosts:
        """The same on a host that takes `times` as long for everything."""
        changed: dict[str, Any] = {}
        for item in fields(self):
            value = getattr(self, item.name)
            if item.type == "float":
                changed[item.name] = value * times
            elif isinstance(value, tuple):
                changed[item.name] = tuple(seconds * times for seconds in value)
        return replace(self, **changed)


HOST_REFERENCE = 4.8e-3
"""Seconds of the reference pass (`tracing/host_passes.py`) on an H200's host: the median of the 355 times that it was
measured there, of which half lie between 4.2 and 6.8 ms (`reference_ms` of docs/data/unseen_*.json)."""

OTHER_ENGINES = HostCosts()
"""Engines in eager PyTorch with published measurements."""

OURS = HostCosts(
    operator=18e-6,
    step=1.5e-3,
    tensor=15e-6,
    shard=0.85e-3,
    bucket=(0.47e-3, 0.26e-3),
    piece=(56e-6, 30e-6),
    clip_bytes=12,
    collective=100e-6,
    divided=(290e-6, 75e-6),
    repeated=0.4e-3,
    selected=20e-6,
    gathers_by_copy=True,
)
"""Our engine, on an H200's host (docs/data/plan_gpu.json): a Llama of 28 blocks took 381 ms under tp=8, without
programs, whose kernels run 121, and 457 under tp=2; a GPT of 48 blocks 183 ms under fsdp, whose kernels run 119,
and 168 under ac=selective instead of 136 (benchmarks/recompute_cost.py); a ViT of 24 blocks 82 ms under ac=full and 55
without. `step` is one of a single weight. `bucket` and `piece` were timed on a CPU, on models of 8 and 24 blocks with 4
and 16 parameters each, and scaled by the reference pass: a GPT of 24 blocks and 292 parameters takes 44 ms longer under
zero1 than under ddp on an H200 (docs/data/gpu_check.json), and 43 by these. Clipping reads gradients for the norm, and
reads and writes them to scale them: with the update 38 to 41 bytes (kernels of docs/data/unseen_gpu.json)."""

ON_CPU = HostCosts(
    operator=5.1e-6,
    step=8e-3,
    shard=3.4e-3,
    bucket=(3.4e-3, 0.0),
    collective=1.1e-3,
    copied=4.5e-9,
    neighbour=1.5e-3,
    divided=(310e-6, 80e-6),
    repeated=0.4e-3,
    selected=20e-6,
    launch=10.4e-6,
    gathers_by_copy=True,
)
"""Our engine on CPU ranks under gloo, two on a core, fitted to the 60 steps of docs/data/planner_on_links.json whose
link has no limit, not to those on slow links. `repeated` and `selected` are the GPU host's."""
