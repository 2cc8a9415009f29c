"""A hand-written training loop around a model that Meshwright has parallelized.

torchrun --nproc-per-node 2 examples/own_loop.py
"""

import torch.nn.functional as F
from torch.optim import AdamW
from torch.utils.data import DataLoader, DistributedSampler

import meshwright as mw
from gpt import GPT, LENGTH
from stdlib_text import StdlibText

STEPS = 60
BATCH = 16
MICRO_BATCHES = 2


def main() -> None:
    parallel = mw.parallelize(GPT, "fsdp", seed=0)
    optimizer = AdamW(parallel.parameters(), lr=1e-3)

    data = StdlibText(LENGTH)
    sampler = DistributedSampler(data, parallel.data_ranks, parallel.data_rank, seed=0)
    batches = DataLoader(data, BATCH // parallel.data_ranks // MICRO_BATCHES, sampler=sampler, drop_last=True)

    for number, batch in enumerate(batches, start=1):
        last = number % MICRO_BATCHES == 0  # gradients are reduced once per step
        with parallel.micro_batch(last=last):
            logits = parallel(batch["x"].to(parallel.device))
            loss = F.cross_entropy(logits.flatten(0, 1), batch["y"].flatten().to(parallel.device))
            parallel.backward(loss / MICRO_BATCHES, last=last)
        if not last:
            continue
        parallel.clip_(1.0)
        optimizer.step()
        parallel.updated()
        step = number // MICRO_BATCHES
        if parallel.data_rank == 0 and step % 10 == 0:
            print(f"step {step}: loss {loss.item():.3f} on this rank")
        if step == STEPS:
            break
    parallel.close()


if __name__ == "__main__":
    main()
