"""The model's size comes from the data, and padding is ignored in the loss."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset

TEXTS = ["a b c d", "b c a", "d a b c a", "c c b", "a d d b", "b a"]
CONFIG = {"lr": 0.05, "epochs": 6, "batch_size": 6, "hidden": 12}


class Corpus(Dataset):
    def __init__(self, texts):
        words = sorted({word for text in texts for word in text.split()})
        self.index = {word: number + 1 for number, word in enumerate(words)}
        self.rows = [torch.tensor([self.index[word] for word in text.split()]) for text in texts]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index]


class Tagger(nn.Module):
    def __init__(self, size, hidden):
        super().__init__()
        self.embed = nn.Embedding(size, hidden, padding_idx=0)
        self.out = nn.Linear(hidden, size)

    def forward(self, x):
        return self.out(torch.tanh(self.embed(x)))


def pad(rows):
    return pad_sequence(rows, batch_first=True)


def main(config):
    corpus = Corpus(TEXTS)
    torch.manual_seed(0)
    model = Tagger(len(corpus.index) + 1, config["hidden"])
    optimizer = torch.optim.RMSprop(model.parameters(), lr=config["lr"])
    loader = DataLoader(corpus, batch_size=config["batch_size"], shuffle=True, collate_fn=pad)
    for _ in range(config["epochs"]):
        for tokens in loader:
            source, target = tokens[:, :-1], tokens[:, 1:]
            logits = model(source)
            loss = F.cross_entropy(logits.reshape(-1, logits.size(-1)), target.reshape(-1), ignore_index=0)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            print("loss", loss.item())


if __name__ == "__main__":
    main(CONFIG)
