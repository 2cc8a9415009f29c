"""A hand-written training loop around a model that Meshwright has parallelized.

torchrun --nproc-per-node 2 examples/own_loop.py
"""

import torch
import torch.nn.functional as F
from torch.optim import AdamW
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, DistributedSampler

import meshwright as mw
from gpt import GPT, LENGTH
from stdlib_text import StdlibText

STEPS = 60
BATCH = 16
MICRO_BATCHES = 2


def main() -> None:
    model, optimizer, scheduler = mw.parallelize(
        GPT,
        "fsdp",
        optimizer=lambda params: AdamW(params, lr=1e-3),
        scheduler=lambda optimizer: CosineAnnealingLR(optimizer, STEPS),
    )
    data = StdlibText(LENGTH)
    sampler = DistributedSampler(data, model.data_ranks, model.data_rank, seed=0)
    batches = iter(DataLoader(data, BATCH // model.data_ranks // MICRO_BATCHES, sampler=sampler, drop_last=True))

    for step in range(1, STEPS + 1):
        for _ in range(MICRO_BATCHES):
            batch = next(batches)
            logits = model(batch["x"].to(model.device))
            loss = F.cross_entropy(logits.flatten(0, 1), batch["y"].flatten().to(model.device))
            (loss / MICRO_BATCHES).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if model.world.is_main and step % 10 == 0:
            print(f"step {step}: loss {loss.item():.3f} on this rank, gradient norm {norm.item():.3f}")
    model.close()


if __name__ == "__main__":
    main()
