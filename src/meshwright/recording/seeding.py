"""Seed torch's generators without the price of devices that the machine does not have."""

from __future__ import annotations

import torch


def seed_torch(seed: int) -> None:
    """`torch.manual_seed`, which takes milliseconds on a machine without an accelerator.

    There it queues the seed of each kind of device, with a stack trace, for a first use that never comes.
    """
    if torch.accelerator.is_available():
        torch.manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)
