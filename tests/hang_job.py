"""A job that trains soundly, or hangs on rank 1 in the way that MESHWRIGHT_TEST_HANG says, in its step 6."""

import os
import signal
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import get_worker_info

from meshwright import Job
from meshwright.assemble.batch import Share
from meshwright.environment import own_rank
from meshwright.launch.heartbeat import own_heartbeat
from meshwright.runtime.data import Order

HOW = os.environ.get("MESHWRIGHT_TEST_HANG", "")
AT = 6
BATCH, SAMPLES = 8, 64
_order = Order(samples=SAMPLES, global_batch=BATCH, seed=0, share=Share(ranks=2, rank=1))
SPOILED = next(_order.parts((AT - 1) * BATCH)).indices[0]
"""A sample of rank 1 in step 6."""


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 16), nn.Linear(16, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        step = own_heartbeat().last.step + 1
        if step >= AT:  # what is run before the first step is run by rank 0 alone
            misbehave(own_rank() == 1, step)
        return self.second(torch.tanh(self.first(x)))


def misbehave(odd: bool, step: int) -> None:
    if HOW == "skipped":
        if not odd or step > AT:
            dist.barrier()  # line of the others
    elif HOW == "other":
        if odd:
            dist.barrier()  # line of rank 1
        else:
            dist.broadcast(torch.ones(5), src=0)
    elif HOW == "asleep" and odd:
        time.sleep(1000)  # line of the sleeper
    elif HOW == "slow":
        time.sleep(0.4 if odd else 0.2)


class Data:
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if get_worker_info() is not None and own_rank() == 1 and index == SPOILED:
            if HOW == "stopped loader":
                os.kill(os.getpid(), signal.SIGSTOP)
            if HOW == "stuck loader":
                time.sleep(1000)  # line of the loader
        generator = torch.Generator().manual_seed(index)
        return {"x": torch.randn(4, generator=generator), "y": torch.randn(2, generator=generator)}


job = Job(
    model=Net,
    inputs=lambda batch: (batch["x"],),
    loss=lambda output, batch: (((output - batch["y"]) ** 2).sum(), len(output)),
    optimizer=lambda params: torch.optim.SGD(params, lr=0.01),
    sample=lambda n: {"x": torch.randn(n, 4), "y": torch.randn(n, 2)},
    data=Data(),
    global_batch=BATCH,
)
