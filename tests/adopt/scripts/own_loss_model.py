"""A model that returns its loss, as Hugging Face's do; batches are given as keywords."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset
from tqdm.auto import tqdm


@dataclass
class Output:
    loss: torch.Tensor
    logits: torch.Tensor


class LanguageModel(nn.Module):
    def __init__(self, vocabulary=20, width=8):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.mix = nn.Linear(width, width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, input_ids, labels):
        logits = self.head(torch.tanh(self.mix(self.embed(input_ids))))
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return Output(loss=loss, logits=logits)


class Rows(Dataset):
    def __init__(self):
        generator = torch.Generator().manual_seed(8)
        self.rows = torch.randint(20, (8, 7), generator=generator)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return {"input_ids": self.rows[index, :-1], "labels": self.rows[index, 1:]}


if __name__ == "__main__":
    device = "cuda" if torch.cuda.is_available() else "cpu"
    loader = DataLoader(Rows(), batch_size=8, shuffle=True)
    torch.manual_seed(0)
    model = LanguageModel()
    model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for epoch in range(6):
        model.train()
        for step, batch in enumerate(tqdm(loader, disable=True)):
            batch = {k: v.to(device) for k, v in batch.items()}
            outputs = model(**batch)
            loss = outputs.loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            print("loss", loss.detach().float().item())
