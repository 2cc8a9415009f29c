"""A script in the shape of language model loops: accumulation, clipping, a rate set by hand, evaluation in between."""

import torch
import torch.nn.functional as F

torch.manual_seed(0)
text = torch.randint(0, 16, (400,))
model = torch.nn.Sequential(torch.nn.Embedding(16, 8), torch.nn.Linear(8, 32), torch.nn.GELU(), torch.nn.Linear(32, 16))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
evaluated = []


def get_batch():
    starts = torch.randint(len(text) - 9, (4,))
    x = torch.stack([text[i : i + 8] for i in starts])
    y = torch.stack([text[i + 1 : i + 9] for i in starts])
    return x, y


def loss_of(x, y):
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten())


for step in range(4):
    for group in optimizer.param_groups:
        group["lr"] = 1e-2 / (step + 1)
    if step % 2 == 0:
        model.eval()
        with torch.no_grad():
            evaluated.append(loss_of(text[None, :8], text[None, 1:9]).item())
        model.train()
    for _ in range(2):
        x, y = get_batch()
        (loss_of(x, y) / 2).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
