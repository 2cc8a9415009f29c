"""What the host adds to a step: Python, autograd and the engine ask for each kernel; a device waits if they are late.

Engines differ in this more than in anything else, so an `StepLayout` says whose costs are its own.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class HostCosts:
    """Seconds of one engine's host."""

    operator: float = 24e-6
    """Added to each launch in eager mode. A step of a GPT of 24 layers under ddp,bf16 takes 54.6 ms on an H200, which
    would compute it in 30 (docs/data/gpu_check.json): some 1,400 operators at 30 us, and 9 ms."""
    step: float = 6e-3
    """Of a step, in which the device waits: the loss is read, the norm, the optimizer is asked (the same rows)."""
    shard: float = 1.1e-3
    """Of gathering or reducing one block's parameters, in FSDP2 and in our ZeRO: the same step takes 99 ms under zero1,
    112 under fsdp:grad-op and 143 under fsdp, with 50, 50 and 75 of them."""
    collective: float = 300e-6
    """Of a collective that compute waits for: with a tensor axis a block of a decoder takes 4.4 to 4.8 ms however
    narrow it is, on H100 nodes under nanotron (published sweep of the ultra-scale playbook), of which its eight
    collectives are all but the launches."""
    stall: float = 260e-6
    """That each rank of a tensor axis adds to each of its collectives where a pipeline's neighbours are on other nodes:
    hosts that also wait for the network meet late, and a collective waits for the last (same sweep)."""
    neighbour: float = 300e-6
    """Of receiving a micro-batch's activations or gradients and sending the results on, in PyTorch's pipeline runtime:
    two batched sends and receives."""
    divided: tuple[float, float] = (0.0, 0.0)
    """Added to each launch, in forward and in backward, where a tensor axis divides the block."""
    repeated: float = 0.0
    """Of one block that recomputes, beside its launches."""
    selected: float = 0.0
    """Added to each launch of forward, and of its repetition, where each is asked whether its result is kept."""
    gathers_by_copy: bool = False
    """Whether gathered parameters are copied to where they are read, as FSDP2 does."""


ELSEWHERE = HostCosts()
"""Of engines in eager PyTorch whose measurements were published."""

OURS = HostCosts(
    operator=18e-6,
    shard=0.85e-3,
    collective=100e-6,
    divided=(290e-6, 75e-6),
    repeated=0.4e-3,
    selected=50e-6,
    gathers_by_copy=True,
)
"""Of our engine, on an H200's host (docs/data/plan_gpu.json): a Llama of 28 blocks takes 381 ms under tp=8, whose
kernels run 121, and 457 under tp=2; a GPT of 48 blocks 183 ms under fsdp, whose kernels run 119, and 302 under
ac=selective instead of 137; a ViT of 24 blocks 82 ms under ac=full and 55 without."""
