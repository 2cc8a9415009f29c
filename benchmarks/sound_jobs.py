"""Jobs for `sound_runs.py` that are sound, and do slowly what a watch could take for a hang."""

import time
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import AdamW

from meshwright import Evaluation, Job
from meshwright.launch.heartbeat import own_heartbeat

WIDTH, SAMPLES = 64, 512
PAUSE_S = 6.0
"""Longer than the patience of the tight watch."""


class Data:
    """`reading`: seconds that a sample takes; `waits`: seconds that the slowest sample takes, one in sixteen."""

    def __init__(self, *, reading: float = 0.0, waits: float = 0.0, samples: int = SAMPLES) -> None:
        self.reading, self.waits, self.samples = reading, waits, samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        time.sleep(self.reading if index % 16 else self.waits)
        row = torch.randn(WIDTH, generator=torch.Generator().manual_seed(index))
        return {"x": row, "y": row.flip(0)}


class SlowFirstStep(nn.Linear):
    """Forward passes take long until a step has ended, as when kernels are tuned."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training and own_heartbeat().last.step == 0:
            time.sleep(PAUSE_S)
        return super().forward(x)


def build(first: type[nn.Linear] = nn.Linear) -> nn.Module:
    return nn.Sequential(first(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))


def pause(event: object) -> None:
    time.sleep(PAUSE_S)


job = Job(
    model=build,
    inputs=lambda batch: (batch["x"],),
    loss=lambda output, batch: (F.mse_loss(output, batch["y"], reduction="sum"), len(output)),
    optimizer=lambda params: AdamW(params, lr=1e-3),
    sample=lambda n: {"x": torch.randn(n, WIDTH), "y": torch.randn(n, WIDTH)},
    data=lambda: Data(reading=0.02),
    global_batch=8,
)
slow_start = replace(job, model=lambda: build(SlowFirstStep))
slow_save = replace(job, on_save=pause)
slow_evaluation = replace(
    job, evaluation=Evaluation(data=lambda: Data(reading=PAUSE_S / 64, samples=64), every=60, each_epoch=False)
)
uneven_loader = replace(job, data=lambda: Data(reading=0.01, waits=0.3))
