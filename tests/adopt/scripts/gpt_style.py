"""Settings as globals, a config object, decay groups, a hand-written learning rate, and a loss inside the model."""

import math
import os
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

block_size = 12
n_embd = 16
vocab_size = 11
batch_size = 8
learning_rate = 1e-2
min_lr = 1e-3
warmup_iters = 2
max_iters = 6
grad_clip = 1.0
init_from = "scratch"

ddp = int(os.environ.get("RANK", -1)) != -1 and False
torch.manual_seed(0)


@dataclass
class Config:
    block_size: int
    vocab_size: int
    n_embd: int


class GPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.token = nn.Embedding(config.vocab_size, config.n_embd)
        self.place = nn.Embedding(config.block_size, config.n_embd)
        self.norm = nn.LayerNorm(config.n_embd)
        self.head = nn.Linear(config.n_embd, config.vocab_size)

    def forward(self, idx, targets=None):
        x = self.token(idx) + self.place(torch.arange(idx.shape[1], device=idx.device))
        logits = self.head(torch.relu(self.norm(x)))
        loss = None
        if targets is not None:
            loss = F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))
        return logits, loss


class Text(Dataset):
    def __init__(self):
        self.data = torch.randint(vocab_size, (100,), generator=torch.Generator().manual_seed(6))

    def __len__(self):
        return 8

    def __getitem__(self, index):
        chunk = self.data[index * 5 : index * 5 + block_size + 1]
        return chunk[:-1], chunk[1:]


model_args = dict(block_size=block_size, n_embd=n_embd, vocab_size=None)
if init_from == "scratch":
    model_args["vocab_size"] = vocab_size
    model = GPT(Config(**model_args))
else:
    model = torch.load(init_from)

decay = [p for n, p in model.named_parameters() if p.dim() >= 2]
other = [p for n, p in model.named_parameters() if p.dim() < 2]
optimizer = torch.optim.AdamW(
    [{"params": decay, "weight_decay": 0.1}, {"params": other, "weight_decay": 0.0}],
    lr=learning_rate,
    betas=(0.9, 0.95),
)


def get_lr(it):
    if it < warmup_iters:
        return learning_rate * (it + 1) / (warmup_iters + 1)
    ratio = (it - warmup_iters) / (max_iters - warmup_iters)
    return min_lr + 0.5 * (1.0 + math.cos(math.pi * ratio)) * (learning_rate - min_lr)


loader = DataLoader(Text(), batch_size=batch_size, shuffle=True)
iter_num = 0
while iter_num < max_iters:
    for X, Y in loader:
        lr = get_lr(iter_num)
        for param_group in optimizer.param_groups:
            param_group["lr"] = lr
        logits, loss = model(X, Y)
        loss.backward()
        if grad_clip != 0.0:
            torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        print("loss", loss.item())
        iter_num += 1
