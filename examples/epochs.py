"""The network of `cnn.py` with what scripts have around it: epochs, evaluation, averaged weights, an early stop.

meshwright train examples/epochs.py --strategy ddp --ranks 2 --epochs 3 --out runs/epochs
meshwright checkpoint export runs/epochs --to torch --ema --out averaged
"""

from typing import Any

from torch import Tensor
from torch.optim import AdamW
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import Dataset, Subset

from cnn import CNN
from images import Images, class_loss, sample
from meshwright import EarlyStop, Evaluation, Job

HELD_OUT = 8
"""One image in so many is for evaluation."""


def images(*, held_out: bool) -> Dataset[Any]:
    whole = Images()
    return Subset(whole, [index for index in range(len(whole)) if (index % HELD_OUT == 0) == held_out])


def accuracy(logits: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    return (logits.argmax(-1) == batch["y"]).sum(), len(batch["y"])


def log(event: Any) -> None:
    if event.is_main and event.step % 10 == 0:
        print(f"step {event.step}: loss {event.loss:.4f}, norm {event.grad_norm:.3f}")


job = Job(
    model=CNN,
    inputs=lambda batch: (batch["x"],),
    loss=class_loss,
    optimizer=lambda params: AdamW(params.groups({"*.bias": {"weight_decay": 0.0}}), lr=1e-3, weight_decay=0.05),
    schedule=lambda optimizer: StepLR(optimizer, 1, gamma=0.7),
    schedule_by="epoch",
    max_norm=1.0,
    data=lambda: images(held_out=False),
    sample=sample,
    global_batch=64,
    evaluation=Evaluation(data=lambda: images(held_out=True), metrics={"accuracy": accuracy}, weights="ema"),
    ema=0.95,
    early_stop=EarlyStop(metric="accuracy", better="higher", patience=5),
    on_step=log,
)
