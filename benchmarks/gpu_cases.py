"""Steps to measure on a GPU: a job by its name and batch, a strategy, and the rank of a world."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
import unseen_eighth_jobs  # noqa: F401  # adds its jobs to the others
import unseen_fifth_jobs  # noqa: F401
import unseen_fourth_jobs  # noqa: F401
import unseen_jobs
import unseen_second_jobs  # noqa: F401
import unseen_seventh_jobs  # noqa: F401
import unseen_sixth_jobs  # noqa: F401
import unseen_third_jobs  # noqa: F401
from torch import nn

import meshwright as mw
from meshwright.jobs.load import load_job

STEPS = 5
T5, TORCH = "t5-large", "torch-transformer"


@dataclass(frozen=True)
class Case:
    job: str
    strategy: str
    ranks: int = 1
    rank: int = 0
    steps: int = STEPS


class EncoderDecoder(nn.Module):
    """PyTorch's own transformer, of the size of T5-large, with a vocabulary around it."""

    def __init__(self, width: int = 1024, layers: int = 24, vocabulary: int = 32128) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.body = nn.Transformer(width, 16, layers, layers, 4096, dropout=0.1, batch_first=True, norm_first=True)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1], device=target.device)
        body = self.body(self.embedding(source), self.embedding(target), tgt_mask=mask, tgt_is_causal=True)
        return self.head(body)


def _translation(batch: int, length: int = 512, vocabulary: int = 32128) -> mw.Job:
    """Tokens to tokens."""

    def loss(output: torch.Tensor, batch: torch.Tensor) -> tuple[torch.Tensor, int]:
        target = batch[:, 1].flatten()
        return F.cross_entropy(output.flatten(0, 1), target, reduction="sum"), target.numel()

    return mw.Job(
        model=EncoderDecoder,
        inputs=lambda batch: (batch[:, 0], batch[:, 1]),
        loss=loss,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-4, fused=True),
        sample=lambda count: torch.randint(vocabulary, (count, 2, length)),
        global_batch=batch,
    )


def job_of(text: str) -> mw.Job:
    """The job of `MODEL,batch=SAMPLES`."""
    model, _, batch = text.rpartition("batch=")
    return replace(job_of_model(model.rstrip(":,")), global_batch=int(batch))


def job_of_model(name: str) -> mw.Job:
    if name in unseen_jobs.JOBS:
        return unseen_jobs.JOBS[name]()
    if name == TORCH:
        return _translation(batch=1)
    if name != T5:
        return load_job(name)
    from transformers import T5Config

    with tempfile.TemporaryDirectory() as folder:
        T5Config(d_model=1024, d_kv=64, d_ff=4096, num_layers=24, num_heads=16, vocab_size=32128).save_pretrained(
            folder
        )
        return load_job(f"hf:{folder}:seq=512")
